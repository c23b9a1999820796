"""From gradients to new weights: for a whole model, a layer, or a stack in host memory.

`update_weights` is the update of whatever it is given, since optimizers are separable by layer and
by leaf. What rests on the host cannot be computed with there, and a whole stack may not fit the
device; `update_by_layer` takes one layer of one leaf at a time to the device, and writes it back
in place:

    for each stacked leaf that has anything on the host:
        for i in range(U):                        weights[i], moments[i], gradient[i] to the device
            weights[i], moments[i] = update_weights(...)             and back

The numbers are the same to the bit.

A number that an update would make infinite, though its gradient is finite, stays as it was. Layers
that were updated in place cannot be taken back, so it is too late to leave out the whole update.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from m6jax.foundation.pytrees import Tree, flatten_named, name_of
from m6jax.layouts import STACK, LeafName, layer_slices, offload
from m6jax.optimizers import rounding
from m6jax.optimizers.adam import over_layers


@struct.dataclass
class Weights:
    """What an update changes, of a whole model or of a part of it.

    Attributes:
      params: parameters.
      opt_state: the optimizer's state.
      averaged: moving average of the parameters, or None.
      master: float32 parameters that `params` are rounded from, or None.
      keys: for stochastic rounding, see `rounding.leaf_keys`, or None. They stay.
    """

    params: Tree
    opt_state: Any
    averaged: Tree | None = None
    master: Tree | None = None
    keys: Tree | None = None


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """How gradients become new weights.

    Attributes:
      tx: gives the direction; see `optimizers`.
      rate: float32[], learning rate.
      average_decay: of the moving average; None: it stays.
      finite: bool[], whether there is anything to learn from the gradients; where it is False all
        stays as it was. None: there is.
    """

    tx: optax.GradientTransformation
    rate: jax.Array
    average_decay: float | None = None
    finite: jax.Array | None = None


def update_weights(weights: Weights, grads: Tree, rule: UpdateRule) -> tuple[Weights, Tree]:
    """Returns the weights after an update, in their own types; all on the device.

    Args:
      weights: of the whole model, or some of its leaves in trees of the same form.
      grads: tree like the parameters.
      rule: how.

    Returns:
      The weights, and a tree like the parameters, bool of the same shapes: which of them are finite
      after the update. The others stayed as they were, with their averages and masters.
    """
    exact = weights.params if weights.master is None else weights.master
    tx = optax.with_extra_args_support(rule.tx)
    directions, opt_state = tx.update(grads, weights.opt_state, exact, learning_rate=rule.rate)
    exact = jax.tree.map(lambda p, d: p.astype(jnp.float32) - rule.rate * d, exact, directions)
    params = rounding.to_types(exact, weights.params, weights.keys)
    averaged = weights.averaged
    if rule.average_decay is not None and averaged is not None:
        newest = params if weights.master is None else exact
        # Of the weights as they are kept: computed again inside the average, as compilers like to,
        # they can differ in the last bit, in one program and not in another.
        newest = jax.lax.optimization_barrier(newest)
        averaged = average(averaged, newest, rule.average_decay, weights.keys)
    master = None if weights.master is None else exact
    old = dataclasses.replace(weights, keys=None)
    new = Weights(params, opt_state, averaged, master)
    if rule.finite is not None:
        new = jax.tree.map(functools.partial(jnp.where, rule.finite), new, old)
    finite = jax.tree.map(jnp.isfinite, new.params)

    def choose(new: Tree | None, old: Tree | None) -> Tree | None:
        # After the choice above, not in one with it: XLA would round the weights otherwise in a
        # program that keeps them on the host.
        return None if new is None else jax.tree.map(jnp.where, finite, new, old)

    params, averaged, master = map(
        choose, (new.params, new.averaged, new.master), (old.params, old.averaged, old.master)
    )
    return Weights(params, new.opt_state, averaged, master, weights.keys), finite


def average(averaged: Tree, params: Tree, decay: float, keys: Tree | None = None) -> Tree:
    """Returns the moving average after another set of parameters, rounded like these."""
    exact = jax.tree.map(
        lambda a, p: decay * a.astype(jnp.float32) + (1 - decay) * p.astype(jnp.float32),
        averaged,
        params,
    )
    return rounding.to_types(exact, averaged, keys, purpose=1)


def leaf_squares(grads: Tree) -> Tree:
    """Returns the sums of squares of every leaf, float32: [U] in a stack, else []."""

    def squares(grad: jax.Array, axis: Any = None) -> jax.Array:
        return jnp.sum(jnp.square(grad.astype(jnp.float32)), axis)

    return by_layer(squares, grads)


def by_layer(reduce: Callable[..., jax.Array], tree: Tree) -> Tree:
    """Returns one number for every leaf, or for every layer of it: [U] in a stack, else [].

    Args:
      reduce: function of an array and the axes that it is to reduce, such as `jnp.all`.
      tree: arrays on the host or the device, by names as the parameters have them.
    """

    def layers(leaf: jax.Array) -> jax.Array:
        return reduce(leaf, tuple(range(1, leaf.ndim)))

    def number(path: Any, leaf: jax.Array) -> jax.Array:
        if not LeafName.of(name_of(path)).stacked:
            return reduce(offload.to_device(leaf))
        if offload.on_host(leaf):
            return jax.lax.map(lambda i: layers(_fetch(leaf, i))[0], jnp.arange(leaf.shape[0]))
        # The barrier keeps the order of additions: layers apart, then together, as above.
        return jax.lax.optimization_barrier(layers(leaf))

    return jax.tree_util.tree_map_with_path(number, tree)


def update_by_layer(
    weights: Weights, grads: Tree, shrink: Tree | None, rule: UpdateRule
) -> tuple[Weights, Tree]:
    """Returns the weights after an update, resting where they did.

    Args:
      weights: of the whole model.
      grads: tree like the parameters, of stacks on the host or the device.
      shrink: tree like the parameters, float32: what to multiply the gradients with, [U] in a stack
        or []; None for nothing.
      rule: how.

    Returns:
      The weights, and a tree like the parameters, bool, [U] in a stack, else []: whether all
      numbers of a layer are finite after the update; those that are not stayed as they were.
    """
    moved = _stacks_on_host(weights, grads)
    if not moved:
        now = offload.to_device(weights)
        new, finite = update_weights(now, _shrunk(offload.to_device(grads), shrink), rule)
        return jax.tree.map(offload.like, new, weights), by_layer(jnp.all, finite)
    everything = (weights, grads, shrink)
    rest, rest_grads, rest_shrink = _only(everything, lambda name: name not in moved)
    parts = [update_by_layer(rest, rest_grads, rest_shrink, rule)]
    for name in moved:
        own, own_grads, own_shrink = _only(everything, functools.partial(operator.eq, name))
        parts.append(_update_leaf(own, own_grads, own_shrink, rule))
    return jax.tree.map(lambda *nodes: _merge(nodes), *parts, is_leaf=_is_dict)


def _update_leaf(
    weights: Weights, grads: Tree, shrink: Tree | None, rule: UpdateRule
) -> tuple[Weights, Tree]:
    """Updates one stacked leaf layer by layer, in place."""
    (grad,) = jax.tree.leaves(grads)
    factors = None
    if shrink is not None:
        (factor,) = jax.tree.leaves(shrink)
        factors = jnp.broadcast_to(factor, grad.shape[:1])

    def one_layer(weights: Weights, i: jax.Array) -> tuple[Weights, Tree]:
        layer = jax.tree.map(lambda leaf: _fetch(leaf, i), weights)
        one_grad = jax.tree.map(lambda leaf: _fetch(leaf, i), grads)
        if factors is not None:
            one_grad = _shrunk(one_grad, jax.tree.map(lambda _: _fetch(factors, i), grads))
        new, finite = update_weights(layer, one_grad, rule)
        put = functools.partial(layer_slices.put, i=i)
        return jax.tree.map(put, weights, new), jax.tree.map(jnp.all, finite)

    return jax.lax.scan(one_layer, weights, jnp.arange(grad.shape[0]))


def _stacks_on_host(weights: Weights, grads: Tree) -> list[str]:
    """Returns the names, in the parameters, of stacked leaves with anything on the host."""
    trees = filter(_has_stack, jax.tree.leaves((weights, grads), is_leaf=_has_stack))
    leaves = itertools.chain.from_iterable(map(flatten_named, trees))
    return sorted({n for n, leaf in leaves if LeafName.of(n).stacked and offload.on_host(leaf)})


def _shrunk(grads: Tree, shrink: Tree | None) -> Tree:
    if shrink is None:
        return grads

    return jax.tree.map(lambda g, c: g * over_layers(c, g.ndim).astype(g.dtype), grads, shrink)


def _fetch(leaf: jax.Array, i: jax.Array) -> jax.Array:
    """Copies layer i to the device, as a stack of one."""
    return offload.to_device(layer_slices.take(leaf, i, as_stack=True))


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict)


def _has_stack(node: Any) -> bool:
    return _is_dict(node) and STACK in node


def _only(tree: Any, wanted: Callable[[str], bool]) -> Any:
    """Returns the wanted leaves, by their names in the parameters, of every tree like these."""

    def prune(node: dict[str, Any], above: str) -> dict[str, Any]:
        kept = {}
        for key, value in node.items():
            name = f"{above}{key}"
            if not isinstance(value, dict):
                if wanted(name):
                    kept[key] = value
            elif inner := prune(value, f"{name}/"):
                kept[key] = inner
        return kept

    return jax.tree.map(lambda node: prune(node, ""), tree, is_leaf=_has_stack)


def _merge(nodes: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Puts together what `_only` took apart."""
    merged: dict[str, Any] = {}
    for node in nodes:
        for key, value in node.items():
            both = key in merged and isinstance(value, dict)
            merged[key] = _merge((merged[key], value)) if both else value
    return merged
