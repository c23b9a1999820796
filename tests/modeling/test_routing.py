"""Choices and statistics computed by hand."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.modeling.routers import choose
from m6jax.modeling.routing import Router, RouterStatistics, statistics

# B rows, T length, M width, E experts, P prototypes, K choices in a prototype, F = E / P.
jit_choose = models.jit(choose, static_argnums=(2, 3))
jit_statistics = models.jit(statistics)

B2_PROBABILITIES = [[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]]


@models.jit
def measure_row(probabilities, mask):
    _, chosen = choose(probabilities, mask, 1, False)
    return statistics(jnp.log(probabilities), probabilities, chosen, mask)


def measure(probabilities, mask=None):
    """Statistics of [T, P, F] probabilities in one row, K = 1."""
    probabilities = np.asarray(probabilities, np.float32)[None]
    mask = np.ones(probabilities.shape[:2], bool) if mask is None else np.asarray([mask], bool)
    return measure_row(probabilities, mask)


def router(**changes):
    return Router(models.experts(**changes), init_scale=1.0)


@models.jit(static_argnums=0)
def apply_router(module, params, x, mask, key):
    return module.apply({"params": params}, x, mask, key)


class TestChoose:
    def test_one_of_each_prototype(self):
        """The example of the module: weights are probabilities inside a prototype."""
        probabilities = jnp.array([[[[0.9, 0.1], [0.2, 0.8]]]])  # [B, T, P, F]
        routing, chosen = jit_choose(probabilities, jnp.ones((1, 1), bool), 1, False)
        np.testing.assert_array_equal(routing.expert_index, [[[[0], [3]]]])
        np.testing.assert_allclose(routing.weights, [[[[0.9], [0.8]]]])
        np.testing.assert_array_equal(chosen, [[[[1, 0], [0, 1]]]])

    @pytest.mark.parametrize(
        ("normalize", "weights"), [(False, [0.5, 0.3]), (True, [0.625, 0.375])]
    )
    def test_two_best_in_order(self, normalize, weights):
        probabilities = jnp.array([[[[0.3, 0.2, 0.5]]]])
        routing, chosen = jit_choose(probabilities, jnp.ones((1, 1), bool), 2, normalize)
        np.testing.assert_array_equal(routing.expert_index[0, 0, 0], [2, 0])
        np.testing.assert_allclose(routing.weights[0, 0, 0], weights, rtol=1e-6)
        np.testing.assert_array_equal(chosen[0, 0, 0], [1, 0, 1])

    @pytest.mark.parametrize("num_selected", [1, 2])
    def test_padding_chooses_the_expert_that_does_not_exist(self, num_selected):
        """B3: padding never routes, never counts."""
        probabilities = jnp.full((1, 2, 2, 3), 1 / 3)
        routing, chosen = jit_choose(probabilities, jnp.array([[True, False]]), num_selected, False)
        assert (np.asarray(routing.expert_index[0, 1]) == 6).all()
        assert (np.asarray(routing.expert_index[0, 0]) < 6).all()
        assert not np.asarray(routing.weights[0, 1]).any()
        assert not np.asarray(chosen[0, 1]).any()

    @pytest.mark.parametrize("num_selected", [1, 2])
    @pytest.mark.parametrize("normalize", [False, True])
    def test_gradient_of_the_weights_is_that_of_a_gather(self, num_selected, normalize):
        rng = np.random.default_rng(0)
        logits = jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32)
        factors = jnp.asarray(rng.normal(size=(2, 3, 2, num_selected)), jnp.float32)
        mask = jnp.array([[True, True, False], [True, True, True]])

        def ours(logits):
            routing, _ = choose(jax.nn.softmax(logits), mask, num_selected, normalize)
            return (routing.weights * factors).sum()

        def plainly(logits):
            probabilities = jax.nn.softmax(logits)
            index = jnp.argsort(-probabilities, axis=-1)[..., :num_selected]
            weights = jnp.take_along_axis(probabilities, index, axis=-1)
            if normalize:
                weights = weights / weights.sum(-1, keepdims=True)
            return (weights * factors * mask[..., None, None]).sum()

        (value, grad), (expected, expected_grad) = (
            models.jit(jax.value_and_grad(fn))(logits) for fn in (ours, plainly)
        )
        assert float(value) == pytest.approx(float(expected), rel=1e-5)
        np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


class TestStatistics:
    def test_balance_loss_by_hand(self):
        """B2: shares (0.75, 0.25), means (0.65, 0.35): 2 (0.75 0.65 + 0.25 0.35) = 1.15."""
        measured = measure([[p] for p in B2_PROBABILITIES])
        assert float(measured.load_balance_loss) == pytest.approx(1.15, rel=1e-6)
        np.testing.assert_array_equal(measured.chosen, [3, 1])

    def test_padding_does_not_count(self):
        """B3: tokens 3 and 4 as padding: shares (1, 0), means (0.85, 0.15): 2 0.85 = 1.70."""
        measured = measure([[p] for p in B2_PROBABILITIES], mask=[1, 1, 0, 0])
        assert float(measured.load_balance_loss) == pytest.approx(1.70, rel=1e-6)
        np.testing.assert_array_equal(measured.chosen, [2, 0])
        assert float(measured.tokens) == 2
        alone = measure([[p] for p in B2_PROBABILITIES[:2]])
        models.assert_close(measured, alone)

    @pytest.mark.parametrize(
        ("E", "P", "K"), [(4, 1, 2), (8, 1, 2), (8, 1, 4), (8, 2, 2), (8, 4, 1)]
    )
    def test_even_routing_gives_one(self, E, P, K):
        """B4: uniform probabilities, even choices."""
        F, T = E // P, E
        probabilities = jnp.full((1, T, P, F), 1 / F)
        chosen = np.zeros((1, T, P, F), np.float32)
        for t in range(T):
            for k in range(K):
                chosen[0, t, :, (t * K + k) % F] = 1
        mask = jnp.ones((1, T), bool)
        measured = jit_statistics(jnp.log(probabilities), probabilities, jnp.asarray(chosen), mask)
        assert float(measured.load_balance_loss) == pytest.approx(1.0, rel=1e-6)
        np.testing.assert_array_equal(measured.chosen, np.full(E, T * K / F))

    def test_balance_loss_is_the_mean_over_prototypes(self):
        """B4: a prototype of B2 (1.15) and one in which all is expert 1 (2.0)."""
        measured = measure([[p, [1e-9, 1.0]] for p in B2_PROBABILITIES])
        assert float(measured.load_balance_loss) == pytest.approx((1.15 + 2.0) / 2, rel=1e-6)
        np.testing.assert_array_equal(measured.chosen, [3, 1, 0, 4])

    def test_gradient_of_the_balance_loss_goes_through_the_means_alone(self):
        def loss(logits):
            probabilities = jax.nn.softmax(logits)
            mask = jnp.ones((1, 4), bool)
            _, chosen = choose(probabilities, mask, 1, False)
            return statistics(logits, probabilities, chosen, mask).load_balance_loss

        # d/dp of 2 sum_e share_e mean_e is 2 share_e / 4; softmax: p0 p1 (s0 - s1) / 2 for logit 0.
        p = np.array(B2_PROBABILITIES)
        expected = p[:, 0] * p[:, 1] * (0.75 - 0.25) / 2
        grad = models.jit(jax.grad(loss))(np.log(p.astype(np.float32))[None, :, None])
        np.testing.assert_allclose(grad[0, :, 0], np.stack([expected, -expected], -1), rtol=1e-5)

    def test_the_other_means(self):
        logits = jnp.array([[[[1.0, 0.0]], [[0.0, 2.0]], [[5.0, 5.0]]]])  # the last is padding
        probabilities = jax.nn.softmax(logits)
        mask = jnp.array([[True, True, False]])
        _, chosen = jit_choose(probabilities, mask, 1, False)
        measured = jit_statistics(logits, probabilities, chosen, mask)
        log_sums = np.log([1 + np.e, 1 + np.e**2])
        assert float(measured.router_z_loss) == pytest.approx((log_sums**2).mean(), rel=1e-5)
        p = np.array([[np.e, 1], [1, np.e**2]])
        p = p / p.sum(-1, keepdims=True)
        entropy = -(p * np.log(p)).sum(-1).mean()
        assert float(measured.entropy) == pytest.approx(entropy, rel=1e-5)
        assert float(measured.confidence) == pytest.approx(p.max(-1).mean(), rel=1e-5)

    def test_only_padding_gives_zeros_and_no_nan(self):
        measured = measure([[p] for p in B2_PROBABILITIES], mask=[0, 0, 0, 0])
        for leaf in jax.tree.leaves(measured):
            assert not np.asarray(leaf).any()
        assert float(measured.fraction_dropped) == 0.0  # nothing was asked for, nothing dropped

    def test_fraction_dropped(self):
        measured = measure([[p] for p in B2_PROBABILITIES])
        assert float(measured.fraction_dropped) == 0.0
        served = measured.replace(served=jnp.array([2.0, 1.0]))
        assert float(served.fraction_dropped) == 0.25

    def test_fraction_dropped_of_several_layers(self):
        zeros = {
            "load_balance_loss": 0,
            "router_z_loss": 0,
            "entropy": 0,
            "confidence": 0,
            "tokens": 0,
        }
        chosen, served = jnp.array([[4.0, 0.0], [2.0, 2.0]]), jnp.array([[1.0, 0.0], [2.0, 2.0]])
        dropped = RouterStatistics(**zeros, chosen=chosen, served=served).fraction_dropped
        np.testing.assert_array_equal(dropped, [0.75, 0.0])


@pytest.mark.parametrize(("dtype", "chosen"), [("float32", 1), ("bfloat16", 0)])
def test_scores_that_bfloat16_cannot_tell_apart(dtype, chosen):
    """8.00 and 8.02: between 8 and 16 the values of bfloat16 are 1/16 apart."""
    moe = models.experts(
        num_experts=2, num_prototypes=1, num_selected_experts=1, router_dtype=dtype
    )
    config = models.tiny(param_dtype="bfloat16", dtype="bfloat16", moe=moe)
    kept = models.describe(config, models.stacked(config))["layers"]["moe"]["router"]["kernel"]
    assert kept.value.dtype == dtype
    kernel = jnp.array([[8.00, 8.02]], kept.value.dtype)
    x, mask = jnp.ones((1, 1, 1), jnp.bfloat16), jnp.ones((1, 1), bool)
    routing, _ = apply_router(Router(moe, init_scale=1.0), {"kernel": kernel}, x, mask, None)
    assert routing.expert_index.item() == chosen


class TestRouter:
    X = np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32)
    KERNEL = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)

    def apply(self, x, key=None, jitter=0.0):
        return apply_router(
            router(router_jitter=jitter), {"kernel": self.KERNEL}, x, self.MASK, key
        )

    def test_softmax_is_inside_each_prototype(self):
        logits = (self.X @ self.KERNEL).reshape(2, 5, 2, 4)
        expected, _ = jit_choose(jax.nn.softmax(logits, -1), self.MASK, 2, False)
        routing, _ = self.apply(self.X)
        np.testing.assert_array_equal(routing.expert_index, expected.expert_index)
        np.testing.assert_allclose(routing.weights, expected.weights, rtol=1e-5)

    def test_scores_are_float32_whatever_the_input(self):
        routing, measured = self.apply(self.X.astype(jnp.bfloat16))
        rounded, _ = self.apply(self.X.astype(jnp.bfloat16).astype(np.float32))
        assert routing.weights.dtype == measured.load_balance_loss.dtype == jnp.float32
        np.testing.assert_array_equal(routing.expert_index, rounded.expert_index)
        models.assert_close(routing.weights, rounded.weights)

    def test_parameters(self):
        kernel = models.boxed(router(), self.X, self.MASK, None)["kernel"]
        assert (kernel.value.shape, kernel.axes) == ((16, 8), ("embed", "expert"))

    def test_jitter_needs_a_key(self):
        models.assert_close(self.apply(self.X, jitter=0.5), self.apply(self.X))
        models.assert_close(self.apply(self.X, jax.random.key(1)), self.apply(self.X))
        first, second = (self.apply(self.X, jax.random.key(k), jitter=0.5)[0] for k in (1, 2))
        assert (first.weights != second.weights).any()

    def test_large_padding_changes_no_bit(self):
        """B3 for the router."""
        noise = 1e4 * np.random.default_rng(3).normal(size=self.X.shape)
        noisy = np.where(self.MASK[..., None], self.X, noise).astype(np.float32)
        models.assert_equal(self.apply(noisy), self.apply(self.X))
