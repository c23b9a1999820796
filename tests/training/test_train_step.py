"""The step: cutting a batch in parts changes nothing; clipping, averages, shared gradients."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.block import StackOutput
from m6jax.modeling.routing import Router
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.optimizers.weight_update import leaf_squares
from m6jax.training import losses, train_state
from m6jax.training.losses import Loss, LossSums, TokenSums, loss_sums
from m6jax.training.train_step import (
    Update,
    accumulate,
    evaluation_step,
    global_norm,
    model_loss,
    scale_shared,
    train_step,
)

KEY = jax.random.key(0)
BATCH = models.make_batch()


def token_loss(params, part, weight, key):
    """B1's loss: c * w a token."""
    del key
    total = (part["loss_weights"] * part["c"] * params["w"]).sum()
    zero = jnp.float32(0)
    sums = TokenSums(total, zero, zero, part["loss_weights"].sum())
    total = total / jnp.maximum(weight.targets, 1e-9)
    return total, LossSums(sums, total, None)


def sgd():
    """The direction is the gradient."""
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, ()))


def state_of(params, tx, averaged=False):
    return train_state.create(params, tx, seed=0, averaged=averaged)


def axes_of(config, layout):
    return train_state.logical_axes(models.describe(config, layout))


class TestAccumulation:
    """B1: gradient and loss weigh tokens, not microbatches."""

    # Eight rows of one token: c = 3 and three padding, then three of c = 1 and one padding.
    C = np.array([3, 9, 9, 9, 1, 1, 1, 9], np.float32)[:, None]
    REAL = np.array([1, 0, 0, 0, 1, 1, 1, 0])[:, None]
    FIRST = np.array([1, 0, 0, 0, 0, 0, 0, 0])[:, None]

    def run(self, real, microbatches, where=None):
        batch = {"c": self.C, "loss_weights": real.astype(np.float32), "segment_ids": real}
        step = models.jit(lambda w, batch: accumulate(token_loss, w, batch, microbatches, KEY))
        params = {"w": jnp.float32(1)}
        if where is None:
            grads, sums = step(params, batch)
        else:
            mesh = where.make_mesh(jax.devices()[:2])
            with where.activate(mesh):
                grads, sums = step(params, jax.device_put(batch, where.batch_sharding(mesh)))
        return float(grads["w"]), losses.summarize(sums)

    @pytest.mark.parametrize("where", [None, Partitioning(), Partitioning(expert=2)])
    @pytest.mark.parametrize("microbatches", [1, 2, 4])
    def test_microbatches_and_shards_weigh_tokens(self, microbatches, where):
        grad, metrics = self.run(self.REAL, microbatches, where)
        assert grad == pytest.approx(1.5, rel=1e-6)
        assert float(metrics["loss"]) == pytest.approx(1.5, rel=1e-6)
        assert float(metrics["total_loss"]) == pytest.approx(1.5, rel=1e-6)

    @pytest.mark.parametrize("microbatches", [1, 2, 4])
    def test_a_microbatch_of_padding_does_not_count(self, microbatches):
        grad, metrics = self.run(self.FIRST, microbatches)
        assert grad == pytest.approx(3.0, rel=1e-6)
        assert float(metrics["loss"]) == pytest.approx(3.0, rel=1e-6)

    @pytest.mark.parametrize("microbatches", [1, 2])
    def test_a_batch_of_padding_gives_zeros(self, microbatches):
        grad, metrics = self.run(0 * self.REAL, microbatches)
        assert grad == 0.0
        assert float(metrics["loss"]) == 0.0

    @pytest.mark.parametrize("microbatches", [1, 2, 4])
    def test_router_losses_keep_their_weight(self, microbatches):
        """B2: the same four tokens in every row: 1.15 and the same gradient each time."""
        p = np.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]], np.float32)
        moe = models.experts(
            num_experts=2, num_prototypes=1, num_selected_experts=1, load_balance_loss=0.5
        )
        router = Router(moe, 1.0)
        batch = {
            "x": np.tile(np.log(p), (4, 1, 1)),
            "targets": np.zeros((4, 4), np.int32),
            "loss_weights": np.ones((4, 4), np.float32),
            "segment_ids": np.ones((4, 4), np.int32),
        }

        def loss_fn(params, part, weight, key):
            mask = part["segment_ids"] > 0
            _, measured = router.apply({"params": params}, part["x"], mask, None)
            output = StackOutput(part["x"], jax.tree.map(lambda leaf: leaf[None], measured))
            logits = lambda head, x: jnp.zeros((*x.shape[:2], 2))  # noqa: E731
            sums = loss_sums(logits, {}, output, part, weight, Loss(), moe)
            return sums.total, sums

        params = {"kernel": jnp.eye(2)}
        grads, sums = models.jit(lambda w: accumulate(loss_fn, w, batch, microbatches, KEY))(params)
        metrics = losses.summarize(sums)
        assert float(metrics["load_balance_loss"]) == pytest.approx(1.15, rel=1e-6)
        z_loss = 0.1 * float(metrics["router_z_loss"])  # log-sum-exps of 0
        expected = np.log(2) + 0.5 * 1.15 + z_loss
        assert float(metrics["total_loss"]) == pytest.approx(expected, rel=1e-6)
        # Of the balance loss: 0.5 * 2 * (share_0 - share_1) mean(p0 p1 x), of logit 0; minus for 1.
        slope = 0.25 * (p.prod(-1)[:, None] * np.log(p)).sum(0) * 0.5
        np.testing.assert_allclose(
            grads["kernel"], np.stack([slope, -slope], -1), rtol=1e-4, atol=1e-7
        )

    def test_microbatches_of_a_model_equal_the_whole_batch(self):
        """To 1e-6; of a balance loss this holds over rows, over a whole batch it is not linear."""
        moe = models.experts(group_size=4, balance_over="SEQUENCE")
        config = models.tiny(num_layers=1, moe=moe)
        layout = models.stacked(config)
        params = models.draw(config, layout)
        loss_fn = model_loss(Transformer(config), layout, Loss(label_smoothing=0.1, z_loss=0.01))

        def run(microbatches):
            return models.jit(lambda p: accumulate(loss_fn, p, BATCH, microbatches, KEY))(params)

        (whole_grads, whole), (grads, sums) = run(1), run(4)
        models.assert_close(grads, whole_grads, 2e-6)
        models.assert_close(losses.summarize(sums), losses.summarize(whole), 2e-6)

    def test_microbatches_have_keys_of_their_own(self):
        def loss_fn(params, part, weight, key):
            total = jax.random.uniform(key) * params["w"]
            zero = jnp.float32(0)
            return total, LossSums(TokenSums(zero, zero, zero, zero), total, None)

        batch = {"loss_weights": np.ones((2, 1)), "segment_ids": np.ones((2, 1), int)}
        params = {"w": jnp.float32(1)}
        two, _ = models.jit(lambda: accumulate(loss_fn, params, batch, 2, KEY))()
        first, second = (jax.random.uniform(jax.random.fold_in(KEY, i)) for i in range(2))
        assert float(two["w"]) == pytest.approx(float(first + second), rel=1e-6)


GRADS = {"head": jnp.full((3,), 2.0), "layers": {"w": jnp.full((2, 2), 6.0)}}
SHARED = models.stacked(models.tiny(num_layers=6), 2)  # R = 3
REAL = models.stacked(models.tiny(num_layers=2))


class TestSharedGradient:
    def test_is_scaled_to_the_mean_over_its_uses(self):
        scaled = scale_shared(GRADS, SHARED)
        np.testing.assert_array_equal(scaled["layers"]["w"], np.full((2, 2), 2.0))
        np.testing.assert_array_equal(scaled["head"], GRADS["head"])
        unscaled = scale_shared(GRADS, REAL)
        models.assert_equal(unscaled, GRADS)

    def test_counts_once_a_use_in_the_global_norm(self):
        assert float(global_norm(leaf_squares(GRADS), REAL)) == pytest.approx((12 + 144) ** 0.5)
        assert float(global_norm(leaf_squares(GRADS), SHARED)) == pytest.approx(
            (12 + 3 * 144) ** 0.5
        )

    def test_norm_is_that_of_the_delinked_layers(self):
        tripled = {
            "head": GRADS["head"],
            "layers": {"w": jnp.tile(GRADS["layers"]["w"], (3, 1))},
        }
        real = models.stacked(models.tiny(num_layers=6))
        assert float(global_norm(leaf_squares(GRADS), SHARED)) == pytest.approx(
            float(global_norm(leaf_squares(tripled), real)), rel=1e-6
        )

    def test_norm_of_bfloat16_is_float32(self):
        grads = {"w": jnp.full((1000,), 1.0, jnp.bfloat16)}
        assert float(global_norm(leaf_squares(grads), REAL)) == pytest.approx(1000**0.5, rel=1e-6)


class TestUpdate:
    """One weight w = 1, loss 3 w, learning rate 0.1: the gradient is 3."""

    BATCH = {"c": np.full((2, 1), 3.0, np.float32), "loss_weights": np.ones((2, 1), np.float32)} | {
        "segment_ids": np.ones((2, 1), np.int32)
    }

    def step(self, state, layout=REAL, **update):
        run = functools.partial(
            train_step,
            loss_fn=token_loss,
            layout=layout,
            tx=sgd(),
            learning_rate=lambda step: jnp.where(step == 0, 0.1, 0.2),
            update=Update(**update),
        )
        return models.jit(run)(state, self.BATCH)

    def state(self, averaged=False, value=1.0):
        return state_of({"w": jnp.float32(value)}, sgd(), averaged)

    def test_goes_against_the_gradient(self):
        state, metrics = self.step(self.state(), clip_norm=None)
        assert float(state.params["w"]) == pytest.approx(1 - 0.1 * 3, rel=1e-6)
        assert int(state.step) == 1
        assert float(metrics["grad_norm"]) == pytest.approx(3.0, rel=1e-6)
        assert float(metrics["learning_rate"]) == pytest.approx(0.1, rel=1e-6)
        assert float(metrics["loss"]) == pytest.approx(3.0, rel=1e-6)

    def test_learning_rate_is_that_of_the_step(self):
        state, _ = self.step(self.state(), clip_norm=None)
        state, metrics = self.step(state, clip_norm=None)
        assert float(metrics["learning_rate"]) == pytest.approx(0.2, rel=1e-6)
        assert float(state.params["w"]) == pytest.approx(0.7 - 0.2 * 3, rel=1e-5)

    @pytest.mark.parametrize(("clip_norm", "gradient"), [(1.5, 1.5), (3.0, 3.0), (100.0, 3.0)])
    def test_clipping_shortens_gradients_above_the_norm(self, clip_norm, gradient):
        state, metrics = self.step(self.state(), clip_norm=clip_norm)
        assert float(state.params["w"]) == pytest.approx(1 - 0.1 * gradient, rel=1e-6)
        assert float(metrics["grad_norm"]) == pytest.approx(3.0, rel=1e-6)  # before clipping

    def test_average_follows_the_parameters(self):
        state, _ = self.step(self.state(averaged=True), clip_norm=None, average_decay=0.9)
        first = 0.9 * 1 + 0.1 * 0.7
        assert float(state.extra.averaged["w"]) == pytest.approx(first, rel=1e-6)
        state, _ = self.step(state, clip_norm=None, average_decay=0.9)
        second = 0.9 * first + 0.1 * 0.1
        assert float(state.extra.averaged["w"]) == pytest.approx(second, rel=1e-5)

    def test_without_an_average_there_is_none(self):
        state, _ = self.step(self.state(), average_decay=0.9)
        assert state.extra.averaged is None

    def test_keeps_the_type_of_parameters_and_averages(self):
        params = {"w": jnp.ones((), jnp.bfloat16)}
        state, _ = self.step(state_of(params, sgd(), True), clip_norm=1.0, average_decay=0.5)
        assert state.params["w"].dtype == state.extra.averaged["w"].dtype == jnp.bfloat16

    def test_the_key_of_the_run_stays(self):
        before = self.state()
        after, _ = self.step(before)
        np.testing.assert_array_equal(after.rng, before.rng)
        assert jax.random.key_data(after.step_key()).tolist() != (
            jax.random.key_data(before.step_key()).tolist()
        )

    @pytest.mark.parametrize(("mean", "gradient"), [(True, 1.0), (False, 3.0)])
    def test_gradients_of_shared_layers_are_means_unless_sums_are_wanted(self, mean, gradient):
        def in_the_stack(params, *args):
            return token_loss({"w": params["layers"]["w"].sum()}, *args)

        run = functools.partial(
            train_step,
            loss_fn=in_the_stack,
            layout=SHARED,
            tx=sgd(),
            learning_rate=lambda step: 0.1,
            update=Update(clip_norm=None, mean_shared_gradient=mean),
        )
        state, _ = models.jit(run)(
            state_of({"layers": {"w": jnp.array([0.5, 0.5])}}, sgd()), self.BATCH
        )
        np.testing.assert_allclose(
            state.params["layers"]["w"], np.full(2, 0.5 - 0.1 * gradient), rtol=1e-5
        )

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"microbatches": 0}, "Update.microbatches: 0; at least 1"),
            ({"clip_norm": 0.0}, "Update.clip_norm: 0.0 is not greater than 0"),
            ({"average_decay": 1.0}, r"Update.average_decay: 1.0 is not in \(0, 1\)"),
            ({"average_decay": 0.0}, r"Update.average_decay: 0.0 is not in \(0, 1\)"),
        ],
    )
    def test_refuses_what_cannot_be(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            Update(**settings)


@functools.cache
def dropping_step():
    """A step of a model with dropout and jitter."""
    config = models.tiny(dropout=0.5, moe=models.experts(router_jitter=0.3))
    layout = models.stacked(config)
    tx = AdamW().build(axes_of(config, layout))
    run = functools.partial(
        train_step,
        loss_fn=model_loss(Transformer(config), layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2,
        update=Update(),
    )
    state = models.jit(lambda params: state_of(params, tx))(models.draw(config, layout))
    return config, layout, models.jit(run), state


class TestModel:
    def test_a_batch_of_padding_changes_nothing_that_does_not_decay(self):
        """Loss 0, gradient 0, no NaN."""
        _, _, run, state = dropping_step()
        empty = BATCH | {
            "segment_ids": np.zeros((8, 8), np.int32),
            "loss_weights": np.zeros((8, 8), np.float32),
        }
        new, metrics = run(state, empty)
        for name in ("loss", "total_loss", "grad_norm", "accuracy", "load_balance_loss"):
            assert float(metrics[name]) == 0.0, name
        assert not any(np.asarray(m).any() for m in jax.tree.leaves(new.opt_state.mu))
        for name, leaf in flatten_named(new):
            assert np.isfinite(leaf).all(), name
        models.assert_equal(new.params["final_norm"], state.params["final_norm"])

    def test_padding_is_no_real_token(self):
        """8 rows of 8 positions, of which 3 rows are padding and one has 5 tokens: 4 x 8 + 5."""
        _, _, run, state = dropping_step()
        segments = np.ones((8, 8), np.int32)
        segments[5:] = 0
        segments[4, 5:] = 0
        weights = (segments > 0) * np.float32(0.5)
        _, metrics = run(state, BATCH | {"segment_ids": segments, "loss_weights": weights})
        assert float(metrics["real_tokens"]) == 37
        load = np.asarray(metrics["expert_load"])
        np.testing.assert_allclose(load.sum(-1), 1.0, rtol=1e-6)
        # Every token makes P * K choices in each layer: loads are whole numbers of these.
        moe = dropping_step()[0].moe
        choices = 37 * moe.num_prototypes * moe.num_selected_experts
        np.testing.assert_allclose(load * choices, np.round(load * choices), atol=1e-3)

    def test_dropout_follows_step_and_seed(self):
        _, _, run, state = dropping_step()
        _, first = run(state, BATCH)
        _, again = run(state, BATCH)
        models.assert_equal(again, first)
        _, later = run(state.replace(step=jnp.int32(1)), BATCH)
        _, other = run(state.replace(rng=jax.random.key_data(jax.random.key(1))), BATCH)
        assert len({float(m["loss"]) for m in (first, later, other)}) == 3

    def test_evaluation_has_no_dropout_and_its_total_is_the_mean(self):
        config, layout, _, state = dropping_step()
        model = Transformer(config)
        evaluate = models.jit(functools.partial(evaluation_step, model=model, layout=layout))
        sums = evaluate(state.params, BATCH)
        logits = models.jit(lambda p: model.apply(p, BATCH, layout).logits)(state.params)
        scores = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(logits)), BATCH["targets"][..., None], -1
        )[..., 0]
        expected = -(scores * BATCH["loss_weights"]).sum() / BATCH["loss_weights"].sum()
        metrics = losses.summarize(sums)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
        assert float(sums.tokens.targets) == BATCH["loss_weights"].sum()

    def test_loss_falls(self):
        _, _, run, state = dropping_step()
        seen = []
        for _ in range(20):
            state, metrics = run(state, BATCH)
            seen.append(float(metrics["loss"]))
        assert np.mean(seen[-3:]) < 0.7 * np.mean(seen[:3])
