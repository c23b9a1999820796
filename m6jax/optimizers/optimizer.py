"""Optimizers: settings, weight decay, and what delinking may do with their states.

An optimizer is a frozen object; `build` makes an optax transformation from the logical axes of the
parameters. The transformation returns the *direction*: it is to be subtracted after multiplication
with the learning rate, which depends on the step alone and is no part of the optimizer.

>>> tx = AdamW(weight_decay=0.1).build(axes)
>>> state = tx.init(params)
>>> directions, state = tx.update(grads, state, params)
>>> params = jax.tree.map(lambda p, d: p - learning_rate * d, params, directions)

Directions are float32 whatever the type of the parameters. Stacked layers are separate layers here:
whoever slices layer i out of the parameters, gradients and state under `layers`, and takes 'layers'
off the axes, gets the slice of the whole update. That is how layers on the host are updated.
"""

import abc
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from m6jax.foundation.partitioning import names_by_leaf
from m6jax.foundation.pytrees import Tree, map_named
from m6jax.foundation.validated import ConfigError, validated
from m6jax.layouts import LeafName
from m6jax.optimizers import adafactor
from m6jax.optimizers.adafactor import AdafactorSettings, AdafactorState
from m6jax.optimizers.adam import (
    AdamState,
    MomentType,
    check_decay,
    check_positive,
    is_stacked,
    over_layers,
    scale_by_adam,
    split_results,
)

NO_DECAY = ("norm", "(bias|scale)$", "(^|/)embedder/")


class Optimizer(abc.ABC):
    """What the training step, checkpoints and delinking ask of an optimizer.

    Attributes:
      moments_known: whether its state says how it grows with the gradients, which delinking needs
        to rescale or measure it.
    """

    moments_known: ClassVar[bool] = True

    @abc.abstractmethod
    def build(self, axes: Tree) -> optax.GradientTransformation:
        """Returns the transformation for parameters with these logical axes.

        Args:
          axes: tree like the parameters, its leaves tuples of logical axis names.

        Returns:
          A transformation whose `init` raises ValueError, naming the leaf, for axes that do not
          fit, and whose `update` needs the parameters. It may take the learning rate of the step
          besides, as optax's `GradientTransformationExtraArgs`.
        """

    @abc.abstractmethod
    def state_axes(self, axes: Tree, params: Tree) -> Any:
        """Returns the state's structure with logical axis names in the place of arrays.

        Args:
          axes: tree like the parameters, its leaves tuples of logical axis names.
          params: arrays or ShapeDtypeStructs.
        """

    @abc.abstractmethod
    def with_second_moments(self, state: Any, squares: Tree, axes: Tree) -> Any:
        """Returns the state with second moments as if `squares` had always been seen.

        The counts stay; where a count is 0, so that nothing was seen, the first gradient decides.

        Args:
          state: the optimizer's state.
          squares: mean squares of the gradients, float32, shaped like the parameters.
          axes: tree like the parameters, its leaves tuples of logical axis names.
        """


@validated
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101).

    Attributes:
      b1: decay of the mean of gradients.
      b2: decay of the mean of squares.
      eps: added to the root of the mean of squares.
      weight_decay: share of a parameter in the direction, before the learning rate.
      no_decay: patterns (re.search) of the names of parameters that do not decay.
      mu_dtype: type in which the mean of gradients is kept; squares are always float32.
    """

    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = NO_DECAY
    mu_dtype: MomentType = "float32"

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        check_decay("AdamW.b1", self.b1)
        check_decay("AdamW.b2", self.b2)
        check_positive("AdamW.eps", self.eps)
        check_weight_decay("AdamW", self.weight_decay, self.no_decay)

    def build(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.build`; the state is an `AdamState`."""
        adam = scale_by_adam(axes, b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.mu_dtype)
        return with_weight_decay(adam, self.weight_decay, self.no_decay)

    def state_axes(self, axes: Tree, params: Tree) -> AdamState:
        """See `Optimizer.state_axes`."""
        count = jax.tree.map(lambda _, names: names[: is_stacked(names)], params, axes)
        return AdamState(mu=axes, nu=axes, count=count)

    def with_second_moments(self, state: AdamState, squares: Tree, axes: Tree) -> AdamState:
        """See `Optimizer.with_second_moments`."""
        del axes

        def nu(square: jax.Array, count: jax.Array) -> jax.Array:
            steps = over_layers(count, square.ndim).astype(jnp.float32)
            return square * (1 - self.b2**steps)  # `update` divides by this

        return state.replace(nu=jax.tree.map(nu, squares, state.count))  # type: ignore[attr-defined]


@validated
class Adafactor(AdafactorSettings, Optimizer):
    """Adafactor by layers and experts (Shazeer & Stern 2018, arXiv 1804.04235).

    Attributes, besides those of `AdafactorSettings`:
      weight_decay: share of a parameter in the direction, before the learning rate.
      no_decay: patterns (re.search) of the names of parameters that do not decay.
    """

    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = NO_DECAY

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        super().check()
        check_weight_decay("Adafactor", self.weight_decay, self.no_decay)

    def build(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.build`; the state is an `AdafactorState`."""
        directions = adafactor.scale_by_adafactor(axes, self)
        return with_weight_decay(directions, self.weight_decay, self.no_decay)

    def state_axes(self, axes: Tree, params: Tree) -> AdafactorState:
        """See `Optimizer.state_axes`."""
        return adafactor.state_axes(axes, params, self)

    def with_second_moments(
        self, state: AdafactorState, squares: Tree, axes: Tree
    ) -> AdafactorState:
        """See `Optimizer.with_second_moments`."""
        axes_of = names_by_leaf(axes)
        results = map_named(
            lambda name, square: adafactor.mean_squares(square + self.eps, axes_of[name], self),
            squares,
        )
        v_row, v_col, v = split_results(results, squares, 3)
        return state.replace(v_row=v_row, v_col=v_col, v=v)  # type: ignore[attr-defined]


def decay_mask(tree: Tree, no_decay: tuple[str, ...] = NO_DECAY) -> Tree:
    """Returns a tree of bools that say which leaves decay.

    A leaf decays unless a pattern is found in its name (`layers/attention_norm/scale`, in a stack
    that is cut in runs too). The rank does not count: in a stack a vector has two dimensions.

    Args:
      tree: tree like the parameters.
      no_decay: patterns for re.search.
    """
    return map_named(
        lambda name, _: not any(re.search(p, LeafName.of(name).whole) for p in no_decay), tree
    )


def with_weight_decay(
    tx: optax.GradientTransformation, weight_decay: float, no_decay: tuple[str, ...]
) -> optax.GradientTransformation:
    """Adds a share of the parameters that decay to the directions (see `decay_mask`)."""
    inner = optax.with_extra_args_support(tx)

    def update(grads: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ValueError("update needs the parameters: tx.update(grads, state, params)")
        directions, state = inner.update(grads, state, params, **more)
        if weight_decay == 0:
            return directions, state

        def decay(direction: jax.Array, param: jax.Array, decays: bool) -> jax.Array:
            return direction + weight_decay * param.astype(jnp.float32) if decays else direction

        return jax.tree.map(decay, directions, params, decay_mask(params, no_decay)), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def check_weight_decay(name: str, weight_decay: float, no_decay: tuple[str, ...]) -> None:
    """Raises ConfigError for a share below 0, and for patterns that are none."""
    if not weight_decay >= 0:
        raise ConfigError(f"{name}.weight_decay: {weight_decay}; 0 or more is needed")
    for pattern in no_decay:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{name}.no_decay: {pattern!r} is no pattern: {error}") from error
