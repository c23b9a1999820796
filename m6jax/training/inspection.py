"""A forward pass that is looked at part by part: where the first number is not finite.

The parts are the flax modules of a layer, in the order in which they are done, by the layers in the
order of their uses. It is the pass of a training step: the same rows, the same randomness.

>>> first_bad(look(model, layout, loss, params, part, weight, key))
"layer 3, moe/router: not finite, of an input of at most 2.1e+30; largest weight: moe/up, 1.1e+30"
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout
from m6jax.modeling import balancing
from m6jax.modeling.block import Batch, Block, LayerReport, StackOutput, join_pattern
from m6jax.modeling.stack import apply_stack
from m6jax.modeling.transformer import Transformer
from m6jax.training import losses
from m6jax.training.losses import BatchWeight, Loss


@struct.dataclass
class Look:
    """What was seen of a forward pass over L uses of layers.

    Attributes:
      embedded: bool[], whether the stack's input is finite.
      parts: bool[L] by the path of a module in its layer, whether its results are finite.
      inputs: float32[L], largest absolute number of a layer's input.
      weights: float32[L] by name, largest absolute number of a layer's leaf.
      loss: float32[].
      order: paths of `parts` in the order in which they are done.
    """

    embedded: jax.Array
    parts: dict[str, jax.Array]
    inputs: jax.Array
    weights: dict[str, jax.Array]
    loss: jax.Array
    order: tuple[str, ...] = struct.field(pytree_node=False)


def look(
    model: Transformer,
    layout: Layout,
    loss: Loss,
    params: Tree,
    part: Batch,
    weight: BatchWeight,
    key: jax.Array | None,
) -> Look:
    """Looks at the forward pass of a part of a batch; arguments as those of a loss function.

    Args:
      model: the network.
      layout: how its stack lies.
      loss: what is minimised.
      params: joined with the biases of routers.
      part: rows of a batch.
      weight: of the whole batch.
      key: of the part.
    """
    order: dict[tuple[str, ...], None] = {}
    context = model.context(part, key)

    def note(module: Any, method: str) -> bool:
        if method == "__call__":
            order[module.path] = None
        return method == "__call__"

    def apply(layer: Tree, x: jax.Array, use: jax.Array, _: Any) -> tuple[jax.Array, Any]:
        (y, report), seen = Block(model.config).apply(
            balancing.variables(layer),
            *(x, use, context),
            capture_intermediates=note,
            mutable=["intermediates"],
        )
        finite = {
            _label(path): pytrees.all_finite(_results(seen["intermediates"], path))
            for path in order
        }
        weights = {name: _largest(leaf) for name, leaf in pytrees.flatten_named(layer)}
        assert isinstance(report, LayerReport)
        return y, (report.router, finite, _largest(x), weights)

    rest, stacked = layouts.split_stack(params, layout)
    x = model.embed(rest, part)
    embedded = pytrees.all_finite(x)
    x, (router, parts, inputs, weights) = apply_stack(apply, stacked, x, layout)
    output = StackOutput(x, join_pattern(router))
    head = model.head_params(rest)
    sums = losses.loss_sums(model.logits, head, output, part, weight, loss, model.config.moe)
    return Look(embedded, parts, inputs, weights, sums.total, tuple(map(_label, order)))


def first_bad(seen: Look) -> str | None:
    """Returns the first place of a forward pass with a number that is not finite, None if all are.

    Args:
      seen: arrays on the host.
    """
    if not seen.embedded:
        return "the stack's input: not finite, made of embedder and patches"
    for use in range(len(seen.inputs)):
        for path in seen.order:
            if not seen.parts[path][use]:
                largest = {name: float(sizes[use]) for name, sizes in seen.weights.items()}
                name = max(largest, key=largest.__getitem__)
                return (
                    f"layer {use}, {path}: not finite, of an input of at most"
                    f" {seen.inputs[use]:.2g}; largest weight: {name},"
                    f" {largest[name]:.2g}"
                )
    if not jnp.isfinite(seen.loss):
        return f"the loss: {float(seen.loss)}, of a finite output of the last layer"
    return None


def _label(path: tuple[str, ...]) -> str:
    return "/".join(path) or "all of it"


def _results(seen: Tree, path: tuple[str, ...]) -> Tree:
    for name in path:
        seen = seen[name]
    return seen["__call__"]


def _largest(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32)).max()
