"""What an update changes, taken apart: the rest and the stack, or one layer, each updated alone.

An optimizer's state is some trees shaped like the parameters, whatever else it is. Every dictionary
with layers in it is divided in the same way:

>>> rest, stack = split(Trained({"head": h, "layers": w}, AdamState(...), None))
>>> rest.params, stack.params
({'head': h}, {'layers': w})
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from m6jax import layouts, pytrees
from m6jax.layouts import stack_key
from m6jax.pytrees import Tree
from m6jax.train_step import Update, average, descend, shrink_to


@struct.dataclass
class Trained:
    """What an update changes: of the whole model, of the stack, or of one layer.

    Attributes:
      params: parameters.
      opt_state: the optimizer's state.
      averaged: moving average of the parameters, or None.
    """

    params: Tree
    opt_state: Any
    averaged: Tree | None


def update_one(
    part: Trained,
    grads: Tree,
    tx: optax.GradientTransformation,
    rate: jax.Array,
    update: Update,
) -> tuple[Trained, jax.Array]:
    """Returns a layer (or the rest) after its update, and its gradient's sum of squares."""
    square = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))
    if update.clip_norm is not None:
        shrink = shrink_to(update.clip_norm, jnp.sqrt(square))
        grads = jax.tree.map(lambda g: g * shrink.astype(g.dtype), grads)
    directions, opt_state = tx.update(grads, part.opt_state, part.params)
    params = descend(part.params, directions, rate)
    averaged = part.averaged
    if update.average_decay is not None and averaged is not None:
        averaged = average(averaged, params, update.average_decay)
    return Trained(params, opt_state, averaged), jnp.asarray(square)


def axes_without_layers(axes: Tree) -> Tree:
    """Returns the logical axes as one layer has them."""
    if layouts.STACK not in axes:
        return axes
    is_names = lambda node: type(node) is tuple  # noqa: E731
    one = jax.tree.map(lambda names: names[1:], axes[layouts.STACK], is_leaf=is_names)
    return axes | {layouts.STACK: one}


def split(trained: Trained) -> tuple[Trained, Trained]:
    """Separates what is outside of the stack from the stack, in every parameter-shaped tree.

    Raises:
      ValueError: an optimizer's state with a leaf in no such tree, which has no layers to stream.
    """
    for name, node in pytrees.flatten_named(trained, is_leaf=_has_layers):
        if not _has_layers(node):
            raise ValueError(f"{name}: is in no tree shaped like the parameters")
    return pick(trained, lambda key: key is None), pick(trained, lambda key: key is not None)


def pick(trained: Trained, wanted: Callable[[str | None], bool]) -> Trained:
    """Returns the entries whose layer key (None outside of the stack) is wanted."""
    return jax.tree.map(
        lambda node: {k: v for k, v in node.items() if wanted(stack_key(k))},
        trained,
        is_leaf=_has_layers,
    )


def join(first: Trained, *others: Trained) -> Trained:
    """Puts together what `pick` took apart."""
    is_dict = lambda node: isinstance(node, dict)  # noqa: E731
    return jax.tree.map(
        lambda *nodes: {k: v for node in nodes for k, v in node.items()},
        first,
        *others,
        is_leaf=is_dict,
    )


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and any(stack_key(key) for key in node)
