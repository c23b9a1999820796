"""Timing for benchmarks: everything that is compared is timed in turns, in one process.

Machines are shared and noisy; what disturbs one turn disturbs all contenders of it alike, so ratios
of medians hold where bare seconds do not.
"""

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def in_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of every call, `rounds` calls of each contender, one after another."""
    for call in contenders.values():
        jax.block_until_ready(call())  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def product_with_gradients(names: str, left: tuple[int, ...], right: tuple[int, ...], dtype: Any):
    """Returns a call that makes one matrix product and the two of its gradients, and their FLOPs.

    Args:
      names: einsum of the product, such as 'tm,mh->th'.
      left: shape of the first operand.
      right: shape of the second.
      dtype: type of both.
    """
    inputs, output = names.split("->")
    first, second = inputs.split(",")
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.normal(keys[0], left, dtype)
    b = jax.random.normal(keys[1], right, dtype)
    sizes = dict(zip(first, left, strict=True)) | dict(zip(second, right, strict=True))
    c = jax.random.normal(keys[2], tuple(sizes[n] for n in output), dtype)

    @jax.jit
    def call(a: Any, b: Any, c: Any) -> Any:
        return (
            jnp.einsum(names, a, b),
            jnp.einsum(f"{output},{second}->{first}", c, b),
            jnp.einsum(f"{first},{output}->{second}", a, c),
        )

    flops = 6
    for size in sizes.values():
        flops *= size
    return lambda: call(a, b, c), flops


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def peak_rss_mb() -> float:
    """Returns the largest resident memory of this process so far in MB (10^6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
