"""Everything that a training step changes, described once.

One description of the parameters (`Transformer.parameters`) gives shapes, shardings and initial
values of the whole state: `describe` makes ShapeDtypeStructs with shardings, `initialize` makes the
arrays, straight where they belong.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning, is_names, is_parameter, partition_spec
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Form, Layout, state_building
from m6jax.modeling import balancing
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Optimizer


@struct.dataclass
class Extra:
    """What some runs keep besides.

    Attributes:
      averaged: exponential moving average of the parameters; None if not wanted.
      router_bias: biases of routers that are balanced by them, see `modeling.balancing`; None if
        there are none.
      master: float32 parameters that those of fewer bits are rounded from; None if there are none.
      loss_scale: what the loss is multiplied with, so that gradients in float16 are not lost; None
        for types with the range of float32.
    """

    averaged: Tree | None = None
    router_bias: Tree | None = None
    master: Tree | None = None
    loss_scale: DynamicScale | None = None


@struct.dataclass
class TrainState:
    """State of a training run.

    Attributes:
      step: int32[], updates made.
      params: parameters.
      opt_state: state of the optimizer, parameter-shaped trees.
      rng: uint32[2], data of the key from which every step's key is folded.
      extra: what some runs keep besides.
    """

    step: Any
    params: Tree
    opt_state: Any
    rng: Any
    extra: Extra

    def served(self) -> Tree:
        """Returns what to evaluate: averaged parameters if there are any, and router biases."""
        params = self.params if self.extra.averaged is None else self.extra.averaged
        return balancing.join(params, self.extra.router_bias)

    def step_key(self) -> PRNGKeyArray:
        """Returns the key of this step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.rng), self.step)


def logical_axes(parameters: Tree) -> Tree:
    """Returns the tuples of names from a tree of `Parameter`s."""
    return jax.tree.map(lambda p: p.axes, parameters, is_leaf=is_parameter)


def create(
    params: Tree,
    tx: optax.GradientTransformation,
    seed: int,
    averaged: bool,
    router_bias: Tree | None = None,
    master: bool = False,
    scaled: bool = False,
) -> TrainState:
    """Returns the state before the first step, from initial parameters and router biases.

    Args:
      params: initial parameters.
      tx: see `optimizers`.
      seed: of the key that is kept.
      averaged: keep a moving average, in the types of the parameters (of the masters, if any).
      router_bias: see `Extra`.
      master: keep float32 parameters.
      scaled: scale the loss.
    """
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params) if master else None
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=tx.init(params),
        rng=jax.random.key_data(jax.random.key(seed)),
        extra=Extra(
            averaged=(exact or params) if averaged else None,
            router_bias=router_bias,
            master=exact,
            loss_scale=new_loss_scale() if scaled else None,
        ),
    )


def new_loss_scale() -> DynamicScale:
    """Returns the scale with which a run begins: 65,536."""
    new = DynamicScale()
    return new.replace(fin_steps=jnp.int32(new.fin_steps), scale=jnp.float32(new.scale))


def abstract_state(
    model: Transformer,
    layout: Layout,
    optimizer: Optimizer,
    partitioning: Partitioning,
    mesh: Mesh,
    averaged: bool,
    master: bool = False,
    scaled: bool = False,
) -> TrainState:
    """Returns the state with ShapeDtypeStructs (with shardings) in the place of arrays.

    Raises:
      ConfigError: a parameter's dimension does not divide over the mesh; names both numbers.
    """
    parameters = model.parameters(layout)
    axes = logical_axes(parameters)
    biases = model.router_bias(layout)
    shapes, bias_shapes = jax.tree.map(
        lambda p: p.value, (parameters, biases), is_leaf=is_parameter
    )
    tx = optimizer.build(axes)
    abstract = jax.eval_shape(
        lambda params, biases: create(params, tx, 0, averaged, biases, master, scaled),
        shapes,
        bias_shapes,
    )
    shardings = partitioning.weight_shardings(parameters, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    rules = partitioning.weight_rules

    def moment(names: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(names, rules))

    opt_shardings = jax.tree.map(moment, optimizer.state_axes(axes, shapes), is_leaf=is_names)
    state = TrainState(
        step=whole,
        params=shardings,
        opt_state=opt_shardings,
        rng=whole,
        extra=Extra(
            averaged=shardings if averaged else None,
            router_bias=partitioning.weight_shardings(biases, mesh),
            master=shardings if master else None,
            loss_scale=jax.tree.map(lambda _: whole, abstract.extra.loss_scale),
        ),
    )
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, state
    )


def shardings_of(abstract: Tree) -> Tree:
    """Returns the shardings of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda x: x.sharding, abstract)


def initialize(
    model: Transformer,
    layout: Layout,
    tx: optax.GradientTransformation,
    seed: int,
    abstract: TrainState,
) -> TrainState:
    """Draws a new state layer by layer, every array made where `abstract` says it lies."""
    return state_building.build(one_layer(model, layout, tx, seed, abstract), abstract)


def one_layer(
    model: Transformer,
    layout: Layout,
    tx: optax.GradientTransformation,
    seed: int,
    abstract: TrainState,
) -> Callable[[Int[Array, ""]], TrainState]:
    """Returns what gives a new state's layer of a number; see `state_building.build`."""
    extra = abstract.extra

    def no_bias(name: str, bias: Any) -> jax.Array:
        stacked = layouts.LeafName.of(name).stacked
        return jnp.zeros((1, *bias.shape[1:]) if stacked else bias.shape, bias.dtype)

    def make(i: Int[Array, ""]) -> TrainState:
        key = jax.random.key(seed)
        layer = model.init_layer(key, i)
        stack = jax.tree.map(lambda x: x[None], layer)
        stacked: Any = {run.key: stack for run in layout.runs} if layout.borders else stack
        if layout.form is Form.UNROLLED:
            stacked = [layer] * layout.depth
        params = layouts.join_stack(model.init_rest(key), stacked, layout)
        biases = pytrees.map_named(no_bias, extra.router_bias)
        kept = (extra.averaged, extra.master, extra.loss_scale)
        averaged, master, scaled = (tree is not None for tree in kept)
        return create(params, tx, seed, averaged, biases, master, scaled)

    return make
