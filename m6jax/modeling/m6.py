"""The whole model as one flax module, for every layout of its stack.

>>> model = M6(config, config.layout(unit=1))                       # one shared layer
>>> variables = model.init(jax.random.key(0), batch)
>>> model.apply(variables, batch).logits                            # float32[B, T, V]
>>> model.apply(variables, batch, rngs={"dropout": key}, method="hidden").x

`variables["params"]` is the tree of `TrainState.params`; biases of routers are the collection
`router_bias`. A stack of L layers with U distinct ones is a scan in a scan:

    nn.scan(nn.scan(Block, {"params": 0}, length=U), variable_broadcast="params", length=L / U)

Inside of the scans the leaves of each unit are a collection, and every scan cuts those of at least
its own unit; so parts of a layer may have units of their own. Unrolled layers are a list of blocks.

`Transformer` is the same model as functions of explicit trees, for what has to cut layers out of
them itself: stacks cut in runs, weights on the host, decoding. A test holds the two equal, and
`apply_layers` chooses between them for the ordinary step and for evaluation.

Axis letters: B rows, T length, M width (embed), V vocabulary, L layers, U distinct ones.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

from m6jax.foundation.partitioning import Partitioning, without_mesh
from m6jax.foundation.pytrees import Tree, map_named
from m6jax.layouts import Form, Layout, offload
from m6jax.layouts.layout import LayoutError
from m6jax.modeling import balancing
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
from m6jax.modeling.config import ModelConfig, Remat
from m6jax.modeling.layers import without_other_ids
from m6jax.modeling.stack import policy_of
from m6jax.modeling.transformer import Transformer, draw, make_parts

COLLECTIONS = ("params", balancing.COLLECTION)


class M6(nn.Module):
    """A prefix that sees itself in full, then a causal target.

    Attributes:
      config: what the model is.
      layout: how its stack lies; not cut in runs.
      inputs_on_host: the layers' inputs wait for the backward pass on the host; `remat` is FULL.
    """

    config: ModelConfig
    layout: Layout
    inputs_on_host: bool = False

    def setup(self) -> None:
        """Makes the parts.

        Raises:
          LayoutError: a stack cut in runs, which `Transformer` applies.
        """
        if self.layout.borders:
            raise LayoutError(
                f"M6.layout: the stack is cut in runs at {self.layout.borders} (use layout.whole,"
                " or Transformer.apply)"
            )
        parts = make_parts(self.config)
        self.embedder, self.final_norm = parts.embedder, parts.final_norm
        if self.config.patch_dim is not None:
            self.patches = parts.patches
        if not self.config.tied_output:
            self.head = parts.head
        block = self._block_class()
        if self.layout.form is Form.STACKED:
            self.layers = _stacked(block, self.layout)(self.config, self.inputs_on_host)
        else:
            self.layers = [
                block(self.config, self.inputs_on_host) for _ in range(self.layout.depth)
            ]
        if self.is_initializing():
            self._put_initial_values()

    def __call__(self, batch: Batch) -> ModelOutput:
        """Runs the model on whole rows; see `hidden`."""
        output = self.hidden(batch)
        return ModelOutput(self.logits(output.x), output.router)

    def hidden(self, batch: Batch) -> StackOutput:
        """Runs all but the head on whole rows.

        Args:
          batch: see `Transformer.apply_layers`.
        """
        context = make_context(self.config, batch, self._key("dropout"))
        x = self.embedder(batch["tokens"], batch["positions"])
        if "patches" in batch:
            x = self.patches(x, batch["patches"], batch["patch_mask"])
        apply_layers = self._scan if self.layout.form is Form.STACKED else self._loop
        x, reports = apply_layers(x, context)
        return StackOutput(x, join_pattern(reports.router))

    def logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Returns float32[B, T, V] from the stack's output [B, T, M]."""
        x = self.final_norm(x)
        logits = self.embedder.logits(x) if self.config.tied_output else self.head(x)
        return without_other_ids(logits, self.config.num_ids)

    @nn.nowrap
    def init_with_output(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Does what flax's `init_with_output` does; `init` is its second result.

        The variables are whole, whatever the method and the batch, whose numbers of rows and tokens
        do not matter. Under `jax.jit`, `init` makes no pass.
        """
        with without_mesh():  # a mesh would have rows for every device
            return super().init_with_output(*args, **kwargs)

    @nn.nowrap
    def declared(self) -> dict[str, Tree]:
        """Returns the description of all variables: trees of `Parameter`s, without arrays."""
        model = Transformer(self.config)
        biases = model.router_bias(self.layout)
        return balancing.variables(balancing.join(model.parameters(self.layout), biases))

    @nn.nowrap
    def shardings(self, partitioning: Partitioning, mesh: Mesh) -> dict[str, Tree]:
        """Returns a NamedSharding for every variable, in the place of `nn.get_partition_spec`.

        >>> shardings = model.shardings(partitioning, mesh)
        >>> variables = jax.jit(model.init, out_shardings=shardings)(key, batch)

        Raises:
          ConfigError: a dimension does not divide by its mesh axes; names leaf and both numbers.
        """
        return partitioning.weight_shardings(self.declared(), mesh)

    @nn.nowrap
    def _put_initial_values(self) -> None:
        """Puts every variable where its module finds it, so that flax draws none.

        Flax's numbers would differ between layouts: its keys follow the scans, not the layers.
        """
        key = self._key("params")
        if key is None:
            return  # the first module that looks for its variables says so
        for collection, tree in self.declared().items():
            if self.is_mutable_collection(collection):
                for name, values in draw(tree, key, self.layout).items():
                    self.put_variable(collection, name, values)

    @nn.nowrap
    def _key(self, name: str) -> PRNGKeyArray | None:
        """Returns the key of `rngs` itself, not one drawn from it.

        The streamed step has the same key and no module, and must drop the same values.
        """
        assert self.scope is not None
        return self.scope.rngs[name].as_jax_rng() if self.has_rng(name) else None

    @nn.nowrap
    def _block_class(self) -> Any:
        remat = self.config.remat
        if remat is Remat.NOTHING:
            return Block
        return nn.remat(
            Block,
            policy=policy_of(remat, self.inputs_on_host),
            prevent_cse=self.layout.form is Form.UNROLLED,
        )

    @nn.nowrap
    def _scan(
        self, x: Float[Array, "B T M"], context: Context
    ) -> tuple[Float[Array, "B T M"], LayerReport]:
        lengths = _lengths(self.layout)[::-1]  # outermost first
        uses = jnp.arange(self.layout.depth, dtype=jnp.int32).reshape(lengths)
        x, reports = self.layers(x, uses, context)
        by_use = (self.layout.depth,)
        return x, jax.tree.map(
            lambda leaf: leaf.reshape(by_use + leaf.shape[len(lengths) :]), reports
        )

    @nn.nowrap
    def _loop(
        self, x: Float[Array, "B T M"], context: Context
    ) -> tuple[Float[Array, "B T M"], LayerReport]:
        reports = []
        for i, block in enumerate(self.layers):
            x, report = block(x, jnp.int32(i), context)
            reports.append(report)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)


def apply_layers(
    model: Transformer,
    params: Tree,
    batch: Batch,
    layout: Layout,
    key: PRNGKeyArray | None = None,
    inputs_on_host: bool = False,
) -> StackOutput:
    """Does what `Transformer.apply_layers` does, by the flax module wherever it can.

    A stack cut in runs is no single scan. With weights on the host, nested scans of flax fail on
    the memory of the cotangent. So both are left to explicit slices.
    """
    if layout.borders or any(map(offload.on_host, jax.tree.leaves(params))):
        return model.apply_layers(params, batch, layout, key, inputs_on_host)
    module = M6(model.config, layout, inputs_on_host)
    rngs = None if key is None else {"dropout": key}
    output = module.apply(balancing.variables(params), batch, rngs=rngs, method="hidden")
    assert isinstance(output, StackOutput)  # flax's type allows for changed variables too
    return output


def _spans(layout: Layout) -> list[int]:
    """Returns how many layers each scan covers, innermost first: the units and the depth."""
    return sorted({*layout.units, layout.depth})


def _lengths(layout: Layout) -> list[int]:
    """Returns the lengths of the scans, innermost first."""
    return [span // inner for inner, span in itertools.pairwise([1, *_spans(layout)])]


def _cuts(span: int, unit: int) -> bool:
    """Whether the scan over so many layers cuts leaves of a unit.

    Where it is a scan over one layer, those of larger units are cut to one already.
    """
    return unit == span or unit > span > 1


def _stacked(block: Any, layout: Layout) -> Any:
    """Returns the module class that applies a block L times.

    Args:
      block: module class (x, use, context) -> (x, report).
      layout: how the stack lies.
    """
    units = layout.units

    def collections(units: list[int]) -> list[str]:
        return [_of_unit(name, unit) for name in COLLECTIONS for unit in units]

    block = nn.map_variables(block, trans_in_fn=_without_units)
    for span, length in zip(_spans(layout), _lengths(layout), strict=True):
        block = nn.scan(
            block,
            variable_axes=dict.fromkeys(collections([u for u in units if _cuts(span, u)]), 0),
            variable_broadcast=collections([u for u in units if not _cuts(span, u)]),
            in_axes=(0, nn.broadcast),
            length=length,
            check_constancy_invariants=False,  # it would trace the body once more
        )
    return nn.map_variables(block, trans_in_fn=functools.partial(_cut, layout=layout))


def _of_unit(collection: str, unit: int) -> str:
    return f"{collection}_of_{unit}"


def _with_units(variables: Tree, layout: Layout) -> Tree:
    """Divides the collections of a block, or of a stack, by their leaves' units."""
    divided: dict[str, dict[str, Any]] = {}
    for collection, tree in variables.items():
        for name, leaf in flatten_dict(tree, sep="/").items():
            of_unit = _of_unit(collection, layout.unit_of(name))
            divided.setdefault(of_unit, {})[name] = leaf
    return {name: unflatten_dict(leaves, sep="/") for name, leaves in divided.items()}


def _without_units(variables: Tree) -> Tree:
    """The inverse of `_with_units`."""
    whole: dict[str, dict[str, Any]] = {}
    for name, tree in variables.items():
        collection = name.rsplit("_of_", 1)[0]
        whole.setdefault(collection, {}).update(flatten_dict(tree, sep="/"))
    return {name: unflatten_dict(leaves, sep="/") for name, leaves in whole.items()}


def _cut(variables: Tree, layout: Layout) -> Tree:
    """Divides a stack's collections by units, and their leading axes by the scans."""
    spans, lengths = _spans(layout), _lengths(layout)

    def cut(name: str, leaf: jax.Array) -> jax.Array:
        unit = layout.unit_of(name)
        own = [n for span, n in zip(spans, lengths, strict=True) if _cuts(span, unit)]
        return leaf.reshape(*own[::-1], *leaf.shape[1:])

    return _with_units({key: map_named(cut, tree) for key, tree in variables.items()}, layout)
