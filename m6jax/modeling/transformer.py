"""M6's one transformer: a prefix that sees itself in full, then a causal target.

`Transformer` is a plain value: modules for the three parts (inputs, one layer, outputs) and
functions of explicit parameter trees. The ordinary step calls `apply`; the streamed step, decoding
and the planner call the parts.

Axis letters: B rows, T length, S positions of a cache, M width (embed), V vocabulary, L layers.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import constrain, is_parameter, without_mesh
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Form, Layout, Run
from m6jax.modeling import balancing
from m6jax.modeling.attention import Attention, Cache, training_mask
from m6jax.modeling.config import LayerKind, ModelConfig, Positions
from m6jax.modeling.image import PatchEmbedder
from m6jax.modeling.layers import Embedder, FeedForward, OutputHead, dropout, make_norm
from m6jax.modeling.moe import MoE
from m6jax.modeling.routing import RouterStatistics
from m6jax.modeling.stack import apply_stack

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

    positions: jax.Array
    mask: jax.Array
    token_mask: jax.Array
    tokens: jax.Array
    key: jax.Array | None


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

    x: jax.Array
    router: RouterStatistics | None


@struct.dataclass
class ModelOutput:
    """What a whole pass gives back: logits float32[B, T, V], and router statistics as above."""

    logits: jax.Array
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
        self, x: jax.Array, context: Context, key: jax.Array | None, cache: Cache | None
    ) -> tuple[jax.Array, RouterStatistics | None, Cache | None]:
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
        keys = (None,) * 3 if key is None else tuple(jax.random.split(key, 3))
        attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_size,
            rotary=config.positions is Positions.ROTARY,
            name="attention",
            **common,
        )(self._norm("attention_norm")(x), context.positions, context.mask, cache)
        x = x + dropout(self._after("attention_after_norm", attention.x), config.dropout, keys[0])

        router = None
        normed = self._norm("mlp_norm")(x)
        if self.kind is LayerKind.SPARSE:
            assert config.moe is not None  # ModelConfig.check
            sparse = MoE(config.moe, config.mlp_dim, config.gated_mlp, name="moe", **common)
            output = sparse(normed, context.token_mask, keys[2], context.tokens)
            y, router = output.x, output.router
        else:
            y = FeedForward(config.mlp_dim, config.gated_mlp, name="mlp", **common)(normed)
        x = x + dropout(self._after("mlp_after_norm", y), config.dropout, keys[1])
        return x, router, attention.cache

    def _norm(self, name: str) -> nn.Module:
        return make_norm(self.config.norm, jnp.dtype(self.config.dtype), name)

    def _after(self, name: str, y: jax.Array) -> jax.Array:
        return self._norm(name)(y) if self.config.sandwich_norm else y


class Transformer:
    """The model as functions of explicit parameter trees.

    The tree has `embedder`, the stack (see `layouts`), `final_norm`, and `head` and `patches` where
    the model has them.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        dtypes: dict[str, Any] = {
            "init_scale": config.init_scale,
            "dtype": jnp.dtype(config.dtype),
            "param_dtype": jnp.dtype(config.param_dtype),
        }
        learned = config.positions is Positions.LEARNED
        self._embedder = Embedder(
            vocab_size=config.vocab_size,
            embed_dim=config.embed_dim,
            max_length=config.max_length if learned else None,
            **dtypes,
        )
        self._patches = PatchEmbedder(**dtypes)
        self._layers = [Layer(config, kind) for kind in config.pattern]
        self._final_norm = make_norm(config.norm, dtypes["dtype"], "final_norm")
        self._head = OutputHead(vocab_size=config.vocab_size, **dtypes)

    def parameters(self, layout: Layout) -> Tree:
        """Returns the description of all parameters: a tree of `Parameter`s without arrays."""
        return balancing.split(self._describe(layout))[0]

    def router_bias(self, layout: Layout) -> Tree | None:
        """Returns the description of the biases of routers that have any; see `balancing`."""
        return balancing.split(self._describe(layout))[1]

    def layer_names(self) -> list[str]:
        """Returns the paths of a layer's parameters inside of it, such as 'attention/query'."""
        _, block = self._describe_parts()
        return [name for name, _ in pytrees.flatten_named(balancing.split(block)[0], is_parameter)]

    def _describe(self, layout: Layout) -> Tree:
        rest, block = self._describe_parts()
        layout.check_names(name for name, _ in pytrees.flatten_named(block, is_parameter))
        if layout.form is Form.UNROLLED:
            return layouts.join_stack(rest, [block] * layout.depth, layout)

        def describe_run(run: Run) -> Tree:
            def add_layers(name: str, parameter: Any) -> Any:
                shape = (min(layout.unit_of(name), run.length), *parameter.value.shape)
                value = jax.ShapeDtypeStruct(shape, parameter.value.dtype)
                return parameter.replace(value=value, axes=("layers", *parameter.axes))

            return pytrees.map_named(add_layers, block, is_leaf=is_parameter)

        runs = {run.key: describe_run(run) for run in layout.runs}
        stacked = runs if layout.borders else describe_run(*layout.runs)
        return layouts.join_stack(rest, stacked, layout)

    def init(self, key: jax.Array, layout: Layout) -> Tree:
        """Returns initial parameters.

        The key of a value is folded from the parameter's path and the number of its layer, so that
        every layout and mesh begins with the same numbers.
        """
        layers = [self.init_layer(key, i) for i in range(layout.depth)]

        def stack(name: str, *leaves: jax.Array) -> jax.Array:
            return jnp.stack(leaves[: layout.unit_of(name)])

        stacked: Any = layers
        if layout.form is Form.STACKED:
            stacked = pytrees.map_named(stack, *layers)
        params = layouts.join_stack(self.init_rest(key), stacked, layout)
        return layouts.cut(params, layout) if layout.borders else params

    def init_layer(self, key: jax.Array, layer: Any) -> Tree:
        """Returns the initial parameters of the layer of a number, int or int32[]; see `init`."""
        block, _ = balancing.split(self._describe_parts()[1])
        return _draw(block, key, layer)

    def init_rest(self, key: jax.Array) -> Tree:
        """Returns the initial parameters outside of the stack; see `init`."""
        return _draw(self._describe_parts()[0], key, 0)

    def apply(
        self, params: Tree, batch: Batch, layout: Layout, key: jax.Array | None = None
    ) -> ModelOutput:
        """Runs the model on whole rows, for those who want logits; see `apply_layers`."""
        output = self.apply_layers(params, batch, layout, key)
        rest, _ = layouts.split_stack(params, layout)
        return ModelOutput(self.logits(self.head_params(rest), output.x), output.router)

    def apply_layers(
        self,
        params: Tree,
        batch: Batch,
        layout: Layout,
        key: jax.Array | None = None,
        inputs_on_host: bool = False,
    ) -> StackOutput:
        """Runs all but the head on whole rows.

        Args:
          params: parameters in the given layout, joined with biases if routers have any.
          batch: tokens, segment_ids, positions int32[B, T], optionally bidirectional int32[B, T],
            patches float32[B, I, F] and patch_mask int32[B, T].
          layout: how the stack lies.
          key: for dropout and jitter; None in evaluation.
          inputs_on_host: the layers' inputs wait for the backward pass on the host.
        """
        context = self.context(batch, key)
        rest, stacked = layouts.split_stack(params, layout)
        output = apply_stack(
            lambda block, x, use, _: self.block(block, x, context, use),
            stacked,
            self.embed(rest, batch),
            layout,
            remat=self.config.remat,
            inputs_on_host=inputs_on_host,
        )
        return StackOutput(output.x, join_pattern(output.layers.router))

    def head_params(self, rest: Tree) -> Tree:
        """Returns the parameters that `logits` needs: norm, and table or matrix of the output."""
        output = rest["embedder"]["table"] if self.config.tied_output else rest["head"]["kernel"]
        return {"final_norm": rest["final_norm"], "output": output}

    def context(self, batch: Batch, key: jax.Array | None) -> Context:
        """Returns what every layer gets in a pass over whole rows."""
        segment_ids, bidirectional = batch["segment_ids"], batch.get("bidirectional")
        if not self.config.causal:
            bidirectional = jnp.ones_like(segment_ids)
        mask = training_mask(segment_ids, bidirectional)
        return Context(batch["positions"], mask, segment_ids > 0, batch["tokens"], key)

    def embed(self, rest: Tree, batch: Batch) -> jax.Array:
        """Returns the stack's input [B, T, M] from the parameters outside of the stack."""
        x = _apply(self._embedder, rest["embedder"], batch["tokens"], batch["positions"])
        if "patches" in batch:
            x = _apply(self._patches, rest["patches"], x, batch["patches"], batch["patch_mask"])
        return x

    def block(
        self,
        params: Tree,
        x: jax.Array,
        context: Context,
        use: jax.Array,
        caches: tuple[Cache, ...] | None = None,
    ) -> tuple[jax.Array, LayerReport]:
        """Applies one round of the pattern.

        Args:
          params: of this block.
          x: [B, T, M].
          context: of the pass.
          use: int32[], how many blocks came before; the randomness of a layer follows from it.
          caches: one a layer of the pattern, in decoding.
        """
        routers, new_caches = [], []
        for i, layer in enumerate(self._layers):
            key = None
            if context.key is not None:
                key = jax.random.fold_in(context.key, use * len(self._layers) + i)
            own = params if len(self._layers) == 1 else params[self.config.layer_name(i)]
            cache = None if caches is None else caches[i]
            x, router, cache = _apply(layer, own, x, context, key, cache)
            routers += [] if router is None else [router]
            new_caches += [] if cache is None else [cache]
        return x, LayerReport(tuple(routers), tuple(new_caches))

    def logits(self, head: Tree, x: jax.Array) -> jax.Array:
        """Returns float32[B, T, V] from `head_params` and the stack's output [B, T, M]."""
        x = _apply(self._final_norm, head["final_norm"], x)
        names = "btm,vm->btv" if self.config.tied_output else "btm,mv->btv"
        matrix = head["output"].astype(x.dtype)
        logits = jnp.einsum(names, x, matrix, preferred_element_type=jnp.float32)
        return constrain(logits, ("batch", "length", "vocab"))

    def _describe_parts(self) -> tuple[dict[str, Any], Any]:
        """Returns the `Parameter`s outside of the stack and those of one block."""
        config = self.config
        row = jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, config.embed_dim), jnp.dtype(config.dtype))
        context = Context(row, jnp.ones((1, 1, 1, 1), bool), row == 0, row, None)

        def describe(module: nn.Module, *args: Any) -> Any:
            with without_mesh():
                return jax.eval_shape(module.init, jax.random.key(0), *args)["params"]

        layers = [describe(layer, x, context, None, None) for layer in self._layers]
        block = (
            layers[0]
            if len(layers) == 1
            else {self.config.layer_name(i): layer for i, layer in enumerate(layers)}
        )
        rest = {
            "embedder": describe(self._embedder, row, row),
            "final_norm": describe(self._final_norm, x),
        }
        if not config.tied_output:
            rest["head"] = describe(self._head, x)
        if config.patch_dim is not None:
            patches = jnp.zeros((1, 1, config.patch_dim))
            rest["patches"] = describe(self._patches, x, patches, row)
        return rest, block


def _draw(parameters: Tree, key: jax.Array, layer: Any) -> Tree:
    """Returns initial values of the parameters of one layer, or outside of the stack."""

    def value(name: str, parameter: Any) -> jax.Array:
        path_key = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
        shape, dtype = parameter.value.shape, parameter.value.dtype
        return parameter.initializer(jax.random.fold_in(path_key, layer), shape, dtype)

    return pytrees.map_named(value, parameters, is_leaf=is_parameter)


def _apply(module: nn.Module, params: Tree, *args: Any) -> Any:
    return module.apply({"params": params}, *args)


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
