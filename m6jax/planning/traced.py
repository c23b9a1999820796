"""What a traced program asks for: products, what they touch, and copies between host and device.

The reference that the analytic engine is held to: nothing is compiled and nothing is modelled. What
a scan does counts as often as it repeats.

>>> moved_bytes(jax.jit(step).trace(state, batch).jaxpr.jaxpr)
237187891200
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import jaxprs_in_params


def product_flops(jaxpr: Any) -> int:
    """Returns the FLOPs of all matrix products, scans counted out."""

    def own(eqn: Any) -> int:
        if eqn.primitive.name != "dot_general":
            return 0
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        return 2 * inner * math.prod(eqn.outvars[0].aval.shape)

    return _total(jaxpr, own)


def product_bytes(jaxpr: Any) -> int:
    """Returns the bytes of operands and results of all matrix products, scans counted out."""

    def own(eqn: Any) -> int:
        if eqn.primitive.name != "dot_general":
            return 0
        arrays = [array.aval for array in (*eqn.invars, *eqn.outvars)]
        return sum(array.size * array.dtype.itemsize for array in arrays)

    return _total(jaxpr, own)


def moved_bytes(jaxpr: Any) -> int:
    """Returns the bytes that go between host and device, scans counted out."""

    def own(eqn: Any) -> int:
        if eqn.primitive.name != "device_put":
            return 0
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        return sum(
            after.aval.size * after.aval.dtype.itemsize
            for before, after in pairs
            if before.aval.memory_space != after.aval.memory_space
        )

    return _total(jaxpr, own)


def _total(jaxpr: Any, own: Callable[[Any], int]) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = [_total(sub, own) for sub in jaxprs_in_params(eqn.params)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        # Of a conditional's branches the one that does most.
        once = max(inner) if eqn.primitive.name == "cond" else sum(inner)
        total += own(eqn) + once * times
    return total
