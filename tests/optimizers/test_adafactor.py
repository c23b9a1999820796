import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m6jax.optimizers.adafactor import (
    AdafactorSettings,
    factored_sides,
    matrix_sides,
    mean_squares,
    scale_by_adafactor,
)

SIZES = {"layers": 3, "expert": 5, "embed": 4, "mlp": 6, "heads": 2, "kv": 3, "vocab": 7}
SMALL = {"min_dim_size_to_factor": 4}
QUERY = ("layers", "embed", "heads", "kv")
WI = ("layers", "expert", "embed", "mlp")
ROUTER = ("layers", "embed", "expert")


def normal(axes, seed):
    """An array whose slices along the first axis differ in scale, so that mixing them shows."""
    shape = [SIZES[name] for name in axes]
    x = np.random.default_rng(seed).normal(size=shape)
    scales = (10.0 ** np.arange(shape[0])).reshape(-1, *[1] * (len(shape) - 1))
    return jnp.asarray(x * scales, jnp.float32)


@functools.cache
def compiled(settings, axes):
    tx = scale_by_adafactor(axes, settings)
    return jax.jit(tx.init), jax.jit(tx.update)


def run(settings, axes, params, grads):
    """Directions of every step, and the last state."""
    init, update = compiled(settings, axes)
    state = init(params)
    directions = []
    for grad in grads:
        direction, state = update(grad, state, params)
        directions.append(direction)
    return directions, state


@pytest.mark.parametrize(
    ("axes", "sides"),
    [
        (QUERY, ((1,), (2, 3))),
        (("layers", "heads", "kv", "embed"), ((1, 2), (3,))),
        (WI, ((2,), (3,))),
        (("expert", "embed", "mlp"), ((1,), (2,))),
        (ROUTER, ((1,), (2,))),
        (("embed", "expert"), ((0,), (1,))),
        (("layers", "expert", "mlp"), ((2,),)),  # an expert's bias is the expert's own
        (("layers", "expert"), ((1,),)),  # a router's bias is not
        (("layers", "heads", "kv"), ((1, 2),)),
        (("layers", "embed"), ((1,),)),
        (("layers",), ()),
        (("vocab", "embed"), ((0,), (1,))),
        ((None, "embed"), ((0,), (1,))),
        ((), ()),
    ],
)
def test_sides_go_by_names(axes, sides):
    assert matrix_sides(axes) == sides


def test_what_is_factored_depends_on_one_layers_matrix():
    settings = AdafactorSettings(min_dim_size_to_factor=6)
    assert factored_sides(("layers", "embed", "mlp"), (2, 6, 9), settings) == ((1,), (2,))
    assert factored_sides(("layers", "embed", "mlp"), (99, 5, 9), settings) == ()
    assert factored_sides(("layers", "embed", "heads", "kv"), (2, 6, 2, 3), settings) != ()
    assert factored_sides(("layers", "embed"), (99, 99), settings) == ()
    assert factored_sides(("layers", "embed", "length", "mlp"), (9, 9, 9, 9), settings) == ()


def test_one_step_by_hand():
    # Squares 1 4 / 9 16: row means 2.5 12.5, column means 5 10, mean 7.5. Their product over 7.5 is
    # 5/3 10/3 / 25/3 50/3, and the squares of the direction are 0.6 1.2 / 1.08 0.96, mean 0.96.
    grad = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    direction = np.sqrt([[0.6, 1.2], [1.08, 0.96]])
    params = jnp.full((2, 2), 3.0)
    axes = ("embed", "mlp")

    def one(**options):
        settings = AdafactorSettings(min_dim_size_to_factor=2, **options)
        (got,), state = run(settings, axes, params, [grad])
        return got, state

    got, state = one(multiply_by_parameter_scale=False)
    np.testing.assert_allclose(got, direction, rtol=1e-6)
    np.testing.assert_allclose(state.v_row, [2.5, 12.5], rtol=1e-6)
    np.testing.assert_allclose(state.v_col, [5.0, 10.0], rtol=1e-6)
    got, _ = one()
    np.testing.assert_allclose(got, 3 * direction, rtol=1e-6)
    got, _ = one(multiply_by_parameter_scale=False, clipping_threshold=0.5)
    np.testing.assert_allclose(got, direction * 0.5 / np.sqrt(0.96), rtol=1e-6)
    got, _ = one(multiply_by_parameter_scale=False, clipping_threshold=None, b1=0.75)
    np.testing.assert_allclose(got, 0.25 * direction, rtol=1e-6)


def test_mean_squares_decay_by_the_count():
    # Not factored. Decays 1 - 1 = 0 and 1 - 2**-0.8 = 0.425651: v = 0.425651 * 1 + 0.574349 * 9.
    axes, params = ("embed",), jnp.ones(1)
    grads = [jnp.array([1.0]), jnp.array([3.0])]
    _, state = run(AdafactorSettings(), axes, params, grads)
    np.testing.assert_allclose(state.v, [5.594794], rtol=1e-6)
    assert state.count == 2


@pytest.mark.parametrize("min_dim", [4, 128], ids=["factored", "whole"])
def test_equals_optax_on_one_matrix(min_dim):
    axes = ("embed", "mlp")
    params = normal(axes, 0) * 1e-2
    grads = [normal(axes, seed) for seed in range(1, 5)]
    settings = AdafactorSettings(min_dim_size_to_factor=min_dim, clipping_threshold=0.7)
    ours, _ = run(settings, axes, params, grads)
    theirs = optax.adafactor(min_dim_size_to_factor=min_dim, clipping_threshold=0.7)
    state = theirs.init(params)
    for grad, direction in zip(grads, ours, strict=True):
        expected, state = theirs.update(grad, state, params)
        np.testing.assert_allclose(-direction, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "axes",
    [QUERY, WI, ROUTER, ("layers", "expert", "mlp"), ("layers", "embed"), ("layers",)],
    ids=" ".join,
)
def test_a_stack_is_updated_as_each_layer_alone(axes):
    settings = AdafactorSettings(b1=0.9, **SMALL)
    params, grads = normal(axes, 0), [normal(axes, seed) for seed in (1, 2, 3)]
    stacked, state = run(settings, axes, params, grads)
    for layer in range(SIZES["layers"]):
        alone, one = run(settings, axes[1:], params[layer], [grad[layer] for grad in grads])
        for direction, expected in zip(stacked, alone, strict=True):
            np.testing.assert_allclose(direction[layer], expected, rtol=1e-5)
        jax.tree.map(
            lambda s, o, i=layer: np.testing.assert_allclose(s[i], o, rtol=1e-5), state, one
        )


@pytest.mark.parametrize("axes", [("expert", "embed", "mlp"), ("expert", "mlp")], ids=" ".join)
def test_experts_are_updated_as_each_alone(axes):
    settings = AdafactorSettings(**SMALL)
    params, grads = normal(axes, 0), [normal(axes, seed) for seed in (1, 2)]
    together, _ = run(settings, axes, params, grads)
    for expert in range(SIZES["expert"]):
        alone, _ = run(settings, axes[1:], params[expert], [grad[expert] for grad in grads])
        np.testing.assert_allclose(together[-1][expert], alone[-1], rtol=1e-5)


def test_heads_and_head_size_are_one_side():
    settings = AdafactorSettings(**SMALL)
    params, grad = normal(QUERY, 0), normal(QUERY, 1)
    flat = (*params.shape[:2], -1)  # [U, M, N D]
    (direction,), _ = run(settings, QUERY, params, [grad])
    (expected,), _ = run(
        settings, ("layers", "embed", "mlp"), params.reshape(flat), [grad.reshape(flat)]
    )
    np.testing.assert_allclose(direction.reshape(flat), expected, rtol=1e-6)


def test_an_expert_without_tokens_stays_finite_and_still():
    axes = ("expert", "embed", "mlp")
    settings = AdafactorSettings(**SMALL)
    params = normal(axes, 0)
    quiet, loud = normal(axes, 1).at[2].set(0.0), normal(axes, 2)
    (first, second), _ = run(settings, axes, params, [quiet, loud])
    np.testing.assert_array_equal(first[2], 0.0)
    rms = jnp.sqrt(jnp.mean(second**2, (1, 2)) / jnp.mean(params**2, (1, 2)))
    assert (rms <= 1 + 1e-5).all()
    assert (rms > 0.5).all()


def test_unused_leaves_keep_the_leading_axis_and_are_not_empty():
    axes = {"layers": {"wi": WI, "norm": ("layers", "embed")}, "norm": ("embed",)}
    params = jax.tree.map(lambda names: normal(names, 0), axes, is_leaf=lambda x: type(x) is tuple)
    state = scale_by_adafactor(axes, AdafactorSettings(**SMALL)).init(params)
    shapes = jax.tree.map(jnp.shape, state)
    wi, norm = ({f: getattr(shapes, f)["layers"][n] for f in vars(state)} for n in ("wi", "norm"))
    assert wi == {"v_row": (3, 5, 4), "v_col": (3, 5, 6), "v": (3, 1), "count": (3,), "mu": (3, 1)}
    assert norm == {"v_row": (3, 1), "v_col": (3, 1), "v": (3, 4), "count": (3,), "mu": (3, 1)}
    assert (shapes.v_row["norm"], shapes.v["norm"], shapes.count["norm"]) == ((1,), (4,), ())


def test_mean_squares():
    squares = jnp.arange(6.0).reshape(1, 2, 3)
    settings = AdafactorSettings(min_dim_size_to_factor=2)
    v_row, v_col, v = mean_squares(squares, ("layers", "embed", "mlp"), settings)
    np.testing.assert_array_equal(v_row, [[1.0, 4.0]])
    np.testing.assert_array_equal(v_col, [[1.5, 2.5, 3.5]])
    np.testing.assert_array_equal(v, [[0.0]])


def test_bfloat16_is_computed_in_float32():
    axes = ("embed", "mlp")
    params, grad = normal(axes, 0).astype(jnp.bfloat16), normal(axes, 1).astype(jnp.bfloat16)
    settings = AdafactorSettings(b1=0.9, mu_dtype="bfloat16", **SMALL)
    (direction,), state = run(settings, axes, params, [grad])
    (expected,), _ = run(settings, axes, params.astype(jnp.float32), [grad.astype(jnp.float32)])
    assert direction.dtype == state.v_row.dtype == state.v_col.dtype == jnp.float32
    assert state.mu.dtype == jnp.bfloat16
    np.testing.assert_allclose(direction, expected, rtol=1e-6)
