"""Adam with a step count for every leaf and every layer.

Adam divides its moments by 1 - b^t, t being the number of gradients they have seen. One t for the
whole tree is wrong as soon as the moments of some layers start anew while others go on: zero
moments under an old count give steps 3 to 6 times too large. So t has the shape of the choice that
can be made: `[U]` for a leaf whose first axis is `layers`, `[]` for any other.

>>> axes = {"head": ("embed", "vocab"), "layers": {"w": ("layers", "embed", "mlp")}}
>>> state = scale_by_adam(axes, b1=0.9, b2=0.98, eps=1e-8).init(params)   # w: [U, M, H]
>>> state.count["head"].shape, state.count["layers"]["w"].shape
((), (U,))

Nothing in an update crosses the axis `layers`: the update of a slice is the slice of the update.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from m6jax.foundation.partitioning import Names
from m6jax.foundation.pytrees import Tree, map_named
from m6jax.foundation.validated import ConfigError

MomentType = Literal["float32", "bfloat16"]
LAYERS = "layers"  # the logical axis of stacked layers, always the first


@struct.dataclass
class AdamState:
    """What Adam remembers, in trees shaped like the parameters.

    Attributes:
      mu: mean of the gradients, not corrected for its start at zero; shaped like the parameter.
      nu: mean of their squares, likewise, float32.
      count: number of gradients seen, int32; [U] where the first axis is `layers`, else [].
      GRADIENT_POWERS: the power with which a field grows if all gradients are scaled.
    """

    GRADIENT_POWERS: ClassVar[dict[str, int]] = {"mu": 1, "nu": 2}

    mu: Tree
    nu: Tree
    count: Tree


def scale_by_adam(
    axes: Tree, *, b1: float, b2: float, eps: float, mu_dtype: MomentType = "float32"
) -> optax.GradientTransformation:
    """Adam's direction, before weight decay and learning rate (Kingma & Ba 2015, algorithm 1).

    Args:
      axes: tree like the parameters, its leaves tuples of logical axis names.
      b1: decay of the mean of gradients.
      b2: decay of the mean of squares.
      eps: added to the root of the mean of squares.
      mu_dtype: type in which `mu` is kept.

    Returns:
      A transformation with an `AdamState`; its updates are float32 and to be subtracted. `init`
      raises ValueError, naming the leaf, for axes that do not fit the parameters.
    """

    def init(params: Tree) -> AdamState:
        return AdamState(
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params),
            count=map_named(initial_count, params, axes),
        )

    def update_leaf(grad: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array) -> Any:
        grad = grad.astype(jnp.float32)
        mean = b1 * mu.astype(jnp.float32) + (1 - b1) * grad
        nu = b2 * nu + (1 - b2) * grad * grad
        # mean / c1 / (sqrt(nu / c2) + eps), with both corrections moved to one number a layer.
        steps = over_layers(count + 1, grad.ndim).astype(jnp.float32)
        c1, c2 = 1 - b1**steps, 1 - b2**steps
        direction = mean / (jnp.sqrt(nu) * (c1 / jnp.sqrt(c2)) + c1 * eps)
        return direction, mean.astype(mu_dtype), nu, count + 1

    def update(grads: Tree, state: AdamState, params: Tree = None) -> tuple[Tree, AdamState]:
        del params
        results = jax.tree.map(update_leaf, grads, state.mu, state.nu, state.count)
        directions, mu, nu, count = split_results(results, grads, 4)
        return directions, AdamState(mu=mu, nu=nu, count=count)

    return optax.GradientTransformation(init, update)


def initial_count(name: str, param: Any, axes: Names) -> jax.Array:
    """Returns the count of a new leaf: int32 zeros, [U] if its first axis is `layers`, else [].

    Raises:
      ValueError: the axes do not name every dimension, or `layers` is not the first of them.
    """
    if len(axes) != len(param.shape):
        raise ValueError(f"{name}: {len(axes)} axes {axes} for a parameter of shape {param.shape}")
    if LAYERS in axes[1:]:
        raise ValueError(f"{name}: {LAYERS!r} must be the first of the axes {axes}")
    return jnp.zeros(param.shape[: is_stacked(axes)], jnp.int32)


def is_stacked(axes: Names) -> bool:
    """Whether a leaf with these axes holds several layers."""
    return axes[:1] == (LAYERS,)


def over_layers(value: jax.Array, ndim: int) -> jax.Array:
    """Shapes one number a layer, [U] or [], to multiply a leaf of `ndim` dimensions."""
    return value.reshape(value.shape + (1,) * (ndim - value.ndim))


def split_results(results: Tree, like: Tree, width: int) -> tuple[Tree, ...]:
    """Turns a tree of `width`-tuples, with the structure of `like`, into a tuple of trees."""
    # Not jax.tree.transpose: what a result holds may itself be a tuple, of axis names.
    return tuple(jax.tree.map(lambda _, row, i=i: row[i], like, results) for i in range(width))


def check_decay(name: str, value: float) -> None:
    """Raises ConfigError for the decay of a mean that is not in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}: {value} is not in [0, 1)")


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError for a number that is not above 0."""
    if not value > 0:
        raise ConfigError(f"{name}: {value}; a number above 0 is needed")
