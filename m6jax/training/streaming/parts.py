"""What an update changes, taken apart: the rest and the stack, or one layer, each updated alone.

An optimizer's state is some trees shaped like the parameters, whatever else it is. Every dictionary
with layers in it is divided in the same way:

>>> rest, stack = split(Weights({"head": h, "layers": w}, AdamState(...)))
>>> rest.params, stack.params
({'head': h}, {'layers': w})
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import is_names
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout, LeafName, has_layers
from m6jax.optimizers.weight_update import UpdateRule, Weights, update_weights
from m6jax.training.train_step import shrink_to


@struct.dataclass
class Seen:
    """What is kept of gradients and updates, one number for every leaf of a layer, or [U] of U.

    Attributes:
      squares: float32, sums of squares of the gradients.
      finite: bool, whether all numbers are finite after the update.
    """

    squares: Tree
    finite: Tree


def update_one(
    part: Weights, grads: Tree, squares: Tree, rule: UpdateRule, clip_norm: float | None
) -> tuple[Weights, Tree]:
    """Returns a layer (or the rest) after its update, and bool[] for every leaf, see `Seen.finite`.

    Args:
      part: it.
      grads: by its parameters.
      squares: of these, see `layer_squares`.
      rule: how.
      clip_norm: largest norm of its gradient; None: no clipping.
    """
    if clip_norm is not None:
        shrink = shrink_to(clip_norm, norm_of(squares))
        grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)
    weights, finite = update_weights(part, grads, rule)
    return weights, jax.tree.map(jnp.all, finite)


def layer_squares(grads: Tree) -> Tree:
    """Returns float32[] for every leaf, the sum of its squares."""
    return jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), grads)


def norm_of(squares: Tree) -> jax.Array:
    """Returns float32[], the norm of what has these squares."""
    return jnp.sqrt(sum(jax.tree.leaves(squares)))


def axes_without_layers(axes: Tree) -> Tree:
    """Returns the logical axes as one layer has them."""
    if layouts.STACK not in axes:
        return axes
    one = jax.tree.map(lambda names: names[1:], axes[layouts.STACK], is_leaf=is_names)
    return axes | {layouts.STACK: one}


def axes_of(params: Tree, axes: Tree) -> Tree:
    """Returns the logical axes of some of the parameters, None where these have None."""
    return jax.tree.map(
        lambda leaf, names: None if leaf is None else names,
        params,
        {key: axes[key] for key in params},
        is_leaf=lambda node: node is None,
    )


def split(weights: Weights) -> tuple[Weights, Weights]:
    """Separates what is outside of the stack from the stack, in every parameter-shaped tree.

    Raises:
      ValueError: an optimizer's state with a leaf in no such tree, which has no layers to stream.
    """
    for name, node in pytrees.flatten_named(weights, is_leaf=has_layers):
        if not has_layers(node):
            raise ValueError(f"{name}: is in no tree shaped like the parameters")
    return pick(weights, lambda key: key is None), pick(weights, lambda key: key is not None)


def pick(weights: Weights, wanted: Callable[[str | None], bool]) -> Weights:
    """Returns the entries whose layer key (None outside of the stack) is wanted."""
    return jax.tree.map(
        lambda node: {k: v for k, v in node.items() if wanted(LeafName.of(k).key)},
        weights,
        is_leaf=has_layers,
    )


def join(first: Tree, *others: Tree) -> Tree:
    """Puts together what `pick` took apart."""
    is_dict = lambda node: isinstance(node, dict)  # noqa: E731
    return jax.tree.map(
        lambda *nodes: {k: v for node in nodes for k, v in node.items()},
        first,
        *others,
        is_leaf=is_dict,
    )


def runs_of(tree: Tree, layout: Layout) -> list[Tree]:
    """Returns the runs of a stack, each in trees like those of a whole stack, in order."""
    if not layout.borders:
        return [tree]
    return [
        jax.tree.map(
            lambda node, run=run: {layouts.STACK: node[layouts.STACK][run.key]},
            tree,
            is_leaf=has_layers,
        )
        for run in layout.runs
    ]


def join_runs(parts: list[Tree], layout: Layout) -> Tree:
    """The inverse of `runs_of`."""
    if not layout.borders:
        return parts[0]
    keys = [run.key for run in layout.runs]
    return jax.tree.map(
        lambda *nodes: {
            layouts.STACK: {k: n[layouts.STACK] for k, n in zip(keys, nodes, strict=True)}
        },
        *parts,
        is_leaf=has_layers,
    )
