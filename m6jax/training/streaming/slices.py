"""One layer of a stack: fetched from the host ahead of its use, and written back.

Leaves of a stack may have units of their own; `None` stands in the place of leaves that are not
concerned, so that a part of a stack has the structure of the whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.foundation.pytrees import Tree
from m6jax.layouts import layer_slices, offload


def fetch(stacks: Tree, use: Any) -> list[jax.Array]:
    """Copies the slices for a use of all leaves on the host to the device."""
    return [
        offload.to_device(layer_slices.take(leaf, use))
        for leaf in jax.tree.leaves(stacks)
        if offload.on_host(leaf)
    ]


def fetch_after(stacks: Tree, use: int, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Does what `fetch` does, not before `x` is there; returns both."""
    number, x = jax.lax.optimization_barrier((jnp.int32(use), x))
    return x, fetch(stacks, number)


def layers_in_body(fetched: list[jax.Array]) -> int:
    """Returns how many layers a scan's body has: two where copies are made ahead.

    A carried array has one buffer. With one layer in the body, the copy of the next layer would
    wait for that buffer until the current layer is done, and nothing would go on beside anything;
    with two, the copies take turns between two buffers.
    """
    return 2 if fetched else 1


def take(stacks: Tree, use: Any, fetched: list[jax.Array]) -> Tree:
    """Returns the layer of a use: what was fetched, and slices of the leaves on the device."""
    ready = iter(fetched)
    return jax.tree.map(
        lambda leaf: next(ready) if offload.on_host(leaf) else layer_slices.take(leaf, use), stacks
    )


def write(stacks: Tree, layer: Tree, i: jax.Array) -> Tree:
    """Returns the stacks with another layer i, resting where they did."""
    return jax.tree.map(lambda leaf, new: layer_slices.put(leaf, new, i), stacks, layer)


def of_units(tree: Tree, smallest: int, largest: int) -> Tree:
    """Returns the leaves of these units, None in the place of others."""
    return jax.tree.map(lambda leaf: leaf if smallest <= leaf.shape[0] <= largest else None, tree)


def nothing(tree: Tree) -> Tree:
    """Returns None in the place of every leaf."""
    return jax.tree.map(lambda _: None, tree)


def map_present(some: Tree, fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Maps (leaf of `some`, those of `trees`), to None where `some` has None."""
    return jax.tree.map(
        lambda leaf, *rest: None if leaf is None else fn(leaf, *rest),
        some,
        *trees,
        is_leaf=_is_none,
    )


def together(some: Tree, others: Tree) -> Tree:
    """Returns the leaves of `some`, and of `others` in the place of None."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf, some, others, is_leaf=_is_none
    )


def _is_none(node: Any) -> bool:
    return node is None
