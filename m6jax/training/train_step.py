"""One update as one pure function: microbatches, gradients, clipping, optimizer.

The loop, ahead-of-time compilation and the tests all call `train_step`; nothing here knows of
devices, files or time.

A shared weight's gradient, as autodiff gives it, is the sum over its R = L / U uses. Here it is
scaled to their mean, so that moments keep their scale when layers are delinked; in the global norm
its square counts R times, so that clipping and logged norms keep theirs.

In float16 the smallest gradients would be 0, so there the loss is multiplied with a scale that is
as large as gradients allow, and the gradients, in float32, are divided by it.

What rests on the host (`offload`) is moved to the device where it is used, and what becomes of it
back to the host; the numbers are the same. What becomes of gradients is decided by `weight_update`.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import constrain
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError, adjustable, validated
from m6jax.layouts import Layout, LeafName, offload
from m6jax.modeling import balancing
from m6jax.modeling.block import Batch, StackOutput
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.routing import RouterStatistics
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers.rounding import Rounding, leaf_keys
from m6jax.optimizers.weight_update import UpdateRule, Weights, leaf_squares, update_by_layer
from m6jax.training import losses
from m6jax.training.finite import what_was_skipped
from m6jax.training.losses import BatchWeight, Loss, LossSums
from m6jax.training.train_state import Extra, TrainState

BalanceFn = Callable[[Tree, RouterStatistics], Tree]
Scalar = Float[Array, ""]
LossFn = Callable[[Tree, Batch, BatchWeight, PRNGKeyArray | None], tuple[Scalar, LossSums]]
ApplyLayers = Callable[[Transformer, Tree, Batch, Layout, PRNGKeyArray | None, bool], StackOutput]


class ClipBy(enum.Enum):
    """Of what the norm is that is clipped: of all gradients, or of each layer's alone.

    LAYER needs no other layer's gradient, so that it can be had in the streamed step. What is
    outside of the stack counts as one layer more.
    """

    GLOBAL = "global"
    LAYER = "layer"


@validated
class Update:
    """How gradients become an update.

    Attributes:
      microbatches: parts in which a batch is computed, one after another; they change memory, not
        results.
      clip_norm: largest norm of the gradient; None: no clipping.
      clip_by: whether that is the norm of all gradients, or of each layer's.
      mean_shared_gradient: scale a shared weight's gradient to the mean over its uses. The sum
        (False) is there to repeat studies that used it; see `delinking.Policy.RESCALE`.
      average_decay: decay of the moving average of the parameters; None: no average.
      rounding: of weights that are kept in bfloat16 (or float16), and of their average.
    """

    microbatches: int = adjustable(default=1)
    clip_norm: float | None = 1.0
    clip_by: ClipBy = ClipBy.GLOBAL
    mean_shared_gradient: bool = True
    average_decay: float | None = None
    rounding: Rounding = Rounding.STOCHASTIC

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        if self.microbatches < 1:
            raise ConfigError(f"Update.microbatches: {self.microbatches}; at least 1 is needed")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"Update.clip_norm: {self.clip_norm} is not greater than 0")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ConfigError(f"Update.average_decay: {self.average_decay} is not in (0, 1)")


def model_loss(
    model: Transformer,
    layout: Layout,
    loss: Loss,
    inputs_on_host: bool = False,
    apply: ApplyLayers = apply_layers,
) -> LossFn:
    """Returns the loss of a part of a batch: (params, part, batch weight, key) -> (total, sums).

    Args:
      model: the network.
      layout: how its stack lies.
      loss: what is minimised.
      inputs_on_host: the layers' inputs wait for the backward pass on the host.
      apply: runs all but the head; with `Transformer.apply_layers` always by explicit slices, which
        tests and benchmarks compare.
    """

    def loss_fn(
        params: Tree, part: Batch, weight: BatchWeight, key: PRNGKeyArray | None
    ) -> tuple[Scalar, LossSums]:
        output = apply(model, params, part, layout, key, inputs_on_host)
        rest, _ = layouts.split_stack(params, layout)
        head = model.head_params(rest)
        sums = losses.loss_sums(model.logits, head, output, part, weight, loss, model.config.moe)
        return sums.total, sums

    return loss_fn


def router_balance(model: Transformer, layout: Layout) -> BalanceFn:
    """Returns how router biases move: (biases, statistics of a whole batch) -> new biases."""

    def balance(biases: Tree, router: RouterStatistics) -> Tree:
        return balancing.moved(biases, router.chosen, model.config, layout)

    return balance


def accumulate(
    loss_fn: LossFn, params: Tree, batch: Batch, microbatches: int, key: PRNGKeyArray
) -> tuple[Tree, LossSums]:
    """Returns gradient and sums of a batch, computed in equal contiguous parts.

    Args:
      loss_fn: loss of a part, divided by the weight of the batch, and sums that add up.
      params: what to differentiate by.
      batch: arrays with leading axis B.
      microbatches: number of parts, a divisor of B.
      key: of the step.
    """
    weight = losses.batch_weight(batch)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if microbatches == 1:
        (_, sums), grads = grad_fn(params, batch, weight, key)
        return grads, sums

    def one(part: Batch, number: Int[Array, ""]) -> tuple[Tree, LossSums]:
        (_, sums), grads = grad_fn(params, part, weight, jax.random.fold_in(key, number))
        return offload.to_device(grads), sums  # sums cannot be made on the host

    def body(carry: Any, inputs: Any) -> tuple[Any, None]:
        return losses.add(carry, one(*inputs)), None

    cut = jax.tree.map(lambda x: cut_rows(x, microbatches), dict(batch))
    parts = (cut, jnp.arange(microbatches))
    first, rest = jax.tree.map(lambda x: x[0], parts), jax.tree.map(lambda x: x[1:], parts)
    (grads, sums), _ = jax.lax.scan(body, one(*first), rest)
    return grads, sums


def cut_rows(x: Shaped[Array, " B *rest"], parts: int) -> Shaped[Array, "{parts} b *rest"]:
    """Returns [N, B / N, ...] of [B, ...]: equal contiguous parts, each over all devices."""
    x = x.reshape(parts, -1, *x.shape[1:])
    return constrain(x, (None, "batch", *(None,) * (x.ndim - 2)))


def scale_shared(grads: Tree, layout: Layout) -> Tree:
    """Returns the gradients with those of the stack scaled from sum to mean over their uses."""

    def scale(name: str, grad: jax.Array) -> jax.Array:
        repeats = layout.repeats_of(name)
        return grad if repeats == 1 else grad / repeats

    return pytrees.map_named(scale, grads)


def global_norm(squares: Tree, layout: Layout) -> Scalar:
    """Returns float32[], the norm as if every use of a layer had its own (mean) gradient.

    Args:
      squares: of the gradients, see `weight_update.leaf_squares`.
      layout: how the stack lies.
    """
    return jnp.sqrt(
        sum(layout.repeats_of(name) * s.sum() for name, s in pytrees.flatten_named(squares))
    )


def shrinks(squares: Tree, norm: Scalar, update: Update) -> Tree | None:
    """Returns what gradients are to be multiplied with for clipping; None for nothing.

    Args:
      squares: of the gradients, see `weight_update.leaf_squares`.
      norm: float32[], their global norm.
      update: what is asked for.

    Returns:
      A tree like `squares`, float32: [U] for leaves of a stack that are clipped by layer, else [].
    """
    clip_norm = update.clip_norm
    if clip_norm is None:
        return None
    if update.clip_by is ClipBy.GLOBAL:
        return jax.tree.map(lambda _: shrink_to(clip_norm, norm), squares)

    def layer_of(name: str, square: Float[Array, "*U"]) -> Any:
        # Leaves of a stack with units of their own are layers of their own.
        return LeafName.of(name).layer_key, square.shape

    of_layer: dict[Any, Float[Array, "*U"]] = {}
    for name, square in pytrees.flatten_named(squares):
        key = layer_of(name, square)
        of_layer[key] = of_layer.get(key, 0.0) + square
    return pytrees.map_named(
        lambda name, s: shrink_to(clip_norm, jnp.sqrt(of_layer[layer_of(name, s)])), squares
    )


def weights_of(state: TrainState, update: Update) -> Weights:
    """Returns what this step's update changes, with the keys for rounding where it needs any."""
    keys = None
    if update.rounding is Rounding.STOCHASTIC:
        keys = leaf_keys(state.step_key(), state.params)
    extra = state.extra
    return Weights(state.params, state.opt_state, extra.averaged, extra.master, keys)


def after_update(
    state: TrainState,
    weights: Weights,
    biases: Tree | None,
    loss_scale: DynamicScale | None = None,
) -> TrainState:
    """Returns the state of the next step."""
    return TrainState(
        step=state.step + 1,
        params=weights.params,
        opt_state=weights.opt_state,
        rng=state.rng,
        extra=Extra(weights.averaged, biases, weights.master, loss_scale),
    )


def shrink_to(clip_norm: float, norm: Float[Array, "*U"]) -> Float[Array, "*U"]:
    """Returns the factor that makes a norm no larger than `clip_norm`."""
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    layout: Layout,
    tx: optax.GradientTransformation,
    learning_rate: Callable[[Int[Array, ""]], Scalar],
    update: Update,
    balance: BalanceFn | None = None,
) -> tuple[TrainState, dict[str, Shaped[Array, "..."]]]:
    """Makes one update.

    Args:
      state: before the step.
      batch: arrays with leading axis B; see `Transformer.apply` and `losses.loss_sums`.
      loss_fn: see `model_loss`.
      layout: how the stack lies in the parameters.
      tx: gives the direction; see `optimizers`.
      learning_rate: of a step.
      update: microbatches, clipping, averages.
      balance: see `router_balance`; for a state with router biases.

    Returns:
      The new state, and metrics: those of `losses.summarize`, real_tokens (positions of the batch
      that are no padding, patches of pictures too), learning_rate, grad_norm (before clipping),
      skipped and bad_place (see `finite`), and loss_scale if there is one.
    """
    biases, scale = state.extra.router_bias, state.extra.loss_scale

    def whole_loss(params: Tree, *rest: Any) -> tuple[Scalar, LossSums]:
        total, sums = loss_fn(balancing.join(params, biases), *rest)
        return (total if scale is None else total * scale.scale), sums

    grads, sums = accumulate(whole_loss, state.params, batch, update.microbatches, state.step_key())
    if scale is not None:
        exact = jax.tree.map(lambda g: offload.to_device(g).astype(jnp.float32), grads)
        grads = jax.tree.map(lambda g: g / scale.scale, exact)
    grads = pytrees.map_named(functools.partial(_sum_on_device, layout=layout), grads)
    if update.mean_shared_gradient:
        grads = scale_shared(grads, layout)
    squares = leaf_squares(grads)
    norm = global_norm(squares, layout)
    rate = learning_rate(state.step)
    finite = jnp.isfinite(sums.total) & jnp.isfinite(norm) & jnp.isfinite(rate)
    rule = UpdateRule(tx, rate, update.average_decay, finite)
    shrink = shrinks(squares, norm, update)
    weights, all_finite = update_by_layer(weights_of(state, update), grads, shrink, rule)
    if biases is not None:
        assert balance is not None, "a state with router biases needs `balance`"
        assert sums.router is not None
        moved = balance(biases, sums.router)
        biases = jax.tree.map(functools.partial(jnp.where, finite), moved, biases)
    metrics = {
        "real_tokens": losses.batch_weight(batch).routed,
        "learning_rate": rate,
        "grad_norm": norm,
    }
    metrics |= what_was_skipped(finite, squares, all_finite)
    metrics |= {} if scale is None else {"loss_scale": jnp.asarray(scale.scale)}
    after = after_update(state, weights, biases, next_scale(scale, finite))
    after = jax.tree.map(offload.like, after, state)
    return after, losses.summarize(sums) | metrics


def next_scale(scale: DynamicScale | None, finite: jax.Array) -> DynamicScale | None:
    """Returns the scale of the loss for the next step, by flax's own rule.

    Args:
      scale: of this step.
      finite: bool[], whether its gradients were finite.
    """
    if scale is None:
        return None
    slope = jnp.where(finite, 1.0, jnp.nan)  # a gradient to show it, in the place of all
    return scale.value_and_grad(lambda x: x * slope)(jnp.float32(0)).dynamic_scale


def _sum_on_device(name: str, grad: jax.Array, layout: Layout) -> jax.Array:
    """Moves a gradient of a leaf with several uses, which is to be scaled, to the device."""
    return grad if layout.repeats_of(name) == 1 else offload.to_device(grad)


def evaluation_step(params: Tree, batch: Batch, *, model: Transformer, layout: Layout) -> LossSums:
    """Returns the sums of a batch, without dropout; `total` is its mean loss."""
    _, sums = model_loss(model, layout, Loss())(params, batch, losses.batch_weight(batch), None)
    return sums
