"""The training loss, written so that any cut of a batch into parts adds up to the same thing.

The loss of a batch is a mean over its real tokens, whichever microbatch or device they are on. So
the weight of the whole batch is counted first, from the inputs alone, and every part contributes
its sum divided by that:

    total = sum over parts of  [ sum of token losses of the part / tokens of the batch
                              + (routed tokens of the part / routed of the batch) * router losses ]

With one weight w = 1 and token losses c * w, a part with one token of c = 3 and a part with three
of c = 1 give 1.5 and the gradient 1.5, where a mean of the parts' means would give 2.0.

Axis letters: B rows, T length, t of a chunk, M width (embed), V vocabulary, L sparse layers.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError, adjustable, validated
from m6jax.modeling.block import Batch, StackOutput
from m6jax.modeling.config import MoEConfig
from m6jax.modeling.layers import NEVER
from m6jax.modeling.routing import RouterStatistics

LogitsFn = Callable[[Tree, Float[Array, "B t M"]], Float[Array, "B t V"]]


@validated
class Loss:
    """What is minimised besides the cross-entropy and the router losses of the model.

    Attributes:
      label_smoothing: share of the target spread over the ids that can be predicted.
      z_loss: weight of the mean squared log-sum-exp of the logits (PaLM, arXiv 2204.02311: 1e-4).
      chunk_length: positions of T whose logits exist at once; changes memory, not results.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_length: int = adjustable(default=64)

    def check(self) -> None:
        """Raises ConfigError for weights that cannot be."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"Loss.label_smoothing: {self.label_smoothing} is not in [0, 1)")
        if self.z_loss < 0:
            raise ConfigError(f"Loss.z_loss: {self.z_loss} is negative")
        if self.chunk_length < 1:
            raise ConfigError(f"Loss.chunk_length: {self.chunk_length}; at least 1 is needed")


@struct.dataclass
class BatchWeight:
    """By what the sums of all parts of a batch are divided.

    Attributes:
      targets: float32[], sum of the loss weights.
      routed: float32[], number of tokens that are routed.
    """

    targets: Float[Array, ""]
    routed: Float[Array, ""]


@struct.dataclass
class TokenSums:
    """Sums over the tokens of a part, which add up over the parts of a batch.

    Attributes:
      cross_entropy: float32[], in nats.
      z: float32[], squared log-sum-exps.
      correct: float32[], loss weights of targets with the largest logit, of equal ones the first.
      targets: float32[], loss weights.
    """

    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]
    correct: Float[Array, ""]
    targets: Float[Array, ""]


@struct.dataclass
class LossSums:
    """All that a part of a batch adds to the metrics.

    Attributes:
      tokens: sums over its tokens.
      total: float32[], what is minimised; already divided by the batch's weight.
      router: statistics, means multiplied by the part's routed tokens; None for a dense model.
    """

    tokens: TokenSums
    total: Float[Array, ""]
    router: RouterStatistics | None


def batch_weight(batch: Batch) -> BatchWeight:
    """Counts a whole batch; see BatchWeight."""
    return BatchWeight(
        targets=batch["loss_weights"].sum(dtype=jnp.float32),
        routed=(batch["segment_ids"] > 0).sum(dtype=jnp.float32),
    )


def loss_sums(
    logits_fn: LogitsFn,
    head: Tree,
    output: StackOutput,
    batch: Batch,
    weight: BatchWeight,
    loss: Loss,
    moe: MoEConfig | None,
) -> LossSums:
    """Returns the sums of a part; `total` is the number to differentiate.

    Args:
      logits_fn: (head, [B, t, M]) -> float32[B, t, V].
      head: parameters of the head.
      output: of the stack: x [B, T, M] and router statistics.
      batch: targets int32[B, T], loss_weights float32[B, T].
      weight: of the whole batch.
      loss: the weights of its terms.
      moe: the weights of the router losses.
    """
    targets, weights = batch["targets"], batch["loss_weights"]
    total, tokens = _chunked_loss(logits_fn, loss, head, output.x, targets, weights)
    total = total / jnp.maximum(weight.targets, 1e-9)
    router = output.router
    if router is not None:
        assert moe is not None  # ModelConfig.check
        share = router.tokens[0] / jnp.maximum(weight.routed, 1.0)
        total += share * router_loss(router, moe)
        router = _weigh(router)
    return LossSums(tokens, total, router)


def token_sums(
    logits_fn: LogitsFn,
    loss: Loss,
    head: Tree,
    x: Float[Array, "B t M"],
    targets: Int[Array, "B t"],
    weights: Float[Array, "B t"],
) -> tuple[Float[Array, ""], TokenSums]:
    """Returns the summed loss of some tokens, and the sums for the metrics.

    Args:
      logits_fn: (head, [B, t, M]) -> float32[B, t, V].
      loss: the weights of its terms.
      head: parameters of the head.
      x: [B, t, M].
      targets: int32[B, t].
      weights: float32[B, t].
    """
    logits = logits_fn(head, x)
    log_normalizer, target_logit = score_targets(logits, targets)
    cross_entropy = (weights * (log_normalizer - target_logit)).sum()
    z = (weights * log_normalizer**2).sum()
    total = cross_entropy
    if loss.label_smoothing:
        uniform = (weights * (log_normalizer - logits.mean(-1, where=logits > NEVER))).sum()
        total = (1 - loss.label_smoothing) * total + loss.label_smoothing * uniform
    if loss.z_loss:
        total = total + loss.z_loss * z
    predicted = jnp.argmax(jax.lax.stop_gradient(logits), -1)  # of equal ones the first
    correct = (weights * (predicted == targets)).sum()
    return total, TokenSums(cross_entropy, z, correct, weights.sum())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_loss(
    logits_fn: LogitsFn,
    loss: Loss,
    head: Tree,
    x: Float[Array, "B T M"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Float[Array, ""], TokenSums]:
    """`token_sums` of all T positions, some at a time, so that [B, T, V] never exists.

    The loss is linear in its cotangent, so the forward pass computes the gradient too, chunk by
    chunk while the logits are at hand; the backward pass multiplies by one number.
    """

    def one(_: None, chunk: Any) -> tuple[None, Any]:
        return None, token_sums(logits_fn, loss, head, *chunk)

    _, results = jax.lax.scan(one, None, _chunks(loss.chunk_length, x, targets, weights))
    return jax.tree.map(lambda leaf: leaf.sum(0), results)


def _chunked_forward(
    logits_fn: LogitsFn,
    loss: Loss,
    head: Tree,
    x: Float[Array, "B T M"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
) -> tuple[Any, Any]:
    grad_fn = jax.value_and_grad(token_sums, argnums=(2, 3), has_aux=True)

    def one(to_head: Any, chunk: Any) -> tuple[Any, Any]:
        result, (chunk_to_head, to_x) = grad_fn(logits_fn, loss, head, *chunk)
        # The head's gradient adds up in float32, whatever type its parameters have.
        return jax.tree.map(lambda a, b: a + b, to_head, chunk_to_head), (result, to_x)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), head)
    chunks = _chunks(loss.chunk_length, x, targets, weights)
    to_head, (results, to_x) = jax.lax.scan(one, zeros, chunks)
    # A sum over many tokens, not yet divided by their number, is too large for float16.
    to_head = jax.tree.map(
        lambda g, leaf: g if leaf.dtype == jnp.float16 else g.astype(leaf.dtype), to_head, head
    )
    to_x = jnp.moveaxis(to_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    types = jax.tree.map(lambda leaf: jnp.zeros(0, leaf.dtype), (head, x))
    return jax.tree.map(lambda leaf: leaf.sum(0), results), ((to_head, to_x), types)


def _chunked_backward(logits_fn: LogitsFn, loss: Loss, saved: Any, gradient: Any) -> Any:
    del logits_fn, loss
    to_head, to_x = jax.tree.map(lambda leaf, like: (leaf * gradient[0]).astype(like.dtype), *saved)
    return to_head, to_x, None, None


_chunked_loss.defvjp(_chunked_forward, _chunked_backward)


def _chunks(
    chunk_length: int, *arrays: Shaped[Array, "B T ..."]
) -> tuple[Shaped[Array, "n B t ..."], ...]:
    """Cuts [B, T, ...] to [number of chunks, B, t, ...]; zeros, of no weight, fill the last."""
    B, T = arrays[0].shape[:2]
    number = -(-T // chunk_length)
    t = -(-T // number)

    def cut(array: Shaped[Array, "B T ..."]) -> Shaped[Array, "n B t ..."]:
        padded = jnp.pad(array, ((0, 0), (0, number * t - T)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(B, number, t, *array.shape[2:]), 1, 0)

    return tuple(cut(array) for array in arrays)


@jax.custom_vjp
def score_targets(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Returns log-sum-exp and target logit of every token, each float32[B, T].

    The gradient is written by hand: one pass over [B, T, V], where autodiff keeps a second array of
    that size and scatters the targets into a third.

    Args:
      logits: float32[B, T, V].
      targets: int32[B, T].
    """
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1), target_logit


def _score_forward(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> tuple[Any, Any]:
    log_normalizer, target_logit = score_targets(logits, targets)
    return (log_normalizer, target_logit), (logits, targets, log_normalizer)


def _score_backward(saved: Any, gradient: Any) -> tuple[Float[Array, "B T V"], None]:
    logits, targets, log_normalizer = saved
    to_normalizer, to_target = gradient
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    softmax = jnp.exp(logits - log_normalizer[..., None])
    return softmax * to_normalizer[..., None] + is_target * to_target[..., None], None


score_targets.defvjp(_score_forward, _score_backward)


def router_loss(router: RouterStatistics, moe: MoEConfig) -> Float[Array, ""]:
    """Returns the weighted router losses, a mean over the sparse layers."""
    balance = moe.load_balance_loss * router.load_balance_loss.mean()
    return balance + moe.router_z_loss * router.router_z_loss.mean()


def add(left: Any, right: Any) -> Any:
    """Adds the sums of two parts."""
    return jax.tree.map(jnp.add, left, right)


def summarize(sums: LossSums) -> dict[str, Float[Array, "..."]]:
    """Returns the metrics of a whole batch, or of many, from the sums of its parts.

    Args:
      sums: of jax arrays, or of numpy's; the metrics have their kind and type.

    Returns:
      loss (cross-entropy in nats a token), total_loss, z_loss, accuracy; for a sparse model also
      load_balance_loss, router_z_loss, router_entropy, router_confidence, fraction_dropped (means
      over layers), the same with `_by_layer` float32[L], and expert_load float32[L, E], the share
      of a layer's choices for each expert.
    """
    tokens = sums.tokens
    targets = _divisor(tokens.targets)
    metrics = {
        "loss": tokens.cross_entropy / targets,
        "total_loss": sums.total,
        "z_loss": tokens.z / targets,
        "accuracy": tokens.correct / targets,
    }
    if sums.router is not None:
        metrics |= summarize_router(sums.router)
    return metrics


def summarize_router(sums: RouterStatistics) -> dict[str, Float[Array, "..."]]:
    """Returns the router's part of `summarize` from added-up statistics."""
    tokens = _divisor(sums.tokens)
    by_layer = {
        "load_balance_loss": sums.load_balance_loss / tokens,
        "router_z_loss": sums.router_z_loss / tokens,
        "router_entropy": sums.entropy / tokens,
        "router_confidence": sums.confidence / tokens,
        "fraction_dropped": sums.fraction_dropped,
    }
    load = sums.chosen / _divisor(sums.chosen.sum(-1, keepdims=True))
    return (
        {name: values.mean() for name, values in by_layer.items()}
        | {f"{name}_by_layer": values for name, values in by_layer.items()}
        | {"expert_load": load}
    )


def _divisor(number: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns what a sum over nothing, which is 0, can be divided by too."""
    return number + (number == 0)


def _weigh(router: RouterStatistics) -> RouterStatistics:
    """Multiplies means by their tokens, so that statistics of parts can be added."""
    return dataclasses.replace(
        router,
        load_balance_loss=router.load_balance_loss * router.tokens,
        router_z_loss=router.router_z_loss * router.tokens,
        entropy=router.entropy * router.tokens,
        confidence=router.confidence * router.tokens,
    )
