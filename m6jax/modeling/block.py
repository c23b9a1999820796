"""One layer, and one block: a round of the pattern of dense and sparse layers.

Axis letters: B rows, T length, S keys (or positions of a cache), M width (embed), V vocabulary,
L layers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from m6jax.layouts import offload
from m6jax.modeling.attention import Attention, Cache, training_mask
from m6jax.modeling.config import LayerKind, ModelConfig, Positions
from m6jax.modeling.layers import FeedForward, dropout, make_norm
from m6jax.modeling.moe import MoE
from m6jax.modeling.routing import RouterStatistics

Batch = Mapping[str, jax.Array]


@struct.dataclass
class Context:
    """What every layer of a pass gets besides its input.

    Attributes:
      positions: int32[B, T].
      mask: bool[B, 1, T, S], which query sees which key.
      token_mask: bool[B, T], False for padding, which is not routed.
      tokens: int32[B, T], token ids.
      key: key of the pass for dropout and jitter; None in evaluation.
    """

    positions: Int[Array, "B T"]
    mask: Bool[Array, "B 1 T S"]
    token_mask: Bool[Array, "B T"]
    tokens: Int[Array, "B T"]
    key: PRNGKeyArray | None


@struct.dataclass
class LayerReport:
    """What a layer gives back besides its output.

    Attributes:
      router: one entry for each sparse layer of the pattern.
      cache: one entry for each layer of the pattern; empty in training.
    """

    router: tuple[RouterStatistics, ...]
    cache: tuple[Cache, ...]


@struct.dataclass
class StackOutput:
    """What the stack gives back.

    Attributes:
      x: [B, T, M], what the head makes logits of.
      router: statistics with a leading axis of sparse layers in order; None for a dense model.
    """

    x: Float[Array, "B T M"]
    router: RouterStatistics | None


@struct.dataclass
class ModelOutput:
    """What a whole pass gives back: logits float32[B, T, V], and router statistics as above."""

    logits: Float[Array, "B T V"]
    router: RouterStatistics | None


class Layer(nn.Module):
    """One layer: attention and a dense or sparse feed-forward, each around a residual.

    Attributes:
      config: sizes and choices of the model.
      kind: DENSE or SPARSE.
    """

    config: ModelConfig
    kind: LayerKind

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        context: Context,
        key: PRNGKeyArray | None,
        cache: Cache | None,
    ) -> tuple[Float[Array, "B T M"], RouterStatistics | None, Cache | None]:
        """Maps x [B, T, M] to [B, T, M]; see Context for the rest.

        Args:
          x: input.
          context: of the pass.
          key: of this use of the layer.
          cache: keys and values seen so far, in decoding.
        """
        config = self.config
        common: dict[str, Any] = {
            "init_scale": config.init_scale,
            "dtype": jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        feed_forward: dict[str, Any] = {"gated": config.gated_mlp, "activation": config.activation}
        keys = (None,) * 3 if key is None else tuple(jax.random.split(key, 3))
        attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_size,
            rotary=config.positions is Positions.ROTARY,
            rope_base=config.rope_base,
            name="attention",
            **common,
        )(self._norm("attention_norm")(x), context.positions, context.mask, cache)
        x = x + dropout(self._after("attention_after_norm", attention.x), config.dropout, keys[0])

        router = None
        normed = self._norm("mlp_norm")(x)
        if self.kind is LayerKind.SPARSE:
            assert config.moe is not None  # ModelConfig.check
            sparse = MoE(config.moe, config.mlp_dim, name="moe", **common, **feed_forward)
            output = sparse(normed, context.token_mask, keys[2], context.tokens)
            y, router = output.x, output.router
        else:
            y = FeedForward(config.mlp_dim, name="mlp", **common, **feed_forward)(normed)
        x = x + dropout(self._after("mlp_after_norm", y), config.dropout, keys[1])
        return x, router, attention.cache

    def _norm(self, name: str) -> nn.Module:
        config = self.config
        return make_norm(config.norm, jnp.dtype(config.dtype), name, config.norm_epsilon)

    def _after(self, name: str, y: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        return self._norm(name)(y) if self.config.sandwich_norm else y


class Block(nn.Module):
    """One round of the pattern: what a stack is made of.

    The parameters of a pattern of one layer are this layer's; of several, each has its name.

    Attributes:
      config: sizes and choices of the model.
      inputs_on_host: mark the input, which waits for the backward pass on the host.
    """

    config: ModelConfig
    inputs_on_host: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        use: Int[Array, ""],
        context: Context,
        caches: tuple[Cache, ...] | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerReport]:
        """Maps x [B, T, M] to [B, T, M].

        Args:
          x: input.
          use: int32[], how many blocks came before; the randomness of a layer follows from it.
          context: of the pass.
          caches: one a layer of the pattern, in decoding.
        """
        if self.inputs_on_host:
            x = offload.name_input(x)
        pattern = self.config.pattern
        routers, new_caches = [], []
        for i, kind in enumerate(pattern):
            layer = Layer(self.config, kind, name=self.config.layer_name(i))
            if len(pattern) == 1:
                nn.share_scope(self, layer)
            key = None
            if context.key is not None:
                key = jax.random.fold_in(context.key, use * len(pattern) + i)
            x, router, cache = layer(x, context, key, None if caches is None else caches[i])
            routers += [] if router is None else [router]
            new_caches += [] if cache is None else [cache]
        return x, LayerReport(tuple(routers), tuple(new_caches))


def make_context(config: ModelConfig, batch: Batch, key: PRNGKeyArray | None) -> Context:
    """Returns what every layer gets in a pass over whole rows.

    Args:
      config: of the model.
      batch: see `Transformer.apply_layers`.
      key: of the pass for dropout and jitter; None in evaluation.
    """
    segment_ids, bidirectional = batch["segment_ids"], batch.get("bidirectional")
    if not config.causal:
        bidirectional = jnp.ones_like(segment_ids)
    mask = training_mask(segment_ids, bidirectional)
    return Context(batch["positions"], mask, segment_ids > 0, batch["tokens"], key)


def join_pattern(routers: tuple[RouterStatistics, ...]) -> RouterStatistics | None:
    """Puts the statistics of a pattern's sparse layers in order of use.

    Args:
      routers: one entry for each sparse layer of the pattern, leaves with a leading axis of blocks.

    Returns:
      Leaves with a leading axis of sparse layers; None without any.
    """
    if not routers:
        return None
    return jax.tree.map(
        lambda *leaves: jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:]), *routers
    )
