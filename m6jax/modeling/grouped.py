"""Grouped matrix product: every row times the matrix of its own group, without padding.

Axes: N rows, E groups (experts), M and H the two sides of a group's matrix.

This is what an expert layer without capacity computes once its rows are sorted by expert. With
N = 4 rows and `group_sizes = [2, 0, 1]`:

    y[0] = x[0] @ w[0]
    y[1] = x[1] @ w[0]
    y[2] = x[2] @ w[2]      group 1 is empty
    y[3] = 0                past the sum of group_sizes: a row of no group

TPUs and GPUs get `jax.lax.ragged_dot_general`. XLA's CPU backend expands that into all rows times
all matrices, E times the work, so CPUs get loops over blocks of rows. (NVIDIA GPUs expand it too
unless XLA's experimental grouped kernels take it.) Which of the two it is gets decided when the
program is lowered, since it may be compiled for a device that is not here.

The loops go over the groups that have rows, and cut each group's rows in blocks of a few sizes:

    300 rows of a group -> blocks of 256, 16, 16, 16 rows

A matrix is sliced out of `w` (a copy) once a group, never once a block; the gradient of a matrix is
summed apart and written into its place once.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Large blocks keep the cores busy, small ones waste few rows at a group's end. Measured on two
# cores: matrix products of 16 rows reach 0.8 of the speed of 256 rows, the gradient of `w` 0.5.
BLOCK_ROWS = (256, 64, 16)
# A block of one of the larger sizes is used if more than this part of its rows are the group's.
LEAST_FILL = 0.7

Carry = TypeVar("Carry")


def grouped_matmul(
    x: Float[Array, "N M"], w: Float[Array, "E M H"], group_sizes: Int[Array, " E"]
) -> Float[Array, "N H"]:
    """Multiplies each row with the matrix of its group; differentiable in x and w.

    Sums are in float32 at least. Under `vmap` the batch is worked through one after the other.

    Args:
      x: [N, M] float, rows sorted by group: first those of group 0, and so on.
      w: [E, M, H], one matrix a group, of x's type.
      group_sizes: int [E], rows of each group; their sum is at most N.

    Returns:
      [N, H] in x's type. Rows past the sum of group_sizes are exactly 0, and take no part in any
      gradient, whatever they hold (NaN too).

    Raises:
      ValueError: shapes or types that do not fit together.
    """
    fits = (
        (x.ndim, w.ndim) == (2, 3)
        and x.shape[1] == w.shape[1]
        and group_sizes.shape == (w.shape[0],)
        and x.dtype == w.dtype
        and jnp.issubdtype(x.dtype, jnp.floating)
        and jnp.issubdtype(group_sizes.dtype, jnp.integer)
    )
    if not fits:
        given = ", ".join(
            f"{name} {array.dtype}{list(array.shape)}"
            for name, array in (("x", x), ("w", w), ("group_sizes", group_sizes))
        )
        raise ValueError(
            f"grouped_matmul: got {given}; needs x [N, M] and w [E, M, H] of one float type (cast"
            " one of them) and group_sizes int [E]"
        )
    return _grouped_matmul(x, w, group_sizes.astype(jnp.int32))


@jax.custom_vjp
def _grouped_matmul(
    x: Float[Array, "N M"], w: Float[Array, "E M H"], group_sizes: Int[Array, " E"]
) -> Float[Array, "N H"]:
    return _rows(x, w, group_sizes, contract=1)


Residuals = tuple[Float[Array, "N M"], Float[Array, "E M H"], Int[Array, " E"]]


def _forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, Residuals]:
    return _rows(x, w, group_sizes, contract=1), (x, w, group_sizes)


def _backward(residuals: Residuals, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, group_sizes = residuals
    return _rows(dy, w, group_sizes, contract=2), _matrices(x, dy, group_sizes), None


_grouped_matmul.defvjp(_forward, _backward)


def _rows(x: jax.Array, w: jax.Array, group_sizes: jax.Array, contract: int) -> jax.Array:
    """Rows times matrices: x [N, M] @ w[e] for contract = 1, x [N, H] @ w[e].T for contract = 2."""
    return _by_platform(
        functools.partial(_looped_rows, contract=contract),
        functools.partial(_ragged_rows, contract=contract),
    )(x, w, group_sizes)


def _matrices(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The gradient of w: x[rows of e].T @ dy[rows of e], [E, M, H]."""
    return _by_platform(_looped_matrices, _ragged_matrices)(x, dy, group_sizes)


def _by_platform(
    looped: Callable[..., jax.Array], ragged: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    # Without sequential_vmap, a vmapped loop would copy its whole result in every round (a select
    # for each element of the batch), and ragged_dot refuses a batch in some of its operands only.
    return jax.custom_batching.sequential_vmap(
        lambda *operands: lax.platform_dependent(*operands, cpu=looped, default=ragged)
    )


def _accumulator(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _ragged_rows(x: jax.Array, w: jax.Array, group_sizes: jax.Array, contract: int) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (contract,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = lax.ragged_dot_general(
        x, w, group_sizes, numbers, preferred_element_type=_accumulator(x)
    ).astype(x.dtype)
    return _without_tail(y, group_sizes)


def _ragged_matrices(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return lax.ragged_dot_general(
        _without_tail(x, group_sizes),
        _without_tail(dy, group_sizes),
        group_sizes,
        numbers,
        preferred_element_type=_accumulator(x),
    ).astype(x.dtype)


def _without_tail(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zeroes the rows of no group, about which ragged_dot promises nothing."""
    has_group = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(has_group[:, None], x, 0)


def _looped_rows(x: jax.Array, w: jax.Array, group_sizes: jax.Array, contract: int) -> jax.Array:
    def visit_group(group: jax.Array, start: jax.Array, end: jax.Array, y: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(w, group, keepdims=False)

        def visit_block(low: jax.Array, size: int, y: jax.Array) -> jax.Array:
            first, inside = _window(low, end, size, x.shape[0])
            product = lax.dot_general(
                lax.dynamic_slice_in_dim(x, first, size),
                matrix,
                (((1,), (contract - 1,)), ((), ())),
                preferred_element_type=_accumulator(x),
            ).astype(x.dtype)
            before = lax.dynamic_slice_in_dim(y, first, size)
            after = jnp.where(inside, product, before)
            return lax.dynamic_update_slice_in_dim(y, after, first, axis=0)

        return _over_blocks(start, end, x.shape[0], visit_block, y)

    y = jnp.zeros((x.shape[0], w.shape[3 - contract]), x.dtype)
    return _over_groups(group_sizes, visit_group, y)


def _looped_matrices(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    shape = (x.shape[1], dy.shape[1])

    def visit_group(group: jax.Array, start: jax.Array, end: jax.Array, dw: jax.Array) -> jax.Array:
        def visit_block(low: jax.Array, size: int, total: jax.Array) -> jax.Array:
            first, inside = _window(low, end, size, x.shape[0])
            # Both factors are masked: the rows outside may hold infinities, and 0 * inf is NaN.
            x_rows, dy_rows = (
                jnp.where(inside, lax.dynamic_slice_in_dim(rows, first, size), 0)
                for rows in (x, dy)
            )
            return total + lax.dot_general(
                x_rows, dy_rows, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype
            )

        total = jnp.zeros(shape, _accumulator(x))
        total = _over_blocks(start, end, x.shape[0], visit_block, total)
        return lax.dynamic_update_index_in_dim(dw, total.astype(dw.dtype), group, axis=0)

    return _over_groups(group_sizes, visit_group, jnp.zeros((*group_sizes.shape, *shape), x.dtype))


def _over_groups(
    group_sizes: jax.Array,
    visit: Callable[[jax.Array, jax.Array, jax.Array, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Folds `carry = visit(group, first row, row past the last, carry)` over non-empty groups."""
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    (groups,) = jnp.nonzero(group_sizes, size=group_sizes.shape[0])

    def visit_nth(n: jax.Array, carry: Carry) -> Carry:
        group = groups[n]
        return visit(group, starts[group], ends[group], carry)

    return lax.fori_loop(0, jnp.count_nonzero(group_sizes), visit_nth, carry)


def _over_blocks(
    start: jax.Array,
    end: jax.Array,
    num_rows: int,
    visit: Callable[[jax.Array, int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Folds `carry = visit(first row, rows of the block, carry)` over the rows start ... end - 1.

    Larger blocks come first. The last block may reach past `end`, and past num_rows (N).
    """

    def sweep(low: jax.Array, carry: Carry, size: int, least: int) -> tuple[jax.Array, Carry]:
        def visit_next(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            low, carry = state
            return low + size, visit(low, size, carry)

        return lax.while_loop(lambda state: end - state[0] > least, visit_next, (low, carry))

    *larger, smallest = [size for size in BLOCK_ROWS if size <= num_rows] or [num_rows]
    low = start
    for size in larger:
        low, carry = sweep(low, carry, size, int(LEAST_FILL * size))
    return sweep(low, carry, smallest, 0)[1]


def _window(
    low: jax.Array, end: jax.Array, size: int, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Where a block of `size` rows can be read, and which of its rows are low ... end - 1.

    Returns:
      The first row to read: `low`, or less where the block would reach past num_rows (N).
      bool [size, 1], false for rows of earlier blocks and of other groups.
    """
    first = jnp.minimum(low, num_rows - size)
    rows = first + jnp.arange(size, dtype=first.dtype)
    return first, ((rows >= low) & (rows < end))[:, None]
