"""Steps whose numbers are not finite: what became of the update, and where it was seen first.

A step with NaN or infinity in its loss or gradient changes no weight and no moment. The streamed
step, which has updated the last layers before it knows the gradients of the first, leaves those
layers as they were whose gradient is not finite, and all below them. In either step a weight that
its own update would make infinite stays as it was, too. All this counts as a step, and its batch as
used, so that a run that goes on stays where it is in its data.

So a state that was finite stays so; `first_bad_leaf` looks at what comes from elsewhere.
"""

import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import LeafName
from m6jax.optimizers.weight_update import by_layer

_BEFORE_THE_STACK = ("embedder/", "patches/")


class Skipped(enum.IntEnum):
    """What of an update was left out; the metric `skipped`."""

    NOTHING = 0
    EVERYTHING = 1
    PART = 2


def what_was_skipped(
    finite: Bool[Array, ""], squares: Tree, finite_after: Tree
) -> dict[str, Int[Array, ""]]:
    """Returns metrics: `skipped`, see `Skipped`, and `bad_place`, see `place_name`; int32[].

    Args:
      finite: bool[], of what the whole update depends on.
      squares: of the gradients, see `weight_update.leaf_squares`.
      finite_after: bool, a tree like `squares`: whether all numbers are finite after the update.
    """
    ranks = [rank for _, _, rank in _places(squares)]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    bad = jnp.concatenate([~_flat(jax.tree.map(jnp.isfinite, squares)), ~_flat(finite_after)])
    both = jnp.asarray(order + [len(order) + i for i in order])
    some = jnp.where(bad.any(), Skipped.PART, Skipped.NOTHING)
    return {
        "skipped": jnp.where(finite, some, Skipped.EVERYTHING).astype(jnp.int32),
        "bad_place": jnp.where(bad.any(), jnp.argmax(bad[both]), -1).astype(jnp.int32),
    }


def place_name(params: Tree, bad_place: int) -> str:
    """Returns what a `bad_place` is: 'in layer 3, in the gradient of layers/mlp/up'.

    Args:
      params: parameters, arrays or ShapeDtypeStructs.
      bad_place: number in `places` of a gradient, or, counted on from there, of a weight that its
        update would make infinite.
    """
    every = places(params)
    name, layer = every[bad_place % len(every)]
    at = "outside of the layers" if layer is None else f"in layer {layer}"
    return f"{at}, in the {'gradient' if bad_place < len(every) else 'update'} of {name}"


def first_bad_leaf(state: Tree) -> str | None:
    """Returns the first leaf of a state with a number that is not finite; None if there is none.

    Must be called by all processes.

    Args:
      state: arrays of one mesh, on the host or the device.
    """
    first: Any = getattr(state, "step", jax.tree.leaves(state)[0])
    sharding = first.sharding
    finite = jax.device_get(_all_finite(sharding)(state))
    for (name, layer, _), each in zip(_places(state), finite, strict=True):
        if not each:
            return f"{name}, layer {layer}" if LeafName.of(name).stacked else name
    return None


@functools.cache
def _all_finite(whole: jax.sharding.Sharding) -> Any:
    """Returns a function from a state to bool[n], of its n leaves' layers; see `_places`."""

    def finite(leaf: jax.Array, axis: Any = None) -> jax.Array:
        return jnp.isfinite(leaf).all(axis)

    return jax.jit(lambda state: _flat(by_layer(finite, state)), out_shardings=whole)


def places(params: Tree) -> list[tuple[str, int | None]]:
    """Returns every leaf with each of its layers, in the order in which gradients are made.

    Args:
      params: parameters, arrays or ShapeDtypeStructs.

    Returns:
      Names and numbers of layers: what comes after the stack, with None; the last layer, and so on
      to the first; what comes before the stack.
    """
    return [(name, layer) for name, layer, _ in sorted(_places(params), key=lambda place: place[2])]


def _flat(tree: Tree) -> jax.Array:
    return jnp.concatenate([jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(tree)])


def _places(tree: Tree) -> list[tuple[str, int | None, tuple[float, str]]]:
    """Returns name, layer and rank of every leaf's layers, in the order of the leaves."""
    found: list[tuple[str, int | None, tuple[float, str]]] = []
    for name, leaf in pytrees.flatten_named(tree):
        if LeafName.of(name).in_stack:
            layers = LeafName.of(name).layers(leaf.shape)
            found += [(name, layer, (-layer, name)) for layer in layers]
        else:
            before = name.startswith(_BEFORE_THE_STACK)
            found.append((name, None, (math.inf if before else -math.inf, name)))
    return found
