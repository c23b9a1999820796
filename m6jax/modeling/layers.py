"""Small parts of the transformer: norms, embedding, feed-forward, dropout.

Axis letters: B rows, T length, M width (embed), H FFN width (mlp), V vocabulary, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from m6jax.foundation.partitioning import constrain, declare
from m6jax.modeling.config import Activation, Norm

# Logit of an id that is never predicted; finite, so that no difference of two is undefined.
NEVER = -1e30


def matrix_init(scale: float = 1.0, in_axis: Any = -2, out_axis: Any = -1, batch_axis: Any = ()):
    """Truncated normal with standard deviation scale / sqrt(fan in)."""
    return jax.nn.initializers.variance_scaling(
        scale**2, "fan_in", "truncated_normal", in_axis, out_axis, batch_axis
    )


def make_norm(kind: Norm, dtype: Any, name: str | None = None, epsilon: float = 1e-6) -> nn.Module:
    """Returns a module [..., M] -> [..., M]; statistics in float32, learned scale (and bias)."""
    scale = declare(jax.nn.initializers.ones, ("embed",))
    if kind is Norm.RMS:
        return nn.RMSNorm(epsilon, dtype=dtype, scale_init=scale, name=name)
    bias = declare(jax.nn.initializers.zeros, ("embed",))
    return nn.LayerNorm(epsilon, dtype=dtype, scale_init=scale, bias_init=bias, name=name)


def dropout(
    x: Float[Array, "*shape"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "*shape"]:
    """Drops elements of x with probability `rate`; the identity without a key (evaluation)."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


class Embedder(nn.Module):
    """Token table, used for the input and, when tied, for the logits.

    Attributes:
      vocab_size: V.
      embed_dim: M.
      max_length: rows of the table of learned positions; None: no such table.
      init_scale: factor on the standard deviation 1 / sqrt(M) of the tables.
      dtype: type of the arithmetic.
      param_dtype: type of the tables.
      scaled: multiply the rows of the token table by sqrt(M).
    """

    vocab_size: int
    embed_dim: int
    max_length: int | None
    init_scale: float
    dtype: Any
    param_dtype: Any
    scaled: bool = True

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T M"]:
        """Embeds tokens int32[B, T] at positions int32[B, T]; returns [B, T, M] of `dtype`."""
        x = jnp.take(self._table("table", "vocab", self.vocab_size), tokens, axis=0)
        if self.scaled:
            # Rows of unit variance: what a pre-norm stack adds to has the size of what it adds.
            x = x * self.embed_dim**0.5
        if self.max_length is not None:
            x = x + jnp.take(self._table("positions", "length", self.max_length), positions, axis=0)
        return constrain(x.astype(self.dtype), ("batch", "length", "embed"))

    def logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Returns float32[B, T, V] of a tied model from x [B, T, M], after `__call__`."""
        return output_logits(x, meta.unbox(self.get_variable("params", "table")), tied=True)

    def _table(self, name: str, axis: str, rows: int) -> Float[Array, "{rows} M"]:
        init = jax.nn.initializers.normal(self.init_scale * self.embed_dim**-0.5)
        shape = (rows, self.embed_dim)
        return self.param(name, declare(init, (axis, "embed")), shape, self.param_dtype)


class OutputHead(nn.Module):
    """Logits from a matrix of its own, for models whose output is not tied."""

    vocab_size: int
    init_scale: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Returns logits float32[B, T, V] from x [B, T, M]."""
        init = declare(matrix_init(self.init_scale), ("embed", "vocab"))
        shape = (x.shape[-1], self.vocab_size)
        kernel = self.param("kernel", init, shape, self.param_dtype)
        return output_logits(x.astype(self.dtype), kernel, tied=False)


def output_logits(
    x: Float[Array, "B T M"], matrix: Float[Array, "V M"] | Float[Array, "M V"], tied: bool
) -> Float[Array, "B T V"]:
    """Returns logits float32[B, T, V].

    Args:
      x: [B, T, M], normed.
      matrix: the table of tokens [V, M] of a tied model, or the head's kernel [M, V].
      tied: which of the two it is.
    """
    names = "btm,vm->btv" if tied else "btm,mv->btv"
    matrix = matrix.astype(x.dtype)
    logits = jnp.einsum(names, x, matrix, preferred_element_type=jnp.float32)
    return constrain(logits, ("batch", "length", "vocab"))


def without_other_ids(logits: Float[Array, "B T V"], num_ids: int | None) -> Float[Array, "B T V"]:
    """Returns logits [B, T, V] with NEVER for the ids from `num_ids` on; None: there are none.

    Masked, not cut: the axis keeps the size that divides over devices.
    """
    if num_ids is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_ids, logits, NEVER)


class FeedForward(nn.Module):
    """Two matrices with an activation between, or three with a gate.

    Attributes:
      mlp_dim: H.
      gated: use the third matrix.
      init_scale: factor on the initial standard deviation 1 / sqrt(fan in).
      dtype: type of the arithmetic.
      param_dtype: type of the matrices.
      activation: between the matrices, or of the gate.
    """

    mlp_dim: int
    gated: bool
    init_scale: float
    dtype: Any
    param_dtype: Any
    activation: Activation = Activation.GELU

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Maps x [B, T, M] to [B, T, M]."""
        weights = ffn_weights(self, x.shape[-1])
        hidden = ffn_hidden(
            x, weights, lambda x, w: jnp.einsum("btm,mh->bth", x, w), self.activation
        )
        hidden = constrain(hidden, ("batch", "length", "mlp"))
        y = jnp.einsum("bth,hm->btm", hidden, weights["down"])
        return constrain(y, ("batch", "length", "embed"))


def ffn_weights(module: Any, embed_dim: int, num_experts: int | None = None) -> dict[str, Any]:
    """Declares the matrices of a feed-forward, of every expert if there are any.

    Args:
      module: module with mlp_dim, gated, init_scale, dtype and param_dtype.
      embed_dim: M.
      num_experts: E; None for a dense layer.

    Returns:
      up and (gated) gate [(E,) M, H] and down [(E,) H, M], of `dtype`.
    """
    lead_axes: tuple[str, ...] = () if num_experts is None else ("expert",)
    lead_shape = () if num_experts is None else (num_experts,)
    init: Initializer = matrix_init(module.init_scale, batch_axis=tuple(range(len(lead_axes))))
    inward = ((*lead_axes, "embed", "mlp"), (*lead_shape, embed_dim, module.mlp_dim))
    outward = ((*lead_axes, "mlp", "embed"), (*lead_shape, module.mlp_dim, embed_dim))
    shapes = {"up": inward, "down": outward} | ({"gate": inward} if module.gated else {})
    return {
        name: module.param(name, declare(init, axes), shape, module.param_dtype).astype(
            module.dtype
        )
        for name, (axes, shape) in shapes.items()
    }


def ffn_hidden(
    x: Float[Array, "*rows M"],
    weights: dict[str, Any],
    product: Any,
    activation: Activation = Activation.GELU,
) -> Float[Array, "*rows H"]:
    """Returns act(x up), or act(x gate) * (x up), with the given matrix product."""
    alone, gated = _ACTIVATIONS[activation]
    if "gate" in weights:
        return gated(product(x, weights["gate"]), product(x, weights["up"]))
    return alone(product(x, weights["up"]))


def _recomputed(activation: Any) -> tuple[Any, Any]:
    """Returns an activation, alone and as a gate, of which the backward pass keeps the input.

    The hidden layer is the largest activation: what autodiff would keep of its GELU is five times
    as much as the input, and costs more to write and read than to compute again.
    """
    alone = jax.checkpoint(activation)
    return alone, jax.checkpoint(lambda gate, up: activation(gate) * up)


_ACTIVATIONS = {
    Activation.GELU: _recomputed(nn.gelu),
    Activation.SILU: _recomputed(nn.silu),
}
