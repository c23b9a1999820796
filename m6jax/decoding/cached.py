"""The model with its caches: `prefill` reads the prompts, `decode_step` one token a row.

A row's slots are its positions. Padding and rows that have ended write nothing, are seen by nobody
and are not routed; experts serve every choice (see the package).

Axis letters: B rows, T length of prompts, S slots, V vocabulary, L blocks, J heads of keys and
values, D head size, M width (embed).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import layouts
from m6jax.foundation.partitioning import constrain
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.modeling.attention import Cache
from m6jax.modeling.block import Batch, Context
from m6jax.modeling.config import CapacityMode, LayerKind
from m6jax.modeling.stack import apply_stack
from m6jax.modeling.transformer import Transformer


@struct.dataclass
class DecodingState:
    """Rows in the middle of their text.

    Attributes:
      caches: one for each layer of the pattern, leaves [L, B, S, J, D].
      lengths: int32[B], slots that a row has filled.
      logits: float32[B, V], of the token that comes next.
    """

    caches: tuple[Cache, ...]
    lengths: jax.Array
    logits: jax.Array

    def take(self, rows: jax.Array) -> "DecodingState":
        """Returns the state of the rows int32[B'], in that order."""
        caches = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=1), self.caches)
        return DecodingState(caches, self.lengths[rows], self.logits[rows])


def decoding_model(model: Transformer, force: bool = False) -> Transformer:
    """Returns the model that serves every choice of expert; its parameters are the same.

    Args:
      model: as it was trained.
      force: also for a model trained with ONE_X, which becomes another model.

    Raises:
      ConfigError: a model with ONE_X and no `force`, or one that is not causal.
    """
    if not model.config.causal:
        raise ConfigError(
            "ModelConfig.causal: a model with causal = False cannot write a text token by token"
        )
    moe = model.config.moe
    if moe is None or moe.capacity_factor is None or LayerKind.SPARSE not in model.config.pattern:
        return model
    if moe.capacity_mode is CapacityMode.ONE_X and not force:
        raise ConfigError(
            "MoEConfig.capacity_mode: decoding serves all"
            f" {moe.num_prototypes * moe.num_selected_experts} choices of a token, a model trained"
            " with ONE_X knows about one (decoding_model(model, force=True) serves all of them)"
        )
    moe = dataclasses.replace(
        moe, capacity_factor=None, capacity_mode=CapacityMode.KX, group_size=None
    )
    return Transformer(dataclasses.replace(model.config, moe=moe))


def prefill(
    model: Transformer, params: Tree, layout: Layout, batch: Batch, num_slots: int
) -> DecodingState:
    """Reads the prompts.

    Args:
      model: one that `decoding_model` accepts.
      params: its parameters in the given layout.
      layout: how the stack lies.
      batch: features as for `Transformer.apply`: one document a row, padded on the right.
      num_slots: S, at least T.
    """
    model = decoding_model(model)
    config, (B, T) = model.config, batch["tokens"].shape
    context = model.context(batch, None)
    context = dataclasses.replace(
        context,
        positions=jnp.where(context.token_mask, context.positions, num_slots),
        mask=jnp.pad(context.mask, ((0, 0), (0, 0), (0, 0), (0, num_slots - T))),
    )
    shape = (layout.depth, B, num_slots, config.kv_heads, config.head_size)
    axes = ("layers", "batch", "length", "heads", "kv")
    empty = constrain(jnp.zeros(shape, config.dtype), axes)
    state = DecodingState(
        caches=tuple(Cache(empty, empty) for _ in config.pattern),
        lengths=jnp.zeros((B,), jnp.int32),
        logits=jnp.zeros((B, config.vocab_size)),
    )
    return _forward(model, params, layout, batch, context, state)


def decode_step(
    model: Transformer,
    params: Tree,
    layout: Layout,
    state: DecodingState,
    tokens: jax.Array,
    active: jax.Array,
) -> DecodingState:
    """Feeds one token a row; the first arguments are those of `prefill`.

    Args:
      model: one that `decoding_model` accepts.
      params: its parameters in the given layout.
      layout: how the stack lies.
      state: from `prefill` or the step before.
      tokens: int32[B].
      active: bool[B], False for rows that have ended: their caches and lengths stay as they are,
        their logits mean nothing.
    """
    model = decoding_model(model)
    num_slots = state.caches[0].keys.shape[2]
    filled = jnp.arange(num_slots) <= state.lengths[:, None]
    context = Context(
        positions=jnp.where(active, state.lengths, num_slots)[:, None],
        mask=(filled & active[:, None])[:, None, None],
        token_mask=active[:, None],
        tokens=tokens[:, None],
        key=None,
    )
    # A row that has ended may stand at the end of the table of learned positions.
    positions = jnp.where(active, state.lengths, 0)[:, None]
    batch = {"tokens": tokens[:, None], "positions": positions}
    return _forward(model, params, layout, batch, context, state)


def _forward(
    model: Transformer,
    params: Tree,
    layout: Layout,
    batch: Batch,
    context: Context,
    state: DecodingState,
) -> DecodingState:
    """Feeds the batch; logits come from the last real token of every row."""
    rest, stacked = layouts.split_stack(params, layout)
    x, reports = apply_stack(
        lambda block, x, use, caches: model.block(block, x, context, use, caches),
        stacked,
        model.embed(rest, batch),
        layout,
        state.caches,
    )
    num_real = context.token_mask.sum(1, dtype=jnp.int32)
    last = jnp.maximum(num_real - 1, 0)[:, None, None]
    x = jnp.take_along_axis(x, last, axis=1)  # [B, 1, M]
    logits = model.logits(model.head_params(rest), x)[:, 0]
    return DecodingState(reports.cache, state.lengths + num_real, logits)
