"""Any optimizer of optax that keeps nothing but moments and counts, for stacks of layers.

Optax sees one tree of parameters: it keeps one count for all of it, and takes a stack of layers for
one parameter with one more dimension. Here every layer of every parameter is optimized as if it
were alone, so that layers can be stacked, streamed and delinked with counts of their own:

>>> optimizer = Optax(name="lion", settings={"b1": 0.95}, weight_decay=0.1)
>>> state = optimizer.build(axes).init(params)              # layers/w: [U, M, H]
>>> [(name, tree["layers"]["w"].shape) for name, tree in zip(state.names, state.trees)]
[('0/count', (U,)), ('0/mu', (U, M, H))]

What an optimizer does with all parameters together, such as clipping by their global norm, is done
with each layer's leaf alone.

Some steps are not the learning rate times a direction (fromage), or remember steps that were made
at other rates (lars). So each step is made by optax with the learning rate of that step, and the
direction is what this rate has to be multiplied with.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from m6jax.foundation.partitioning import Names, names_by_leaf
from m6jax.foundation.pytrees import Tree, flatten_named, map_named
from m6jax.foundation.validated import ConfigError, nearest, validated
from m6jax.optimizers.adam import is_stacked, split_results
from m6jax.optimizers.optimizer import NO_DECAY, Optimizer, check_weight_decay, with_weight_decay


@struct.dataclass
class OptaxState:
    """What an optimizer of optax remembers.

    Attributes:
      trees: trees with the structure of the parameters. Their leaves are shaped like the parameter,
        or hold one number: [U] where the first axis is `layers`, else [].
      names: what optax calls each tree in its own state: '0/mu'.
    """

    # No tuple and no dictionary: those are axes, and trees of parameters, to who looks for them.
    trees: list[Tree]
    names: tuple[str, ...] = struct.field(pytree_node=False)


@validated
class Optax(Optimizer):
    """An optimizer of optax by its name.

    Attributes:
      name: of a function of optax that takes a `learning_rate`, such as 'lion'.
      settings: its other arguments.
      weight_decay: share of a parameter in the direction, before the learning rate.
      no_decay: patterns (re.search) of the names of parameters that do not decay.
    """

    moments_known: ClassVar[bool] = False

    name: str
    settings: dict[str, float | int | bool | str | None] | None = None
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = NO_DECAY

    def check(self) -> None:
        """Raises ConfigError for a name or for settings that optax does not take."""
        arguments = _arguments(self.name)
        if "learning_rate" not in arguments:
            named = sorted(n for n in dir(optax) if "learning_rate" in _arguments(n))
            raise ConfigError(
                f"Optax.name: optax.{self.name} is no optimizer with a learning_rate"
                f"{nearest(self.name, named)}"
            )
        for setting in self.settings or {}:
            if setting not in arguments or setting in ("learning_rate", "weight_decay"):
                way = (
                    " (set Optax.weight_decay)"
                    if setting == "weight_decay"
                    else nearest(setting, arguments - {"learning_rate", "weight_decay"})
                )
                raise ConfigError(f"Optax.settings: {setting!r} is none of {self.name}'s{way}")
        check_weight_decay("Optax", self.weight_decay, self.no_decay)
        self._check_state()

    def build(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.build`; the state is an `OptaxState`."""
        own = self._transformation()
        structure = _state_of_one(own, ())
        names = tuple(name for name, _ in flatten_named(structure))
        axes_of = names_by_leaf(axes)

        def init_leaf(name: str, param: Any) -> tuple[Any, ...]:
            state = _by_layer(own.init, axes_of[name])(param.astype(jnp.float32))
            return tuple(jax.tree.leaves(state))

        def init(params: Tree) -> OptaxState:
            trees = split_results(map_named(init_leaf, params), params, len(names))
            return OptaxState(list(trees), names)

        def update(
            grads: Tree, state: OptaxState, params: Tree = None, *, learning_rate: Any = 1.0
        ) -> tuple[Tree, OptaxState]:
            now = self._transformation(learning_rate)

            def update_leaf(name: str, grad: Any, param: Any, *leaves: Any) -> tuple[Any, ...]:
                state = jax.tree.unflatten(jax.tree.structure(structure), leaves)
                update = _by_layer(now.update, axes_of[name])
                step, state = update(grad.astype(jnp.float32), state, param.astype(jnp.float32))
                return _divided(-step, learning_rate), *jax.tree.leaves(state)

            results = map_named(update_leaf, grads, params, *state.trees)
            directions, *trees = split_results(results, grads, 1 + len(names))
            return directions, OptaxState(trees, names)

        tx = optax.GradientTransformationExtraArgs(init, update)
        return with_weight_decay(tx, self.weight_decay, self.no_decay)

    def state_axes(self, axes: Tree, params: Tree) -> OptaxState:
        """See `Optimizer.state_axes`."""
        own = self._transformation()
        abstract = _state_of_one(own, (2,))
        layers = jax.tree.map(lambda _, names: names[: is_stacked(names)], params, axes)
        kept = flatten_named(abstract)
        trees = [axes if leaf.ndim else layers for _, leaf in kept]
        return OptaxState(trees, tuple(name for name, _ in kept))

    def with_second_moments(self, state: Any, squares: Tree, axes: Tree) -> Any:
        """Raises ConfigError: which of its moments are second ones is not known."""
        raise ConfigError(f"Optax: {self.name} does not say what it keeps of squared gradients")

    def _check_state(self) -> None:
        shape = (256, 384)  # large enough for optimizers that factor large matrices
        param = jax.ShapeDtypeStruct(shape, jnp.float32)

        def update(learning_rate: Any, grad: Any, state: Any, param: Any) -> Any:
            return self._transformation(learning_rate).update(grad, state, param)

        try:
            state = _state_of_one(self._transformation(), shape)
            jax.eval_shape(update, 1.0, param, state, param)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Optax.settings: {self.name}({self.settings}): {error}") from error
        if _depends(lambda rate, param: self._transformation(rate).init(param), 1.0, param):
            raise ConfigError(
                f"Optax.name: {self.name} takes the learning rate when it begins and never again,"
                " so that no schedule reaches it (choose another optimizer)"
            )
        for field, leaf in flatten_named(state):
            if leaf.shape not in ((), shape):
                raise ConfigError(
                    f"Optax.name: {self.name} keeps {field} of shape {leaf.shape} for a parameter"
                    f" of shape {shape}; only what is shaped alike, or one number, can be divided"
                    " over devices and layers (AdamW and Adafactor of m6jax can be)"
                )

    def _transformation(self, learning_rate: Any = 1.0) -> optax.GradientTransformation:
        settings = dict(self.settings or {})
        if "weight_decay" in _arguments(self.name):
            settings["weight_decay"] = 0.0
        return getattr(optax, self.name)(learning_rate=learning_rate, **settings)


def _arguments(name: str) -> set[str]:
    function = getattr(optax, name, None)
    if not inspect.isfunction(function):
        return set()
    return set(inspect.signature(function).parameters)


def _depends(fn: Callable[..., Any], *arguments: Any) -> bool:
    """Whether what a function returns depends on its first argument; nothing is computed."""
    jaxpr = jax.make_jaxpr(fn)(*arguments).jaxpr
    needed = set(map(id, jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if needed & set(map(id, eqn.outvars)):
            needed |= set(map(id, eqn.invars))
    return id(jaxpr.invars[0]) in needed


def _divided(step: jax.Array, learning_rate: Any) -> jax.Array:
    """Returns the direction of a step; 0 at a learning rate of 0, as at the start of a warm-up."""
    still = jnp.asarray(learning_rate) == 0
    return jnp.where(still, 0.0, step / jnp.where(still, 1.0, learning_rate))


def _by_layer(fn: Callable[..., Any], axes: Names) -> Callable[..., Any]:
    return jax.vmap(fn) if is_stacked(axes) else fn


def _state_of_one(tx: optax.GradientTransformation, shape: tuple[int, ...]) -> Any:
    """Returns the shapes of what is kept of one parameter."""
    return jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, jnp.float32))
