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
from m6jax.layouts.leaf_name import LeafName

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
    if any(LeafName.of(name).stacked for name, _ in flatten_named(abstract)):
        return stacked_builder(one_layer, abstract)(*args)
    return _build_unrolled(one_layer, abstract, *args)


def stacked_builder(one_layer: OneLayer, abstract: Tree) -> Any:
    """Returns the jitted function (*args) that makes a state with stacked layers; see `build`."""
    groups: dict[range, dict[str, Any]] = {}  # by their layers: leaves that are made in one scan
    for name, leaf in flatten_named(abstract):
        if LeafName.of(name).stacked:
            groups.setdefault(LeafName.of(name).layers(leaf.shape), {})[name] = leaf

    def make(*args: Any) -> Tree:
        values = _by_name(one_layer(jnp.int32(0), *args))
        for layers, own in groups.items():

            def make_layer(_: None, i: jax.Array, own: dict[str, Any] = own) -> tuple[None, Any]:
                layer = _by_name(one_layer(i, *args))
                return None, {n: offload.like(layer[LeafName.of(n).whole][0], own[n]) for n in own}

            values |= jax.lax.scan(make_layer, None, jnp.arange(layers.start, layers.stop))[1]
        return map_named(lambda name, _: values[name], abstract)

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))


def _build_unrolled(one_layer: OneLayer, abstract: Tree, *args: Any) -> Tree:
    # By layer, None outside of the stack: the leaves' names, and what `one_layer` calls them.
    groups: dict[int | None, dict[str, str]] = {}
    for name, _ in flatten_named(abstract):
        leaf = LeafName.of(name)
        groups.setdefault(leaf.number, {})[name] = leaf.in_layer(0)
    place = {name: leaf.sharding for name, leaf in flatten_named(abstract)}
    programs: dict[Any, Any] = {}  # layers that rest alike are made by one program
    values: dict[str, Any] = {}
    for layer_number, own in groups.items():
        shardings = {own[name]: place[name] for name in own}

        def make(i: jax.Array, *args: Any, shardings: dict[str, Any] = shardings) -> Any:
            layer = _by_name(one_layer(i, *args))
            return {name: layer[name] for name in shardings}

        program = programs.setdefault(
            tuple(shardings.items()), jax.jit(make, out_shardings=shardings)
        )
        # Awaited, so that no two layers are under way.
        made = jax.block_until_ready(program(jnp.int32(layer_number or 0), *args))
        values |= {name: made[own[name]] for name in own}
    return map_named(lambda name, _: values[name], abstract)


def _by_name(layer: Tree) -> dict[str, Any]:
    return {LeafName.of(name).whole: leaf for name, leaf in flatten_named(layer)}
