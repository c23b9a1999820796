import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m6jax.optimizers.adam import scale_by_adam

AXES = {"head": ("embed",), "layers": {"w": ("layers", "embed")}}  # M = 2, U = 3
SETTINGS = {"b1": 0.9, "b2": 0.98, "eps": 1e-8}


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    head, w = rng.normal(size=2), rng.normal(size=(3, 2))
    return {"head": jnp.asarray(head, dtype), "layers": {"w": jnp.asarray(w, dtype)}}


def test_two_steps_by_hand():
    # Gradients 1 and 3, both decays 0.5: mu = 0.25 + 1.5 = 1.75, nu = 0.25 + 4.5 = 4.75, and both
    # are divided by 1 - 0.25: 2.3333 / sqrt(6.3333) = 0.92717.
    tx = scale_by_adam(("embed",), b1=0.5, b2=0.5, eps=1e-12)
    params = jnp.zeros(1)
    first, state = tx.update(jnp.array([1.0]), tx.init(params))
    second, state = tx.update(jnp.array([3.0]), state)
    np.testing.assert_allclose(first, [1.0], rtol=1e-6)
    np.testing.assert_allclose(second, [0.92717265], rtol=1e-6)
    np.testing.assert_allclose((state.mu, state.nu), [[1.75], [4.75]], rtol=1e-6)
    assert state.count == 2


def test_equals_optax_for_a_common_count():
    ours, theirs = scale_by_adam(AXES, **SETTINGS), optax.scale_by_adam(**SETTINGS)
    state, reference = ours.init(tree(0)), theirs.init(tree(0))
    for step in range(4):
        directions, state = ours.update(tree(step), state)
        expected, reference = theirs.update(tree(step), reference)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), directions, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.nu, reference.nu)


def test_counts_are_per_leaf_and_layer():
    tx = scale_by_adam(AXES, **SETTINGS)
    state = tx.init(tree(0))
    assert state.count["head"].shape == ()
    assert state.count["layers"]["w"].shape == (3,)
    assert state.count["layers"]["w"].dtype == jnp.int32


def test_a_layer_that_starts_anew_is_corrected_by_its_own_count():
    tx = scale_by_adam(AXES, **SETTINGS)
    state = tx.init(tree(0))
    for step in range(20):
        going_on, state = tx.update(tree(step), state)
    keep = jnp.array([1, 0, 1])
    reset = state.replace(
        mu=state.mu | {"layers": {"w": state.mu["layers"]["w"] * keep[:, None]}},
        nu=state.nu | {"layers": {"w": state.nu["layers"]["w"] * keep[:, None]}},
        count=state.count | {"layers": {"w": state.count["layers"]["w"] * keep}},
    )
    going_on, _ = tx.update(tree(20), state)
    anew, after = tx.update(tree(20), reset)
    # The first step of Adam is the sign of the gradient, whatever its size.
    grad = tree(20)["layers"]["w"]
    np.testing.assert_allclose(anew["layers"]["w"][1], np.sign(grad[1]), rtol=1e-5)
    np.testing.assert_array_equal(anew["layers"]["w"][::2], going_on["layers"]["w"][::2])
    np.testing.assert_array_equal(anew["head"], going_on["head"])
    np.testing.assert_array_equal(after.count["layers"]["w"], [21, 1, 21])


def test_bfloat16_is_computed_in_float32():
    tx = scale_by_adam(AXES, **SETTINGS, mu_dtype="bfloat16")
    params = tree(0, jnp.bfloat16)
    directions, state = tx.update(params, tx.init(params))
    exact, _ = scale_by_adam(AXES, **SETTINGS).update(
        jax.tree.map(lambda g: g.astype(jnp.float32), params), tx.init(params)
    )
    assert directions["head"].dtype == jnp.float32
    assert (state.mu["head"].dtype, state.nu["head"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(directions["layers"]["w"], exact["layers"]["w"], rtol=1e-6)


def test_compiled_update_has_no_temporary_of_a_leaf():
    axes = {"layers": ("layers", "embed", "mlp")}
    tx = scale_by_adam(axes, **SETTINGS)
    params = {"layers": jnp.ones((2, 64, 64))}

    def step(params, grads, state):
        directions, state = tx.update(grads, state)
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, directions), state

    compiled = jax.jit(step, donate_argnums=(0, 2)).lower(params, params, tx.init(params)).compile()
    leaf_bytes = params["layers"].nbytes
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < leaf_bytes / 16
    assert memory.alias_size_in_bytes >= 3 * leaf_bytes  # parameter and both moments in place


def test_axes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"a/w: 1 axes \('embed',\) .* shape \(2, 3\)"):
        scale_by_adam({"a": {"w": ("embed",)}}, **SETTINGS).init({"a": {"w": jnp.zeros((2, 3))}})
    with pytest.raises(ValueError, match=r"w: 'layers' must be the first"):
        scale_by_adam({"w": ("embed", "layers")}, **SETTINGS).init({"w": jnp.zeros((2, 3))})
