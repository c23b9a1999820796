"""How much the uses of a shared weight agree on where it should go.

In the expanded layout every layer has its own gradient. While layers share weights, those of two
uses of one weight say whether sharing holds the layers back: if they point the same way, one step
serves both; if they do not, what the step gains in one layer it loses in the other.

    layers  0 1 0 1 0 1    (L = 6, U = 2)    pairs (0, 2) (1, 3) (2, 4) (3, 5): a use and the next

Compared is Pearson's correlation of the gradients' elements, as numpy.corrcoef has it, for every
leaf, and for all leaves together as one long vector.

The expanded gradients are those of the Real Giant and need not fit. So between two uses autodiff
keeps one gradient for each distinct layer, as a training step of the stage does: where that adds a
use's gradient to those of later uses, here the two are compared, and the new one takes the place of
the old one. Weights on the host come to the device layer by layer.

Axis letters: B rows, T length, M width (embed), U distinct layers, L uses.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout, LayoutError, layer_slices, offload
from m6jax.modeling import balancing
from m6jax.modeling.block import Batch, StackOutput, join_pattern
from m6jax.modeling.config import Remat
from m6jax.modeling.stack import rematerialize
from m6jax.modeling.transformer import Transformer
from m6jax.training import losses
from m6jax.training.losses import Loss


@struct.dataclass
class Agreement:
    """Correlations of gradients of neighbouring uses.

    A pair in which a gradient has no variance, such as zeros, has the correlation 0.

    Attributes:
      by_layer: float32[L - U], use i against the next use of the same weights, all leaves with a
        next use taken together; U is the smallest unit.
      by_leaf: the same for each leaf that is shared, by its path inside of a layer; [L - U] with
        its own unit.
    """

    by_layer: jax.Array
    by_leaf: dict[str, jax.Array]

    def metrics(self) -> dict[str, Any]:
        """Returns what goes into a run's metrics: the values, and their means."""
        by_leaf = {f"gradient_agreement/{name}": r.mean() for name, r in self.by_leaf.items()}
        whole = {
            "gradient_agreement": self.by_layer.mean(),
            "gradient_agreement_by_layer": self.by_layer,
        }
        return whole | by_leaf


@struct.dataclass
class _Moments:
    """Of the n elements of two gradients: means, and sums of products of deviations from them."""

    n: jax.Array
    means: tuple[jax.Array, jax.Array]
    products: jax.Array
    squares: tuple[jax.Array, jax.Array]


def gradient_agreement(
    params: Tree,
    batch: Batch,
    router_bias: Tree | None = None,
    *,
    model: Transformer,
    layout: Layout,
    loss: Loss,
) -> Agreement:
    """Compares the gradients of neighbouring uses on one batch, without dropout.

    Args:
      params: parameters in the given layout; those of the stack may rest on the host.
      batch: see `Transformer.apply` and `losses.loss_sums`.
      router_bias: biases of routers that have any.
      model: the network.
      layout: how its stack lies.
      loss: what is minimised.

    Raises:
      LayoutError: every layer has its own weights.
    """
    if not shares(layout, model.layer_names()):
        raise LayoutError(
            f"each of the {layout.depth} layers has its own weights: there are no two uses of one"
            " weight whose gradients could agree"
        )
    context = model.context(batch, None)
    stack = params[layouts.STACK]
    biases = None if router_bias is None else router_bias[layouts.STACK]

    def one_use(carry: Any, inputs: Any) -> tuple[Any, Any]:
        x, later = carry
        use, moments = inputs
        layer, later = _compared(_layer(stack, use), later, use, moments)
        own = None if biases is None else _layer(biases, use)
        y, report = model.block(balancing.join(layer, own), x, context, use)
        return (y, later), report

    rest = {key: value for key, value in params.items() if key != layouts.STACK}
    weight, head = losses.batch_weight(batch), model.head_params(rest)
    uses = jnp.arange(layout.depth, dtype=jnp.int32)

    def total(moments: Tree) -> jax.Array:
        none_yet = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), stack)
        body = rematerialize(one_use, Remat.FULL, in_scan=True)
        (x, _), reports = jax.lax.scan(body, (model.embed(rest, batch), none_yet), (uses, moments))
        output = StackOutput(x, join_pattern(reports.router))
        moe = model.config.moe
        return losses.loss_sums(model.logits, head, output, batch, weight, loss, moe).total

    none = jnp.zeros(layout.depth, jnp.float32)
    moments = jax.tree.map(lambda _: _Moments(none, (none, none), none, (none, none)), stack)
    return _agreement(jax.grad(total)(moments), layout)


def shares(layout: Layout, names: Iterable[str]) -> bool:
    """Whether any of these leaves of a layer has more than one use."""
    return any(layout.unit_of(name) < layout.depth for name in names)


def _layer(stack: Tree, use: jax.Array) -> Tree:
    """Returns the weights of a use, on the device."""
    return offload.to_device(jax.tree.map(lambda leaf: layer_slices.take(leaf, use), stack))


@jax.custom_vjp
def _compared(layer: Tree, later: Tree, use: jax.Array, moments: Tree) -> tuple[Tree, Tree]:
    """Returns the first two arguments, and has autodiff compare gradients instead of adding them.

    Args:
      layer: weights of a use; they are given no gradient.
      later: tree like the stack, only there for its gradient: that of the next use of each weight.
      use: int32[], number of the use.
      moments: tree of `_Moments`, only there for its gradient: those of this pair of uses.
    """
    del use, moments
    return layer, later


def _compared_forward(
    layer: Tree, later: Tree, use: jax.Array, moments: Tree
) -> tuple[tuple[Tree, Tree], jax.Array]:
    return _compared(layer, later, use, moments), use


def _compared_backward(use: jax.Array, grads: tuple[Tree, Tree]) -> tuple[None, Tree, None, Tree]:
    layer, later = grads
    moments = jax.tree.map(_moments, layer, _layer(later, use))
    own = jax.tree.map(
        lambda leaf, new: layer_slices.put(leaf, new, use % leaf.shape[0]), later, layer
    )
    return None, own, None, moments


_compared.defvjp(_compared_forward, _compared_backward)


def _moments(left: jax.Array, right: jax.Array) -> _Moments:
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    means = left.mean(), right.mean()
    left, right = left - means[0], right - means[1]
    products, squares = (left * right).sum(), (jnp.square(left).sum(), jnp.square(right).sum())
    return _Moments(jnp.float32(left.size), means, products, squares)


def _agreement(moments: Tree, layout: Layout) -> Agreement:
    """Makes correlations of moments whose leaves have a leading axis L, the first use of a pair."""
    by_name = dict(pytrees.flatten_named(moments, is_leaf=lambda node: isinstance(node, _Moments)))
    shared = {}
    for name, leaf in by_name.items():
        pairs = layout.depth - layout.unit_of(f"{layouts.STACK}/{name}")
        if pairs:
            # Uses without a next one weigh nothing where leaves are taken together.
            paired = jnp.arange(layout.depth) < pairs
            shared[name] = pairs, jax.tree.map(lambda m, p=paired: jnp.where(p, m, 0), leaf)
    longest = max(pairs for pairs, _ in shared.values())
    whole = _together([leaf for _, leaf in shared.values()])
    return Agreement(
        by_layer=_correlation(whole)[:longest],
        by_leaf={name: _correlation(leaf)[:pairs] for name, (pairs, leaf) in shared.items()},
    )


def _together(parts: list[_Moments]) -> _Moments:
    """Returns the moments of all parts as one vector, from theirs."""
    n = jnp.maximum(sum(part.n for part in parts), 1.0)
    left, right = (sum(part.n * part.means[i] for part in parts) / n for i in (0, 1))
    products = squares_left = squares_right = jnp.zeros_like(n)
    for part in parts:
        off_left, off_right = part.means[0] - left, part.means[1] - right
        products += part.products + part.n * off_left * off_right
        squares_left += part.squares[0] + part.n * off_left**2
        squares_right += part.squares[1] + part.n * off_right**2
    return _Moments(n, (left, right), products, (squares_left, squares_right))


def _correlation(moments: _Moments) -> jax.Array:
    # Two roots, since the product of two tiny squares would be zero in float32.
    size = jnp.sqrt(moments.squares[0]) * jnp.sqrt(moments.squares[1])
    return jnp.where(size > 0, moments.products / jnp.where(size > 0, size, 1.0), 0.0)
