"""Steps whose numbers are not finite: what became of the update, and where it was seen first.

A step with NaN or infinity in its loss or gradient changes no weight and no moment. The streamed
step, which has updated the last layers before it knows the gradients of the first, leaves those
layers as they were whose gradient is not finite, and all below them. All this counts as a step, and
its batch as used, so that a run that goes on stays where it is in its data.
"""

import enum
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import LeafName

_BEFORE_THE_STACK = ("embedder/", "patches/")


class Skipped(enum.IntEnum):
    """What of an update was left out; the metric `skipped`."""

    NOTHING = 0
    EVERYTHING = 1
    SOME_LAYERS = 2


def skipped(finite: Bool[Array, ""], layers_finite: Bool[Array, ""]) -> Int[Array, ""]:
    """Returns the metric, int32[].

    Args:
      finite: bool[], of what the whole update depends on.
      layers_finite: bool[], of every layer's gradient.
    """
    some = jnp.where(layers_finite, Skipped.NOTHING, Skipped.SOME_LAYERS)
    return jnp.where(finite, some, Skipped.EVERYTHING)


def places(params: Tree) -> list[tuple[str, int | None]]:
    """Returns every leaf with each of its layers, in the order in which gradients are made.

    Args:
      params: parameters, arrays or ShapeDtypeStructs.

    Returns:
      Names and numbers of layers: what comes after the stack, with None; the last layer, and so on
      to the first; what comes before the stack.
    """
    return [(name, layer) for name, layer, _ in sorted(_places(params), key=lambda place: place[2])]


def first_bad_place(squares: Tree) -> Int[Array, ""]:
    """Returns int32[], the number in `places` of the first gradient that is not finite, or -1.

    Args:
      squares: of the gradients, see `weight_update.leaf_squares`.
    """
    sums = jnp.concatenate([jnp.atleast_1d(s) for _, s in pytrees.flatten_named(squares)])
    order = sorted(range(len(sums)), key=lambda i: _places(squares)[i][2])
    bad = ~jnp.isfinite(sums[jnp.asarray(order)])
    return jnp.where(bad.any(), jnp.argmax(bad), -1).astype(jnp.int32)


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
