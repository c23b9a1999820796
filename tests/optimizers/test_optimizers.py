import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m6jax import layouts
from m6jax.foundation.pytrees import flatten_named, map_named
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.optimizers.optimizer import Adafactor, AdamW, decay_mask

AXES = {
    "embedder": {"embedding": ("vocab", "embed")},
    "layers": {
        "attention": {"query": ("layers", "embed", "heads", "kv"), "bias": ("layers", "embed")},
        "moe": {
            "router": ("layers", "embed", "expert"),
            "wi": ("layers", "expert", "embed", "mlp"),
        },
        "norm": {"scale": ("layers", "embed")},
    },
    "head": ("embed", "vocab"),
}
SIZES = {"layers": 3, "expert": 5, "embed": 4, "mlp": 6, "heads": 2, "kv": 3, "vocab": 7}
OPTIMIZERS = [
    AdamW(weight_decay=0.1),
    Adafactor(min_dim_size_to_factor=4, weight_decay=0.1),
    Adafactor(min_dim_size_to_factor=4, b1=0.9),
]
every_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=["adamw", "adafactor", "momentum"]
)


def is_axes(node):
    return type(node) is tuple


def tree(seed, layers=3):
    sizes = SIZES | {"layers": layers}
    rng = np.random.default_rng(seed)

    def leaf(names):
        return jnp.asarray(rng.normal(size=[sizes[name] for name in names]), jnp.float32)

    return jax.tree.map(leaf, AXES, is_leaf=is_axes)


@functools.cache
def compiled(optimizer):
    tx = optimizer.build(AXES)
    return jax.jit(tx.init), jax.jit(tx.update)


def slice_layer(node, layer):
    """Layer `layer` of everything under `layers`; what the streamed step sees."""
    return map_named(lambda name, x: x[layer] if "layers/" in name else x, node)


def close(got, expected, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, expected)


def after_steps(optimizer, steps=2, scale=1.0):
    init, update = compiled(optimizer)
    params = tree(0)
    state = init(params)
    for seed in range(1, steps + 1):
        _, state = update(jax.tree.map(lambda g: g * scale, tree(seed)), state, params)
    return params, state


@every_optimizer
def test_the_update_of_a_slice_is_the_slice_of_the_update(optimizer):
    params, state = after_steps(optimizer)
    # Layers may have different counts: those of layer 1 started anew.
    count = jax.tree.map(lambda c: c.at[1].set(0), state.count["layers"])
    state = state.replace(count=state.count | {"layers": count})
    grads = tree(9)
    directions, new = compiled(optimizer)[1](grads, state, params)
    axes = AXES | {"layers": jax.tree.map(lambda names: names[1:], AXES["layers"], is_leaf=is_axes)}
    update = jax.jit(optimizer.build(axes).update)
    for layer in (0, 1):
        got, got_state = update(*(slice_layer(t, layer) for t in (grads, state, params)))
        close(got, slice_layer(directions, layer))
        close(got_state, slice_layer(new, layer))


@every_optimizer
def test_states_expand_and_unstack_like_parameters(optimizer):
    shared = tree(0, layers=1)
    state = compiled(optimizer)[0](shared)
    one, three = Layout(depth=3, unit=1), Layout(depth=3, unit=3)
    expanded = layouts.expand(state, one, three)
    expected = jax.eval_shape(optimizer.build(AXES).init, layouts.expand(shared, one, three))
    assert jax.tree.map(jnp.shape, expanded) == jax.tree.map(jnp.shape, expected)
    axes = {key: names for key, names in AXES.items() if key != "layers"}
    for name in layouts.layer_names(3):
        axes[name] = jax.tree.map(lambda names: names[1:], AXES["layers"], is_leaf=is_axes)
    unrolled = jax.eval_shape(optimizer.build(axes).init, layouts.unstack(tree(0)))
    assert jax.tree.map(jnp.shape, layouts.unstack(expanded)) == jax.tree.map(jnp.shape, unrolled)


@every_optimizer
def test_state_axes_name_every_dimension(optimizer):
    params = jax.eval_shape(lambda: tree(0))
    state = jax.eval_shape(optimizer.build(AXES).init, params)
    axes = optimizer.state_axes(AXES, params)

    def check(leaf, names):
        assert [SIZES[name] if name else 1 for name in names] == list(leaf.shape)

    jax.tree.map(check, state, axes)
    assert axes.count["layers"]["moe"]["wi"] == ("layers",)


def test_adafactor_state_axes_of_a_factored_leaf():
    axes = OPTIMIZERS[1].state_axes(AXES, tree(0))
    assert axes.v_row["layers"]["moe"]["wi"] == ("layers", "expert", "embed")
    assert axes.v_col["layers"]["moe"]["wi"] == ("layers", "expert", "mlp")
    assert axes.v_col["layers"]["attention"]["query"] == ("layers", "heads", "kv")
    assert axes.v["layers"]["moe"]["wi"] == ("layers", None)


def test_seeded_second_moments_of_adam_are_what_it_divides_by():
    optimizer = AdamW(b1=0.0, weight_decay=0.0)
    params, state = after_steps(optimizer, steps=3)
    squares = jax.tree.map(lambda p: jnp.full_like(p, 4.0), params)
    seeded = optimizer.with_second_moments(state, squares, AXES)
    # Gradients of 2 go on as before: the direction is 2 / sqrt(4).
    grads = jax.tree.map(jnp.sqrt, squares)
    directions, _ = compiled(optimizer)[1](grads, seeded, params)
    close(directions, jax.tree.map(jnp.ones_like, params))
    close(seeded.mu, state.mu)


def test_seeded_second_moments_of_adafactor_are_reduced():
    optimizer = OPTIMIZERS[1]
    params, state = after_steps(optimizer)
    squares = jax.tree.map(lambda p: p * p, params)
    seeded = optimizer.with_second_moments(state, squares, AXES)
    wi = squares["layers"]["moe"]["wi"]  # [U, E, M, H]
    close(seeded.v_row["layers"]["moe"]["wi"], wi.mean(3))
    close(seeded.v_col["layers"]["moe"]["wi"], wi.mean(2))
    close(seeded.v["layers"]["norm"]["scale"], squares["layers"]["norm"]["scale"])
    np.testing.assert_array_equal(seeded.count["head"], state.count["head"])


def test_weight_decay_is_decoupled_and_goes_by_name():
    init, update = compiled(AdamW(weight_decay=0.1))
    params = tree(0)
    decay, _ = update(jax.tree.map(jnp.zeros_like, params), init(params), params)
    decays = {"head", "layers/attention/query", "layers/moe/router", "layers/moe/wi"}
    for (name, got), param in zip(flatten_named(decay), jax.tree.leaves(params), strict=True):
        expected = 0.1 * param if name in decays else jnp.zeros_like(param)
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=name)


def test_decay_mask_takes_other_patterns():
    assert decay_mask({"norm": 0, "layers": {"wi": 0}}, no_decay=("^layers/",)) == {
        "norm": True,
        "layers": {"wi": False},
    }


def test_weight_decay_of_bfloat16_is_float32():
    axes = {"w": ("embed", "mlp")}
    params = {"w": jnp.full((4, 4), 1.0, jnp.bfloat16)}
    zero = jax.tree.map(jnp.zeros_like, params)
    for optimizer in (AdamW(weight_decay=1e-3), Adafactor(weight_decay=1e-3)):
        tx = optimizer.build(axes)
        directions, _ = tx.update(zero, tx.init(params), params)
        assert directions["w"].dtype == jnp.float32
        np.testing.assert_allclose(directions["w"], 1e-3, rtol=1e-6)


def test_update_without_parameters_is_refused():
    tx = AdamW().build({"w": ("embed",)})
    params = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="update needs the parameters"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(b1=1.0), r"AdamW.b1: 1.0 is not in \[0, 1\)"),
        (lambda: AdamW(b2=-0.1), r"AdamW.b2: -0.1 is not"),
        (lambda: AdamW(eps=0.0), r"AdamW.eps: 0.0; a number above 0"),
        (lambda: AdamW(weight_decay=-1.0), r"AdamW.weight_decay: -1.0; 0 or more"),
        (lambda: AdamW(no_decay=("(",)), r"AdamW.no_decay: '\(' is no pattern"),
        (lambda: AdamW(mu_dtype="float16"), r"AdamW.mu_dtype: .*'float16'"),
        (lambda: Adafactor(b1=1.5), r"Adafactor.b1: 1.5 is not in \[0, 1\)"),
        (lambda: Adafactor(clipping_threshold=0.0), r"Adafactor.clipping_threshold: 0.0"),
        (lambda: Adafactor(min_dim_size_to_factor=0), r"Adafactor.min_dim_size_to_factor: 0"),
        (lambda: Adafactor(weight_decay=-1.0), r"Adafactor.weight_decay: -1.0"),
    ],
)
def test_refuses_what_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
