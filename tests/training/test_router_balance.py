"""Balancing: biases that move against the load, and balance losses over batches and sequences."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.layouts import Form
from m6jax.modeling import balancing
from m6jax.modeling.config import BalanceOver
from m6jax.modeling.routers import TopK
from m6jax.modeling.routing import balance_loss
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.pseudo_to_real import delinking
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import (
    Update,
    evaluation_step,
    model_loss,
    router_balance,
    train_step,
)

# B rows, T length, E experts, P prototypes, K choices in a prototype, F = E / P, L uses of layers,
# U distinct ones.
RATE = 0.125  # sums of it are exact
BIASED = TopK(scores="SIGMOID", bias_rate=RATE)
MOE = models.experts(router=BIASED, normalize_weights=True, load_balance_loss=0.0)
CONFIG = models.tiny(moe=MOE)
BATCH = models.make_batch()


def moved(biases, chosen, config, layout):
    return balancing.moved(biases, jnp.asarray(chosen, jnp.float32), config, layout)


def four_experts(**changes):
    moe = models.experts(num_experts=4, num_prototypes=1, num_selected_experts=1, router=BIASED)
    return models.tiny(moe=moe, **changes)


def layer(bias):
    return {"moe": {"router": {"bias": jnp.asarray(bias, jnp.float32)}}}


class TestMoved:
    LOADS = np.array([[6, 2, 4, 4], [1, 1, 1, 5], [0, 8, 0, 0], [3, 5, 3, 5]])
    SIGNS = np.array([[-1, 1, 0, 0], [1, 1, 1, -1], [1, -1, 1, 1], [1, -1, 1, -1]])

    def test_against_the_load_of_every_layer(self):
        """The example of `balancing`: 6, 2, 4, 4 choices with a mean of 4."""
        config = four_experts(num_layers=4)
        before = np.arange(16.0).reshape(4, 4)
        after = moved({"layers": layer(before)}, self.LOADS, config, models.stacked(config))
        np.testing.assert_array_equal(
            after["layers"]["moe"]["router"]["bias"], before + RATE * self.SIGNS
        )

    def test_unrolled(self):
        config = four_experts(num_layers=4)
        biases = {f"layers_{i}": layer(np.zeros(4)) for i in range(4)}
        after = moved(biases, self.LOADS, config, models.unrolled(config))
        for i in range(4):
            np.testing.assert_array_equal(
                after[f"layers_{i}"]["moe"]["router"]["bias"], RATE * self.SIGNS[i]
            )

    def test_uses_of_a_shared_layer_count_together(self):
        """U = 2 of L = 4: loads 6 10 4 4 with a mean of 6, and 4 6 4 10 with the same."""
        config = four_experts(num_layers=4)
        biases = {"layers": layer(np.zeros((2, 4)))}
        after = moved(biases, self.LOADS, config, models.stacked(config, 2))
        np.testing.assert_array_equal(
            after["layers"]["moe"]["router"]["bias"],
            RATE * np.array([[0, -1, 1, 1], [1, 0, 1, -1]]),
        )

    @pytest.mark.parametrize("form", Form)
    def test_layers_of_a_pattern(self, form):
        """Two blocks of sparse, dense, sparse: uses 0 and 2, then 1 and 3, of the names."""
        config = four_experts(num_layers=6, pattern=("SPARSE", "DENSE", "SPARSE"))
        layout, model = config.layout(6, form), Transformer(config)
        biases = jax.tree.map(
            lambda p: jnp.zeros(p.value.shape), model.router_bias(layout), is_leaf=is_described
        )
        after = dict(flatten_named(moved(biases, self.LOADS, config, layout)))
        if form is Form.STACKED:
            expected = {
                "layers/sparse_0/moe/router/bias": self.SIGNS[[0, 2]],
                "layers/sparse_2/moe/router/bias": self.SIGNS[[1, 3]],
            }
        else:
            expected = {
                f"layers_{block}/sparse_{i}/moe/router/bias": self.SIGNS[2 * block + n]
                for block in range(2)
                for n, i in enumerate((0, 2))
            }
        assert after.keys() == expected.keys()
        for name, signs in expected.items():
            np.testing.assert_array_equal(after[name], RATE * signs, err_msg=name)

    def test_nothing_routed_moves_nothing(self):
        config = four_experts(num_layers=1)
        biases = {"layers": layer(np.ones((1, 4)))}
        after = moved(biases, np.zeros((1, 4)), config, models.stacked(config))
        models.assert_equal(after, biases)


def is_described(node):
    return hasattr(node, "axes")


PARAMS = {"a": 1, "layers": {"moe": {"up": 2, "router": {"kernel": 3}}, "norm": 4}}
BIASES = {"layers": {"moe": {"router": {"bias": 5}}}}


class TestTrees:
    def test_join_and_split_are_inverse(self):
        joined = balancing.join(PARAMS, BIASES)
        assert joined["layers"]["moe"] == {"up": 2, "router": {"kernel": 3, "bias": 5}}
        assert balancing.split(joined) == (PARAMS, BIASES)
        assert "bias" not in PARAMS["layers"]["moe"]["router"]

    def test_without_biases(self):
        assert balancing.join(PARAMS, None) is PARAMS
        assert balancing.split(PARAMS) == (PARAMS, None)

    def test_biases_are_no_parameters(self):
        layout = models.stacked(CONFIG)
        model = Transformer(CONFIG)
        assert not any("bias" in n for n, _ in flatten_named(model.parameters(layout)))
        initial = jax.eval_shape(lambda: model.init(jax.random.key(0), layout))
        assert not any("bias" in n for n, _ in flatten_named(initial))
        ((name, bias),) = flatten_named(model.router_bias(layout), is_leaf=is_described)
        assert (name, bias.value.shape) == ("layers/moe/router/bias", (2, 8))
        assert Transformer(models.tiny()).router_bias(layout) is None


@functools.cache
def setting(where=None, microbatches=1, unit=2, rate=0.0):
    """A jitted step and its first state."""
    model, layout, optimizer = Transformer(CONFIG), models.stacked(CONFIG, unit), AdamW()
    tx = optimizer.build(train_state.logical_axes(models.describe(CONFIG, layout)))
    step = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: rate,
        update=Update(microbatches=microbatches),
        balance=router_balance(model, layout),
    )
    biases = jax.tree.map(
        lambda p: jnp.zeros(p.value.shape), model.router_bias(layout), is_leaf=is_described
    )
    params = models.draw(CONFIG, layout)
    state = train_state.create(params, tx, 0, averaged=False, router_bias=biases)
    if where is None:
        return models.jit(step), state
    abstract = train_state.abstract_state(model, layout, optimizer, where, where.make_mesh(), False)
    shardings = train_state.shardings_of(abstract)
    return models.jit(step, out_shardings=(shardings, None)), jax.device_put(state, shardings)


def bias_of(state):
    return np.asarray(state.extra.router_bias["layers"]["moe"]["router"]["bias"])


class TestStep:
    def test_moves_by_the_load_of_the_batch(self):
        step, state = setting()
        new, metrics = step(state, BATCH)
        load = np.asarray(metrics["expert_load"])  # shares: the mean is 1 / E
        assert np.ptp(load) > 0.1
        np.testing.assert_array_equal(bias_of(new), RATE * np.sign(1 / 8 - load.round(6)))

    def test_microbatches_count_together(self):
        state = setting()[1]
        once, _ = setting()[0](state, BATCH)
        parts, _ = setting(microbatches=4)[0](state, BATCH)
        np.testing.assert_array_equal(bias_of(parts), bias_of(once))

    def test_uses_of_a_shared_layer_count_together(self):
        step, state = setting(unit=1)
        new, metrics = step(state, BATCH)
        load = np.asarray(metrics["expert_load"]).mean(0, keepdims=True)
        assert bias_of(new).shape == (1, 8)
        np.testing.assert_array_equal(bias_of(new), RATE * np.sign(1 / 8 - load.round(6)))

    def test_load_becomes_even(self):
        """From biases that crowd two experts; the learning rate is 0, so parameters stay."""
        step, state = setting()
        crowded = {"layers": layer(np.tile([1.0, 0, 0, 0], (2, 2)))}
        state = state.replace(extra=state.extra.replace(router_bias=crowded))
        spread = []
        for _ in range(12):
            state, metrics = step(state, BATCH)
            spread.append(float(np.asarray(metrics["expert_load"]).std()))
        assert spread[0] > 0.06
        assert spread[-1] < 0.7 * spread[0]
        models.assert_equal(state.params, setting()[1].params)

    def test_eight_devices_equal_one(self):
        """B6: the load is that of the global batch, so biases are bit-equal."""
        where = Partitioning(data=2, expert=4, model=1)
        step, state = setting()
        expected, seen = state, []
        for _ in range(3):
            expected, _ = step(expected, BATCH)
            seen.append(bias_of(expected))
        mesh = where.make_mesh()
        with where.activate(mesh):
            step, state = setting(where)
            batch = jax.device_put(BATCH, where.batch_sharding(mesh))
            for biases in seen:
                state, _ = step(state, batch)
                np.testing.assert_array_equal(bias_of(state), biases)
        assert len({b.tobytes() for b in seen}) == 3
        assert state.extra.router_bias["layers"]["moe"]["router"]["bias"].is_fully_replicated

    def test_evaluation_uses_what_is_served(self):
        _, state = setting()
        biases = balancing.moved(
            state.extra.router_bias,
            jnp.tile(jnp.array([0.0, 1.0]), (2, 4)),
            CONFIG,
            models.stacked(CONFIG),
        )
        extra = state.extra.replace(router_bias=biases, averaged=state.params)
        served = state.replace(extra=extra).served()
        np.testing.assert_array_equal(
            served["layers"]["moe"]["router"]["bias"], biases["layers"]["moe"]["router"]["bias"]
        )
        evaluate = models.jit(
            functools.partial(
                evaluation_step, model=Transformer(CONFIG), layout=models.stacked(CONFIG)
            )
        )
        with_biases, without = (evaluate(s, BATCH).router.chosen for s in (served, state.served()))
        assert (with_biases != without).any()


def test_state_is_described_and_delinked():
    where, one = Partitioning(data=2, expert=2, model=2), models.stacked(CONFIG, 1)
    model, optimizer = Transformer(CONFIG), AdamW()
    abstract = train_state.abstract_state(model, one, optimizer, where, where.make_mesh(), True)
    bias = abstract.extra.router_bias["layers"]["moe"]["router"]["bias"]
    assert (bias.shape, bias.dtype) == ((1, 8), jnp.float32)
    assert bias.sharding.is_fully_replicated
    assert not any(
        "router/bias" in n for n, _ in flatten_named((abstract.params, abstract.opt_state))
    )

    _, state = setting(unit=1)
    biases = {"layers": layer(np.arange(8.0)[None])}
    state = state.replace(extra=state.extra.replace(router_bias=biases))
    for form in Form:
        new = CONFIG.layout(2, form)
        real = delinking.delink(state, one, new, delinking.Policy.COPY)
        leaves = jax.tree.leaves(real.extra.router_bias)
        for copy in leaves[0] if form is Form.STACKED else leaves:
            np.testing.assert_array_equal(copy, np.arange(8.0))


def test_initial_biases_are_zero():
    where, layout = Partitioning(), models.stacked(CONFIG, 1)
    optimizer, model = AdamW(), Transformer(CONFIG)
    abstract = train_state.abstract_state(model, layout, optimizer, where, where.make_mesh(), False)
    tx = optimizer.build(train_state.logical_axes(models.describe(CONFIG, layout)))
    state = train_state.initialize(model, layout, tx, 0, abstract)
    np.testing.assert_array_equal(bias_of(state), np.zeros((1, 8)))


class TestBalanceLoss:
    """B2's probabilities in two rows; all experts of a row that are most probable are chosen."""

    ROWS = np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.6, 0.4], [0.3, 0.7]]], np.float32)[:, :, None]

    def loss(self, over, mask=((1, 1), (1, 1))):
        mask = np.array(mask, bool)
        chosen = jax.nn.one_hot(self.ROWS.argmax(-1), 2) * mask[..., None, None]
        return float(balance_loss(self.ROWS, chosen, mask, over))

    def test_over_the_batch(self):
        """B2: shares (0.75, 0.25), means (0.65, 0.35)."""
        assert self.loss(BalanceOver.BATCH) == pytest.approx(1.15, rel=1e-6)

    def test_over_sequences(self):
        """Rows: 2 (1.0 0.85) = 1.7, and shares (0.5, 0.5), so 1.0."""
        assert self.loss(BalanceOver.SEQUENCE) == pytest.approx((1.7 + 1.0) / 2, rel=1e-6)

    def test_sequences_count_by_their_tokens(self):
        """The second row has its first token alone: 2 0.6 = 1.2."""
        loss = self.loss(BalanceOver.SEQUENCE, ((1, 1), (1, 0)))
        assert loss == pytest.approx((2 * 1.7 + 1 * 1.2) / 3, rel=1e-6)

    def test_a_row_of_padding_does_not_count(self):
        assert self.loss(BalanceOver.SEQUENCE, ((1, 1), (0, 0))) == pytest.approx(1.7, rel=1e-6)
        assert self.loss(BalanceOver.SEQUENCE, ((0, 0), (0, 0))) == 0.0

    @pytest.mark.parametrize("over", BalanceOver)
    @pytest.mark.parametrize(("E", "P", "K"), [(4, 1, 2), (8, 2, 2), (8, 4, 1)])
    def test_even_routing_gives_one(self, over, E, P, K):
        """B4 for both."""
        F, T = E // P, E
        chosen = np.zeros((2, T, P, F), np.float32)
        for t, k in np.ndindex(T, K):
            chosen[:, t, :, (t * K + k) % F] = 1
        loss = balance_loss(jnp.full(chosen.shape, 1 / F), chosen, np.ones((2, T), bool), over)
        assert float(loss) == pytest.approx(1.0, rel=1e-6)

    def test_gradient_goes_through_the_means_alone(self):
        """Of a row: F * share_e / tokens of the batch for every token."""
        chosen = jax.nn.one_hot(self.ROWS.argmax(-1), 2)
        grad = jax.grad(balance_loss)(
            jnp.asarray(self.ROWS), chosen, np.ones((2, 2), bool), BalanceOver.SEQUENCE
        )
        np.testing.assert_allclose(grad[0, :, 0], [[2 / 4, 0], [2 / 4, 0]], atol=1e-7)
        np.testing.assert_allclose(grad[1, :, 0], [[1 / 4, 1 / 4]] * 2, atol=1e-7)


def test_every_statistic_comes_by_layer_too():
    _, metrics = setting()[0](setting()[1], BATCH)
    for name in (
        "load_balance_loss",
        "router_z_loss",
        "router_entropy",
        "router_confidence",
        "fraction_dropped",
    ):
        by_layer = np.asarray(metrics[f"{name}_by_layer"])
        assert by_layer.shape == (2,)
        assert by_layer[0] != by_layer[1]
        assert float(metrics[name]) == pytest.approx(by_layer.mean(), rel=1e-5)
