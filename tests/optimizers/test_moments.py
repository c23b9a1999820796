"""What delinking may do with an optimizer's state that it knows, and with one that it does not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

from m6jax.foundation.pytrees import flatten_named, map_named
from m6jax.layouts import Layout, LayoutError, LeafName
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.moments import reset_moments, scale_moments
from m6jax.pseudo_to_real.delinking import Policy, delink
from m6jax.training import train_state

SHARED, REAL = Layout(depth=4, unit=1), Layout(depth=4, unit=4)
AXES = {
    "head": ("embed",),
    "layers": {"norm": ("layers", "embed"), "w": ("layers", "embed", "mlp")},
}
OURS = {
    "adamw": AdamW(weight_decay=0.0),
    "adafactor": Adafactor(min_dim_size_to_factor=4),
    "momentum": Adafactor(min_dim_size_to_factor=4, b1=0.9),
}
OPTAX = {
    "adamw": optax.adamw(1.0, weight_decay=0.1),
    "sgd": optax.sgd(1.0, momentum=0.9),
    "without memory": optax.sgd(1.0),
    "lion": optax.lion(1.0),
    "rmsprop": optax.rmsprop(1.0),
    "adagrad": optax.adagrad(1.0),
    "clipped": optax.chain(optax.clip_by_global_norm(1e6), optax.adam(1.0)),
}
every_one = pytest.mark.parametrize("tx", OPTAX.values(), ids=OPTAX)


class Unknown(NamedTuple):
    """State of nobody's optimizer."""

    memory: Any


class Counted(NamedTuple):
    """The same with a count of steps."""

    steps: Any
    memory: Any


def tree(seed, layers=1):
    rng = np.random.default_rng(seed)
    return {
        "head": rng.normal(size=4).astype(np.float32),
        "layers": {
            "norm": rng.normal(size=(layers, 4)).astype(np.float32),
            "w": rng.normal(size=(layers, 4, 6)).astype(np.float32),
        },
    }


def in_stack(name):
    return LeafName.of(name).in_stack


def after_steps(tx, factor=1.0):
    """A state after two gradients; those of the stack times `factor`."""
    params = tree(0)
    opt_state = tx.init(params)
    for seed in (1, 2):
        grads = map_named(lambda name, g: g * factor if in_stack(name) else g, tree(seed))
        _, opt_state = tx.update(grads, opt_state, params)
    return opt_state


def moved(opt_state, policy):
    state = train_state.TrainState(
        step=jnp.int32(2),
        params=tree(0),
        opt_state=opt_state,
        rng=jnp.zeros(2, jnp.uint32),
        extra=train_state.Extra(),
    )
    return delink(state, SHARED, REAL, policy).opt_state


@pytest.mark.parametrize("optimizer", OURS.values(), ids=OURS)
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_scaled_moments_are_those_of_scaled_gradients(optimizer, factor):
    # Powers of two, so that rounding does not enter.
    tx = optimizer.build(AXES)
    scaled = scale_moments(after_steps(tx), lambda name: factor if in_stack(name) else 1.0)
    models.assert_close(scaled, after_steps(tx, factor))


def test_scaled_moments_by_hand():
    state = after_steps(OURS["adamw"].build(AXES))
    scaled = scale_moments(state, lambda name: 0.5 if "norm" in name else 1.0)
    np.testing.assert_array_equal(scaled.mu["layers"]["norm"], state.mu["layers"]["norm"] / 2)
    np.testing.assert_array_equal(scaled.nu["layers"]["norm"], state.nu["layers"]["norm"] / 4)
    np.testing.assert_array_equal(scaled.nu["layers"]["w"], state.nu["layers"]["w"])
    np.testing.assert_array_equal(scaled.count["layers"]["norm"], state.count["layers"]["norm"])


class TestOptax:
    @every_one
    def test_after_copy_equal_gradients_move_all_layers_alike(self, tx):
        grads, expanded = tree(5), jax.tree.map(jnp.asarray, tree(5))
        expanded["layers"] = jax.tree.map(
            lambda g: jnp.tile(g, (4, *[1] * (g.ndim - 1))), grads["layers"]
        )
        before = after_steps(tx)
        expected, _ = tx.update(grads, before, tree(0))
        params = {"head": tree(0)["head"]} | {
            "layers": jax.tree.map(lambda p: jnp.repeat(p, 4, 0), tree(0)["layers"])
        }
        got, _ = tx.update(expanded, moved(before, Policy.COPY), params)
        for layer in range(4):
            for name in ("norm", "w"):
                np.testing.assert_allclose(
                    got["layers"][name][layer], expected["layers"][name][0], rtol=1e-6
                )
        np.testing.assert_allclose(got["head"], expected["head"], rtol=1e-6)

    @every_one
    def test_rescale_of_summed_gradients_is_copy_of_their_means(self, tx):
        got = moved(after_steps(tx, factor=4.0), Policy.RESCALE)
        # Adagrad begins with 0.1, which no gradient has made.
        expected = moved(after_steps(tx), Policy.COPY)
        if tx is OPTAX["adagrad"]:
            expected = jax.tree.map(jnp.asarray, expected)
            offset = 0.1 * (1 - 1 / 16)
            first = expected[0].sum_of_squares
            lower = first | {"layers": jax.tree.map(lambda s: s - offset, first["layers"])}
            expected = (expected[0]._replace(sum_of_squares=lower), *expected[1:])
        models.assert_close(got, expected, 2e-6)

    @pytest.mark.parametrize("name", ["sgd", "lion", "rmsprop", "adagrad"])
    def test_reset_forgets_the_moments_of_the_stack(self, name):
        before = after_steps(OPTAX[name])
        after = moved(before, Policy.RESET)
        for (leaf, got), old in zip(flatten_named(after), jax.tree.leaves(before), strict=True):
            if in_stack(leaf):
                assert got.shape[0] == 4
                assert not got.any(), leaf
            else:
                np.testing.assert_array_equal(got, old, err_msg=leaf)


class TestRefused:
    @pytest.mark.parametrize("name", ["adamw", "clipped"])
    def test_reset_under_a_count_of_all_layers(self, name):
        """Zero moments under an old count overshoot."""
        with pytest.raises(LayoutError, match=r"count: ScaleByAdamState has one count for all"):
            moved(after_steps(OPTAX[name]), Policy.RESET)

    def test_reset_of_an_unknown_state_with_a_count(self):
        state = (optax.EmptyState(), Counted(jnp.int32(2), tree(1)))
        with pytest.raises(LayoutError, match="1/steps: Counted has one steps for all layers"):
            moved(state, Policy.RESET)
        assert not moved(Unknown(tree(1)), Policy.RESET).memory["layers"]["w"].any()

    def test_rescale_of_an_unknown_state(self):
        """By name; what stays as it is need not be known."""
        state = (Unknown(tree(1)),)
        with pytest.raises(LayoutError, match=r"0/memory/layers/norm: how it grows .* Unknown"):
            moved(state, Policy.RESCALE)
        with pytest.raises(LayoutError, match=r"layers/norm: how it grows .* ndarray"):
            moved(tree(1), Policy.RESCALE)
        assert scale_moments(state, lambda name: 1.0) is not None
        assert moved(state, Policy.COPY)[0].memory["layers"]["w"].shape == (4, 4, 6)

    def test_rescale_of_moments_of_moments(self):
        tx = optax.rmsprop(1.0, momentum=0.9)
        with pytest.raises(
            LayoutError, match="whether TraceState sees gradients, or what ScaleByRmsState makes"
        ):
            moved(after_steps(tx), Policy.RESCALE)
        assert moved(after_steps(tx), Policy.COPY)[2].trace["layers"]["w"].shape == (4, 4, 6)

    @pytest.mark.parametrize("policy", [Policy.COPY, Policy.RESCALE, Policy.RESET])
    def test_moments_that_are_not_shaped_like_the_parameters(self, policy):
        """Adafactor of optax has one number where it keeps nothing, and takes layers for rows."""
        with pytest.raises(LayoutError, match=r"FactoredState keeps shape \(1,\) of a parameter"):
            moved(after_steps(optax.adafactor(1.0)), policy)

    def test_resetting_nothing_is_no_fault(self):
        state = after_steps(OPTAX["adamw"])
        models.assert_equal(reset_moments(state, lambda name: False), state)
