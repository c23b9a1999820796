"""States made where they rest, layer by layer.

What rests on the host is larger than the devices are, so that neither a new state nor one in a new
layout may be on the device as a whole. Both are given as a function from the number of a layer to
the state of a model with this layer alone:

>>> one_layer(i).params                         # {"head": [M, V], "layers": {"w": [1, M, H]}}
>>> build(one_layer, abstract).params           # {"head": [M, V], "layers": {"w": [L, M, H]}}

A stack is made in a scan, whose results the compiler writes where the stack rests; unrolled layers
are made one after another by one program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.foundation.pytrees import Tree, flatten_named, map_named
from m6jax.layouts import offload
from m6jax.layouts.layout import STACK, run_of, stack_key, without_run

OneLayer = Callable[..., Tree]  # (int32[] number of a layer, *arguments) -> state of this layer


def build(one_layer: OneLayer, abstract: Tree, *args: Any) -> Tree:
    """Returns a state, made where `abstract` says that it lies.

    Args:
      one_layer: gives the state with one layer: leaves under `layers` (in any run) with a leading
        axis of 1, or the leaves of the layer under `layers_0`; what else there is does not depend
        on the number.
      abstract: the state's ShapeDtypeStructs with shardings.
      *args: arrays that `one_layer` takes besides.
    """
    if any(stack_key(name) == STACK for name, _ in flatten_named(abstract)):
        return stacked_builder(one_layer, abstract)(*args)
    return _build_unrolled(one_layer, abstract, *args)


def stacked_builder(one_layer: OneLayer, abstract: Tree) -> Any:
    """Returns the jitted function (*args) that makes a state with stacked layers; see `build`."""
    groups: dict[Any, dict[str, Any]] = {}  # (run, U): leaves that are made in one scan
    for name, leaf in flatten_named(abstract):
        if stack_key(name) == STACK:
            groups.setdefault((run_of(name), leaf.shape[0]), {})[name] = leaf

    def make(*args: Any) -> Tree:
        values = _by_name(one_layer(jnp.int32(0), *args))
        for (run, unit), own in groups.items():

            def make_layer(_: None, i: jax.Array, own: dict[str, Any] = own) -> tuple[None, Any]:
                layer = _by_name(one_layer(i, *args))
                return None, {n: offload.like(layer[without_run(n)][0], own[n]) for n in own}

            numbers = jnp.arange(unit) + (run.first if run else 0)
            values |= jax.lax.scan(make_layer, None, numbers)[1]
        return map_named(lambda name, _: values[name], abstract)

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))


def _build_unrolled(one_layer: OneLayer, abstract: Tree, *args: Any) -> Tree:
    first = f"{STACK}_0"
    groups: dict[str | None, dict[str, Any]] = {}  # layer's key, or None: {name: sharding}
    for name, leaf in flatten_named(abstract):
        key = stack_key(name)
        own = name if key is None else name.replace(key, first, 1)
        groups.setdefault(key, {})[own] = leaf.sharding
    programs: dict[Any, Any] = {}  # layers that rest alike are made by one program
    values: dict[str, Any] = {}
    for key, shardings in groups.items():

        def make(i: jax.Array, *args: Any, shardings: dict[str, Any] = shardings) -> Any:
            layer = _by_name(one_layer(i, *args))
            return {name: layer[name] for name in shardings}

        number = 0 if key is None else int(key.removeprefix(f"{STACK}_"))
        program = programs.setdefault(
            tuple(shardings.items()), jax.jit(make, out_shardings=shardings)
        )
        # Awaited, so that no two layers are under way.
        made = jax.block_until_ready(program(jnp.int32(number), *args))
        values |= {n if key is None else n.replace(first, key, 1): x for n, x in made.items()}
    return map_named(lambda name, _: values[name], abstract)


def _by_name(layer: Tree) -> dict[str, Any]:
    return {without_run(name): leaf for name, leaf in flatten_named(layer)}
