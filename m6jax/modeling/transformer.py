"""M6's one transformer: a prefix that sees itself in full, then a causal target.

`Transformer` is a plain value: modules for the three parts (inputs, one layer, outputs) and
functions of explicit parameter trees. The ordinary step calls `apply`; the streamed step, decoding
and the planner call the parts.

Axis letters: B rows, T length, S positions of a cache, M width (embed), V vocabulary, L layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, PRNGKeyArray

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import is_parameter, without_mesh
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Form, Layout, Run
from m6jax.modeling import balancing
from m6jax.modeling.attention import Cache
from m6jax.modeling.block import (
    Batch,
    Block,
    Context,
    LayerReport,
    ModelOutput,
    StackOutput,
    join_pattern,
    make_context,
)
from m6jax.modeling.config import ModelConfig, Positions
from m6jax.modeling.image import PatchEmbedder
from m6jax.modeling.layers import (
    Embedder,
    OutputHead,
    make_norm,
    output_logits,
    without_other_ids,
)
from m6jax.modeling.stack import apply_stack


class Parts(NamedTuple):
    """The modules of a model; `patches` and `head` are used where it has them."""

    embedder: Embedder
    patches: PatchEmbedder
    block: Block
    final_norm: nn.Module
    head: OutputHead


def make_parts(config: ModelConfig) -> Parts:
    """Returns the modules of a model."""
    dtypes: dict[str, Any] = {
        "init_scale": config.init_scale,
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
    }
    learned = config.positions is Positions.LEARNED
    return Parts(
        embedder=Embedder(
            vocab_size=config.vocab_size,
            embed_dim=config.embed_dim,
            max_length=config.max_length if learned else None,
            scaled=config.scale_embedding,
            **dtypes,
        ),
        patches=PatchEmbedder(**dtypes),
        block=Block(config),
        final_norm=make_norm(config.norm, dtypes["dtype"], epsilon=config.norm_epsilon),
        head=OutputHead(vocab_size=config.vocab_size, **dtypes),
    )


class Transformer:
    """The model as functions of explicit parameter trees.

    The tree has `embedder`, the stack (see `layouts`), `final_norm`, and `head` and `patches` where
    the model has them.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._parts = make_parts(config)

    def parameters(self, layout: Layout) -> Tree:
        """Returns the description of all parameters: a tree of `Parameter`s without arrays."""
        return balancing.split(self._declared(layout))[0]

    def router_bias(self, layout: Layout) -> Tree | None:
        """Returns the description of the biases of routers that have any; see `balancing`."""
        return balancing.split(self._declared(layout))[1]

    def layer_names(self) -> list[str]:
        """Returns the paths of a layer's parameters inside of it, such as 'attention/query'."""
        _, block = self._declared_parts()
        return [name for name, _ in pytrees.flatten_named(balancing.split(block)[0], is_parameter)]

    def _declared(self, layout: Layout) -> Tree:
        rest, block = self._declared_parts()
        layout.check_names(name for name, _ in pytrees.flatten_named(block, is_parameter))
        if layout.form is Form.UNROLLED:
            return layouts.join_stack(rest, [block] * layout.depth, layout)

        def of_run(run: Run) -> Tree:
            def add_layers(name: str, parameter: Any) -> Any:
                shape = (min(layout.unit_of(name), run.length), *parameter.value.shape)
                value = jax.ShapeDtypeStruct(shape, parameter.value.dtype)
                return parameter.replace(value=value, axes=("layers", *parameter.axes))

            return pytrees.map_named(add_layers, block, is_leaf=is_parameter)

        runs = {run.key: of_run(run) for run in layout.runs}
        stacked = runs if layout.borders else of_run(*layout.runs)
        return layouts.join_stack(rest, stacked, layout)

    def init(self, key: PRNGKeyArray, layout: Layout) -> Tree:
        """Returns initial parameters.

        The key of a value is folded from the parameter's path and the number of its layer, so that
        every layout and mesh begins with the same numbers.
        """
        return draw(self.parameters(layout), key, layout)

    def init_layer(self, key: PRNGKeyArray, layer: int | Int[Array, ""]) -> Tree:
        """Returns the initial parameters of the layer of a number, int or int32[]; see `init`."""
        block, _ = balancing.split(self._declared_parts()[1])
        return _draw(block, key, layer)

    def init_rest(self, key: PRNGKeyArray) -> Tree:
        """Returns the initial parameters outside of the stack; see `init`."""
        return _draw(self._declared_parts()[0], key, 0)

    def apply(
        self, params: Tree, batch: Batch, layout: Layout, key: PRNGKeyArray | None = None
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
        key: PRNGKeyArray | None = None,
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
        x, reports = apply_stack(
            lambda block, x, use, _: self.block(block, x, context, use),
            stacked,
            self.embed(rest, batch),
            layout,
            remat=self.config.remat,
            inputs_on_host=inputs_on_host,
        )
        return StackOutput(x, join_pattern(reports.router))

    def head_params(self, rest: Tree) -> Tree:
        """Returns the parameters that `logits` needs: norm, and table or matrix of the output."""
        output = rest["embedder"]["table"] if self.config.tied_output else rest["head"]["kernel"]
        return {"final_norm": rest["final_norm"], "output": output}

    def context(self, batch: Batch, key: PRNGKeyArray | None) -> Context:
        """Returns what every layer gets in a pass over whole rows."""
        return make_context(self.config, batch, key)

    def embed(self, rest: Tree, batch: Batch) -> Float[Array, "B T M"]:
        """Returns the stack's input [B, T, M] from the parameters outside of the stack."""
        parts = self._parts
        x = _apply(parts.embedder, rest["embedder"], batch["tokens"], batch["positions"])
        if "patches" in batch:
            x = _apply(parts.patches, rest["patches"], x, batch["patches"], batch["patch_mask"])
        return x

    def block(
        self,
        params: Tree,
        x: Float[Array, "B T M"],
        context: Context,
        use: Int[Array, ""],
        caches: tuple[Cache, ...] | None = None,
    ) -> tuple[Float[Array, "B T M"], LayerReport]:
        """Applies one round of the pattern.

        Args:
          params: of this block.
          x: [B, T, M].
          context: of the pass.
          use: int32[], how many blocks came before; the randomness of a layer follows from it.
          caches: one a layer of the pattern, in decoding.
        """
        return _apply(self._parts.block, params, x, use, context, caches)

    def logits(self, head: Tree, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Returns float32[B, T, V] from `head_params` and the stack's output [B, T, M].

        Ids from `ModelConfig.num_ids` on get NEVER.
        """
        x = _apply(self._parts.final_norm, head["final_norm"], x)
        logits = output_logits(x, head["output"], self.config.tied_output)
        return without_other_ids(logits, self.config.num_ids)

    def _declared_parts(self) -> tuple[dict[str, Any], Any]:
        """Returns the `Parameter`s outside of the stack and those of one block."""
        config = self.config
        row = jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, config.embed_dim), jnp.dtype(config.dtype))
        context = Context(row, jnp.ones((1, 1, 1, 1), bool), row == 0, row, None)

        def declared(module: nn.Module, *args: Any) -> Any:
            with without_mesh():
                variables = jax.eval_shape(module.init, jax.random.key(0), *args)
            return balancing.join(variables["params"], variables.get(balancing.COLLECTION))

        block = declared(self._parts.block, x, jnp.int32(0), context)
        rest = {
            "embedder": declared(self._parts.embedder, row, row),
            "final_norm": declared(self._parts.final_norm, x),
        }
        if not config.tied_output:
            rest["head"] = declared(self._parts.head, x)
        if config.patch_dim is not None:
            patches = jnp.zeros((1, 1, config.patch_dim))
            rest["patches"] = declared(self._parts.patches, x, patches, row)
        return rest, block


def draw(parameters: Tree, key: PRNGKeyArray, layout: Layout) -> Tree:
    """Returns initial values of all parameters; see `Transformer.init`.

    Args:
      parameters: tree of `Parameter`s, its stack lying as `layout` says.
      key: of all values.
      layout: how the stack lies.
    """

    def values(name: str, parameter: Any) -> jax.Array:
        layers, inside = layout.layers_of(name), layouts.LeafName.of(name).inside
        if layout.form is Form.STACKED and layers:
            one = parameter.replace(value=jax.eval_shape(lambda x: x[0], parameter.value))
            return jnp.stack([_draw_leaf(inside, one, key, i) for i in layers])
        return _draw_leaf(inside, parameter, key, layers[0] if layers else 0)

    return pytrees.map_named(values, parameters, is_leaf=is_parameter)


def _draw(parameters: Tree, key: PRNGKeyArray, layer: int | Int[Array, ""]) -> Tree:
    """Returns initial values of the parameters of one layer, or outside of the stack."""
    return pytrees.map_named(
        lambda name, parameter: _draw_leaf(name, parameter, key, layer),
        parameters,
        is_leaf=is_parameter,
    )


def _draw_leaf(
    name: str, parameter: Any, key: PRNGKeyArray, layer: int | Int[Array, ""]
) -> jax.Array:
    path_key = pytrees.key_of(name, key)
    shape, dtype = parameter.value.shape, parameter.value.dtype
    return parameter.initializer(jax.random.fold_in(path_key, layer), shape, dtype)


def _apply(module: nn.Module, params: Tree, *args: Any) -> Any:
    return module.apply(balancing.variables(params), *args)
