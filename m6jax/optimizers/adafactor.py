"""Adafactor that knows layers and experts as separate matrices.

Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) keeps, of the mean squares of a matrix's
gradients, only the means over rows and columns. Which dimensions are rows and which are columns is
told by the logical axes, never guessed from sizes: a guess takes a stack of vectors for a matrix.

    axes                                    one matrix is            v_row, v_col of one matrix
    ('layers', 'embed', 'heads', 'kv')      embed x (heads kv)       [M], [N, D]
    ('layers', 'expert', 'embed', 'mlp')    embed x mlp of an expert [M], [H]
    ('layers', 'embed', 'expert')           embed x expert (router)  [M], [E]
    ('layers', 'embed')                     a vector, not factored   -

`layers` is always a batch axis. `expert` is one in the experts' own parameters: where two sides of
a matrix remain besides it, or where it leads before one (a bias). Every mean square, of the
directions that are clipped and of the parameters that set the scale, is over one matrix. So layers
in a stack, and experts, are updated exactly as each would be alone.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from m6jax.foundation.partitioning import Names, names_by_leaf
from m6jax.foundation.pytrees import Tree, map_named
from m6jax.foundation.validated import validated
from m6jax.optimizers.adam import (
    LAYERS,
    MomentType,
    check_decay,
    check_positive,
    initial_count,
    is_stacked,
    over_layers,
    split_results,
)

# U layers, E expert, M embed, H mlp, N heads, D kv: sizes of the logical axes.
EXPERT = "expert"
HEADS = {"heads", "kv"}
TINY = jnp.finfo(jnp.float32).tiny
Dims = tuple[int, ...]


@validated
class AdafactorSettings:
    """How Adafactor finds a direction.

    Attributes:
      b1: decay of the mean of directions (momentum, a whole copy of the parameters); None for none.
      decay_exponent: the t-th gradient's mean squares decay by 1 - t ** -decay_exponent.
      clipping_threshold: largest root mean square of one matrix's direction; None does not clip.
      multiply_by_parameter_scale: make steps relative to the root mean square of the matrix.
      min_parameter_scale: least such scale.
      eps: added to squared gradients.
      min_dim_size_to_factor: least number of rows and of columns of a factored matrix, counted in
        one layer and one expert.
      mu_dtype: type in which momentum is kept.
    """

    b1: float | None = None
    decay_exponent: float = 0.8
    clipping_threshold: float | None = 1.0
    multiply_by_parameter_scale: bool = True
    min_parameter_scale: float = 1e-3
    eps: float = 1e-30
    min_dim_size_to_factor: int = 128
    mu_dtype: MomentType = "float32"

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        name = type(self).__name__
        if self.b1 is not None:
            check_decay(f"{name}.b1", self.b1)
        if self.clipping_threshold is not None:
            check_positive(f"{name}.clipping_threshold", self.clipping_threshold)
        check_positive(f"{name}.decay_exponent", self.decay_exponent)
        check_positive(f"{name}.min_parameter_scale", self.min_parameter_scale)
        check_positive(f"{name}.eps", self.eps)
        check_positive(f"{name}.min_dim_size_to_factor", self.min_dim_size_to_factor)


@struct.dataclass
class AdafactorState:
    """What Adafactor remembers, in trees with the structure of the parameters.

    A leaf that a parameter has no use for is one zero, `[U, 1]` under `layers` and `[1]` elsewhere:
    every leaf of a stack keeps its leading axis, and checkpoints refuse arrays of size zero.

    Attributes:
      v_row: mean square of the gradients over the columns, float32; batch and row dimensions.
      v_col: mean square over the rows, float32; batch and column dimensions.
      v: mean square of each element where a parameter is not factored, float32.
      count: number of gradients seen, int32; [U] where the first axis is `layers`, else [].
      mu: mean of the directions with momentum. They do not depend on the gradients' scale.
      GRADIENT_POWERS: the power with which a field grows if all gradients are scaled.
    """

    GRADIENT_POWERS: ClassVar[dict[str, int]] = {"v_row": 2, "v_col": 2, "v": 2}

    v_row: Tree
    v_col: Tree
    v: Tree
    count: Tree
    mu: Tree


def matrix_sides(axes: Names) -> tuple[Dims, ...]:
    """Returns the dimensions of each side of one matrix; what is missing is a batch dimension.

    >>> matrix_sides(("layers", "expert", "embed", "mlp"))
    ((2,), (3,))
    >>> matrix_sides(("layers", "heads", "kv", "embed"))
    ((1, 2), (3,))
    """
    sides: list[Dims] = []
    for dim, name in enumerate(axes):
        if name == LAYERS:
            continue
        if sides and {axes[dim - 1], name} == HEADS:
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    others = [side for side in sides if axes[side[0]] != EXPERT]
    leads = bool(sides) and axes[sides[0][0]] == EXPERT
    expert_is_batch = len(others) >= 2 or (len(others) == 1 and leads)
    return tuple(others if expert_is_batch else sides)


def factored_sides(axes: Names, shape: Dims, settings: AdafactorSettings) -> tuple[Dims, ...]:
    """Returns the dimensions of rows and of columns, or () for a leaf that is not factored.

    Factored are leaves with exactly two sides, each of at least `min_dim_size_to_factor` elements.
    """
    sides = matrix_sides(axes)
    sizes = [math.prod(shape[dim] for dim in side) for side in sides]
    return sides if len(sides) == 2 and min(sizes) >= settings.min_dim_size_to_factor else ()


def scale_by_adafactor(axes: Tree, settings: AdafactorSettings) -> optax.GradientTransformation:
    """Adafactor's direction, before weight decay and learning rate.

    Args:
      axes: tree like the parameters, its leaves tuples of logical axis names.
      settings: see there.

    Returns:
      A transformation with an `AdafactorState`; its updates are float32 and to be subtracted.
      `init` raises ValueError, naming the leaf, for axes that do not fit the parameters.
    """

    def init_leaf(name: str, param: Any, names: Names) -> Any:
        count = initial_count(name, param, names)
        zeros = jnp.zeros_like(param, dtype=jnp.float32)
        mu = _unused(zeros, names) if settings.b1 is None else zeros
        v_row, v_col, v = mean_squares(zeros, names, settings)
        return v_row, v_col, v, count, mu.astype(settings.mu_dtype)

    def init(params: Tree) -> AdafactorState:
        return AdafactorState(*split_results(map_named(init_leaf, params, axes), params, 5))

    axes_of = names_by_leaf(axes)

    def update_leaf(
        name: str, grad: Any, param: Any, v_row: Any, v_col: Any, v: Any, count: Any, mu: Any
    ) -> Any:
        names, grad = axes_of[name], grad.astype(jnp.float32)
        decay = 1 - (count + 1).astype(jnp.float32) ** -settings.decay_exponent
        new = mean_squares(grad * grad + settings.eps, names, settings)
        v_row, v_col, v = (
            _average(old, square, decay) for old, square in zip((v_row, v_col, v), new, strict=True)
        )
        sides = factored_sides(names, grad.shape, settings)
        direction = grad / (_factored_root(v_row, v_col, *sides) if sides else _root(v))
        direction = _bound(direction, param, names, settings)
        if settings.b1 is not None:
            direction = settings.b1 * mu.astype(jnp.float32) + (1 - settings.b1) * direction
            mu = direction.astype(settings.mu_dtype)
        return direction, v_row, v_col, v, count + 1, mu

    def update(
        grads: Tree, state: AdafactorState, params: Tree = None
    ) -> tuple[Tree, AdafactorState]:
        fields = (state.v_row, state.v_col, state.v, state.count, state.mu)
        results = map_named(update_leaf, grads, params, *fields)
        directions, *new = split_results(results, grads, 6)
        return directions, AdafactorState(*new)

    return optax.GradientTransformation(init, update)


def mean_squares(
    squares: jax.Array, axes: Names, settings: AdafactorSettings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reduces the squares of a leaf's gradients to what is kept of them.

    Args:
      squares: float32, shaped like the parameter.
      axes: its logical axis names.
      settings: what to factor.

    Returns:
      v_row, v_col and v as in `AdafactorState`.
    """
    unused = _unused(squares, axes)
    sides = factored_sides(axes, squares.shape, settings)
    if not sides:
        return unused, unused, squares
    rows, cols = sides
    return _mean(squares, cols), _mean(squares, rows), unused


def state_axes(axes: Tree, params: Tree, settings: AdafactorSettings) -> AdafactorState:
    """Returns an `AdafactorState` with logical axis names in the place of arrays.

    Args:
      axes: tree like the parameters, its leaves tuples of logical axis names.
      params: arrays or ShapeDtypeStructs.
      settings: what to keep and to factor.
    """

    def without(names: Names, dims: Dims) -> Names:
        return tuple(name for dim, name in enumerate(names) if dim not in dims)

    def leaf(param: Any, names: Names) -> tuple[Names, ...]:
        layers = names[: is_stacked(names)]
        unused = (*layers, None)
        mu = unused if settings.b1 is None else names
        sides = factored_sides(names, param.shape, settings)
        if not sides:
            return unused, unused, names, layers, mu
        rows, cols = sides
        return without(names, cols), without(names, rows), unused, layers, mu

    return AdafactorState(*split_results(jax.tree.map(leaf, params, axes), params, 5))


def _unused(leaf: jax.Array, axes: Names) -> jax.Array:
    return jnp.zeros((*leaf.shape[: is_stacked(axes)], 1), jnp.float32)


def _bound(
    direction: jax.Array, param: jax.Array, axes: Names, settings: AdafactorSettings
) -> jax.Array:
    """Clips each matrix's direction and makes it relative to the matrix (algorithm 4)."""
    matrix = tuple(dim for side in matrix_sides(axes) for dim in side)
    if settings.clipping_threshold is not None:
        rms = _rms(direction, matrix)
        direction = direction / jnp.maximum(1.0, rms / settings.clipping_threshold)
    if settings.multiply_by_parameter_scale:
        scale = _rms(param.astype(jnp.float32), matrix)
        direction = direction * jnp.maximum(scale, settings.min_parameter_scale)
    return direction


def _average(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    decay = over_layers(decay, old.ndim)
    return decay * old + (1 - decay) * new


def _factored_root(v_row: jax.Array, v_col: jax.Array, rows: Dims, cols: Dims) -> jax.Array:
    """Root of the mean square that rows and columns stand for: v_row v_col / mean(v_row)."""
    relative = v_row / jnp.expand_dims(_mean(v_row, rows), rows)
    # Two roots, since the product of two tiny mean squares would be zero in float32.
    return _root(jnp.expand_dims(relative, cols)) * _root(jnp.expand_dims(v_col, rows))


def _root(x: jax.Array) -> jax.Array:
    """Returns roots to divide by that are the same for a stack as for each layer alone.

    XLA turns a division by `sqrt` into `rsqrt`, and estimates that on a CPU differently with the
    number of elements; `maximum`, which changes no root that can be a divisor, keeps them apart.
    """
    return jnp.maximum(jnp.sqrt(x), TINY)


def _rms(x: jax.Array, dims: Dims) -> jax.Array:
    return jnp.sqrt(jnp.expand_dims(_mean(x * x, dims), dims))


def _mean(squares: jax.Array, dims: Dims) -> jax.Array:
    """Returns means of squares that are the same for a stack as for each layer alone, to the bit.

    A compiler may merge the dimensions of a sum, and then add in another order, where no others are
    left; so the sum is over one dimension at a time, and `maximum` keeps it so. The first comes
    first: the other way round (or with a barrier), the TPU compiler wanted an expert's matrices in
    another layout than they have on the host, and copied the whole stack (libtpu 0.0.52).
    """
    for gone, dim in enumerate(dims):
        squares = jnp.maximum(jnp.mean(squares, axis=dim - gone), TINY)
    return squares
