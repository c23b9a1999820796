"""The step itself: forward, head, backward with updates, and the update of the rest.

Axis letters: B rows, T length, M width (embed).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, layer_slices, offload
from m6jax.modeling import balancing
from m6jax.modeling.block import Batch, Context, StackOutput, join_pattern
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Optimizer
from m6jax.optimizers.weight_update import UpdateRule, Weights
from m6jax.training import losses
from m6jax.training.finite import what_was_skipped
from m6jax.training.losses import Loss, LossSums
from m6jax.training.streaming.microbatches import Part, Parts
from m6jax.training.streaming.parts import (
    Seen,
    axes_of,
    axes_without_layers,
    join,
    layer_squares,
    norm_of,
    split,
    update_one,
)
from m6jax.training.streaming.passes import Block, ForwardPass
from m6jax.training.streaming.stacked import Stacked
from m6jax.training.streaming.unrolled import Unrolled
from m6jax.training.train_state import TrainState, logical_axes
from m6jax.training.train_step import (
    ClipBy,
    Update,
    after_update,
    global_norm,
    router_balance,
    weights_of,
)


def check_update(update: Update) -> None:
    """Raises ConfigError for an update that needs all gradients at once."""
    if update.clip_norm is not None and update.clip_by is ClipBy.GLOBAL:
        raise ConfigError(
            f"Update.clip_norm: the streamed step has no global norm of gradients to clip to"
            f" {update.clip_norm}, since it updates each layer before it knows the others'"
            " gradients (set Update.clip_by = 'LAYER' or Update.clip_norm = None, or"
            " OffloadPlan.streamed = False)"
        )


def streamed_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    layout: Layout,
    loss: Loss,
    optimizer: Optimizer,
    learning_rate: Callable[[jax.Array], jax.Array],
    update: Update,
    inputs_on_host: bool = False,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Makes one update, as `train_step` does; to be compiled with a donated state.

    Args:
      state: before the step.
      batch: see `Transformer.apply` and `losses.loss_sums`.
      model: the network.
      layout: how its stack lies.
      loss: what is minimised.
      optimizer: gives the direction.
      learning_rate: of a step.
      update: microbatches, clipping, averages.
      inputs_on_host: the layers' inputs wait for the backward pass on the host.

    Returns:
      The new state and the metrics of `train_step`.

    Raises:
      ConfigError: the update needs all gradients at once, or its parts do not divide the rows.
    """
    check_update(update)
    rate = learning_rate(state.step)
    parts = Parts(model, batch, update.microbatches, state.step_key())
    rest, stack = split(weights_of(state, update))
    axes = axes_without_layers(logical_axes(model.parameters(layout.whole)))

    def embed(params: Tree) -> jax.Array:
        return parts.by_part(model.embed(params, parts.batch))

    x, embed_vjp = jax.vjp(embed, rest.params)
    layers = _layers(state, model, layout, parts, update, inputs_on_host)
    forward = layers.forward(stack.params, x)
    sums, (rest_grads, x_grad, report_grads) = _head(model, rest.params, forward, parts, loss)
    finite = jnp.isfinite(sums.total) & jnp.isfinite(rate)
    finite &= pytrees.all_finite(rest_grads, x_grad)

    def update_part(
        part: Weights, grads: Tree, squares: Tree, own: jax.Array
    ) -> tuple[Weights, Tree]:
        tx = optimizer.build(axes_of(part.params, axes))
        rule = UpdateRule(tx, rate, update.average_decay, finite & own)
        return update_one(part, grads, squares, rule, update.clip_norm)

    stack, x_grad, seen = layers.backward(stack, forward, x_grad, report_grads, update_part)
    rest_grads = jax.tree.map(jnp.add, rest_grads, *embed_vjp(x_grad))
    rest_squares = layer_squares(rest_grads)
    own = jnp.isfinite(norm_of(rest_squares))
    new_rest, rest_finite = update_part(offload.to_device(rest), rest_grads, rest_squares, own)
    rest = jax.tree.map(offload.like, new_rest, rest)
    seen = join(Seen(rest_squares, rest_finite), seen)

    biases = _balanced(state.extra.router_bias, sums, finite, model, layout)
    metrics = {
        "real_tokens": losses.batch_weight(batch).routed,
        "learning_rate": rate,
        "grad_norm": global_norm(seen.squares, layout),
    }
    metrics |= what_was_skipped(finite, seen.squares, seen.finite)
    return after_update(state, join(rest, stack), biases), losses.summarize(sums) | metrics


def _layers(
    state: TrainState,
    model: Transformer,
    layout: Layout,
    parts: Parts,
    update: Update,
    inputs_on_host: bool,
) -> Stacked | Unrolled:
    """Returns the two passes through the layers."""
    passes = Unrolled if layout.form is Form.UNROLLED else Stacked
    return passes(
        _block(model, state.extra.router_bias, layout),
        parts,
        model.config.remat,
        layout,
        update.mean_shared_gradient,
        inputs_on_host,
        always=state.step >= 0,
    )


def _balanced(
    biases: Tree | None, sums: LossSums, finite: jax.Array, model: Transformer, layout: Layout
) -> Tree | None:
    """Returns the biases of the routers after the step; as they were if it is not finite."""
    if biases is None:
        return None
    assert sums.router is not None  # biases are of routers
    moved = router_balance(model, layout)(biases, sums.router)
    return jax.tree.map(functools.partial(jnp.where, finite), moved, biases)


def _block(model: Transformer, biases: Tree | None, layout: Layout) -> Block:
    """Returns the function that applies a layer, given as a dictionary of its key alone."""
    if biases is not None and layout.borders:
        biases = layouts.mend(biases, layout)

    def block(layer: Tree, x: jax.Array, use: jax.Array, context: Context) -> tuple[jax.Array, Any]:
        ((key, params),) = layer.items()
        if biases is not None:
            own = biases[key]
            if key == layouts.STACK:
                own = jax.tree.map(lambda leaf: layer_slices.take(leaf, use), own)
            params = balancing.join(params, own)
        return model.block(params, x, context, use)

    return block


def _head(
    model: Transformer, rest: Tree, forward: ForwardPass, parts: Parts, loss: Loss
) -> tuple[LossSums, tuple[Tree, jax.Array, Any]]:
    """Returns the sums, and the loss's gradients by the rest, the last output and the reports."""
    weight = losses.batch_weight(parts.batch)

    def total(rest: Tree, x: jax.Array, reports: Any, batch: Batch) -> tuple[jax.Array, LossSums]:
        output = StackOutput(x, join_pattern(reports.router))
        head = model.head_params(rest)
        sums = losses.loss_sums(model.logits, head, output, batch, weight, loss, model.config.moe)
        return sums.total, sums

    grad_fn = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)

    def head_of(part: Part, x: jax.Array, reports: Any) -> Any:
        (_, sums), (rest_grads, *grads) = grad_fn(rest, x, reports, part.batch)
        return (sums, rest_grads), grads

    reports = parts.swapped(forward.reports)
    (sums, rest_grads), (x_grad, report_grads) = parts.total(head_of, forward.x, reports)
    return sums, (rest_grads, x_grad, parts.swapped(report_grads))
