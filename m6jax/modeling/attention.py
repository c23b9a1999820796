"""Attention with a mask that serves prefix and target, packed documents and decoding alike.

Axis letters: B rows, T queries, S keys, M width (embed), N heads, J heads of keys and values,
D head size.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from m6jax.foundation.partitioning import constrain, declare
from m6jax.modeling.layers import matrix_init


@struct.dataclass
class Cache:
    """Keys and values of the positions seen so far.

    Attributes:
      keys: [B, S, J, D].
      values: [B, S, J, D].
    """

    keys: Float[Array, "B S J D"]
    values: Float[Array, "B S J D"]


@struct.dataclass
class AttentionOutput:
    """What attention gives back: x [B, T, M], and the cache with the new positions, if one came."""

    x: Float[Array, "B T M"]
    cache: Cache | None


def training_mask(
    segment_ids: Int[Array, "B T"], bidirectional: Int[Array, "B T"] | None
) -> Bool[Array, "B 1 T T"]:
    """Returns bool[B, 1, T, T]: which query may see which key.

    A token sees its own document up to itself, and all of its document's prefix. Padding (segment
    0) is seen by nobody.

    Args:
      segment_ids: int32[B, T], number of the document, 0 for padding.
      bidirectional: int32[B, T], 1 on prefix tokens, which every token of the document may see.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    visible = jnp.tril(jnp.ones((length, length), bool))[None]
    if bidirectional is not None:
        visible = visible | (bidirectional[:, None, :] > 0)
    return (same & visible & (segment_ids > 0)[:, None, :])[:, None]


def rotate(
    x: Float[Array, "B T N D"], positions: Int[Array, "B T"], base: float = 10_000.0
) -> Float[Array, "B T N D"]:
    """Rotary position embedding (Su et al., arXiv 2104.09864), halves paired.

    Args:
      x: [B, T, N, D] queries or keys, D even.
      positions: int32[B, T].
      base: angles of pair i are positions * base ** (-2 i / D).

    Returns:
      Array like x; the angles are float32 whatever x is.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency  # [B, T, 1, D / 2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


@partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
def attend(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S J D"],
    value: Float[Array, "B S J D"],
    mask: Bool[Array, "B 1 T S"],
) -> Float[Array, "B T N D"]:
    """Scaled dot-product attention; softmax in float32.

    Args:
      query: [B, T, N, D].
      key: [B, S, J, D], N a multiple of J (grouped queries).
      value: [B, S, J, D].
      mask: bool[B, 1, T, S], True where the query sees the key.

    Returns:
      [B, T, N, D]; exactly 0 for a query that sees nothing.
    """
    B, T, N, D = query.shape
    J = key.shape[2]
    query = query.reshape(B, T, J, N // J, D)
    scores = jnp.einsum("btjgd,bsjd->bjgts", query * D**-0.5, key).astype(jnp.float32)
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    attended = jnp.einsum("bjgts,bsjd->btjgd", weights, value).reshape(B, T, N, D)
    # Without this a padding row would take the mean of all values, other documents' included.
    sees_something = mask.any(-1).transpose(0, 2, 1)[..., None]  # [B, T, 1, 1]
    return jnp.where(sees_something, attended, jnp.zeros_like(attended))


class Attention(nn.Module):
    """Multi-head attention.

    Attributes:
      num_heads: N.
      num_kv_heads: J, a divisor of N.
      head_dim: D.
      rotary: turn queries and keys by their positions.
      init_scale: factor on the initial standard deviation 1 / sqrt(fan in).
      dtype: type of the arithmetic.
      param_dtype: type of the weights.
      rope_base: of the turning.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: bool
    init_scale: float
    dtype: Any
    param_dtype: Any
    rope_base: float = 10_000.0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B 1 T S"],
        cache: Cache | None = None,
    ) -> AttentionOutput:
        """Attends within x, or to a cache.

        Args:
          x: [B, T, M].
          positions: int32[B, T]; with a cache also the slots that the new keys take (slots out of
            range, for padding, are not written).
          mask: bool[B, 1, T, S], S = T without a cache.
          cache: keys and values of S slots.
        """
        query = self._project("query", x, self.num_heads)
        key = self._project("key", x, self.num_kv_heads)
        value = self._project("value", x, self.num_kv_heads)
        if self.rotary:
            query = rotate(query, positions, self.rope_base)
            key = rotate(key, positions, self.rope_base)
        if cache is not None:
            rows = jnp.arange(x.shape[0])[:, None]
            cache = Cache(
                cache.keys.at[rows, positions].set(key, mode="drop"),
                cache.values.at[rows, positions].set(value, mode="drop"),
            )
            key, value = cache.keys, cache.values
        attended = attend(query, key, value, mask)
        kernel = self.param(
            "output",
            declare(matrix_init(self.init_scale, (-3, -2)), ("heads", "kv", "embed")),
            (self.num_heads, self.head_dim, x.shape[-1]),
            self.param_dtype,
        )
        y = jnp.einsum("btnd,ndm->btm", attended, kernel.astype(self.dtype))
        return AttentionOutput(constrain(y, ("batch", "length", "embed")), cache)

    def _project(
        self, name: str, x: Float[Array, "B T M"], heads: int
    ) -> Float[Array, "B T {heads} D"]:
        kernel = self.param(
            name,
            declare(matrix_init(self.init_scale, -3, (-2, -1)), ("embed", "heads", "kv")),
            (x.shape[-1], heads, self.head_dim),
            self.param_dtype,
        )
        projected = jnp.einsum("btm,mnd->btnd", x, kernel.astype(self.dtype))
        return constrain(projected, ("batch", "length", "heads", "kv"))
