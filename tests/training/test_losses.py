"""The loss in chunks and in parts against plain formulas over the whole batch."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.modeling.block import StackOutput
from m6jax.modeling.routing import RouterStatistics
from m6jax.modeling.transformer import Transformer
from m6jax.training import losses
from m6jax.training.losses import BatchWeight, Loss, LossSums, TokenSums, loss_sums, score_targets

# B rows, T length, M width (embed), V vocabulary, L sparse layers, E experts.
B, T, M, V, L, E = 2, 10, 4, 6, 3, 4
PLAIN = Loss()
SETTINGS = {
    "plain": PLAIN,
    "smoothed": Loss(label_smoothing=0.1),
    "z": Loss(z_loss=0.01),
    "both": Loss(label_smoothing=0.3, z_loss=0.02),
}
rng = np.random.default_rng(0)
X = rng.normal(size=(B, T, M)).astype(np.float32)
HEAD = rng.normal(size=(M, V)).astype(np.float32)
BATCH = {
    "targets": rng.integers(0, V, (B, T)).astype(np.int32),
    # Row 1 ends with padding; a token of weight 0.5 counts half.
    "loss_weights": np.array([[1, 0.5] * 5, [1, 1, 1, 2, 0, 0, 0, 0, 0, 0]], np.float32),
    "segment_ids": np.array([[1] * 10, [1] * 4 + [0] * 6], np.int32),
}


def product(head, x):
    return x @ head


def plain_loss(logits, batch, loss):
    """Straight from the definitions, over all tokens at once."""
    scores = jax.nn.log_softmax(logits)
    one_hot = jax.nn.one_hot(batch["targets"], logits.shape[-1])
    goal = (1 - loss.label_smoothing) * one_hot + loss.label_smoothing / logits.shape[-1]
    tokens = -(goal * scores).sum(-1) + loss.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return (batch["loss_weights"] * tokens).sum() / batch["loss_weights"].sum()


@functools.cache
def chunked(loss):
    """Jits (head, x, batch) -> ((total, sums), gradients of head and x)."""

    def total(head, x, batch):
        weight = losses.batch_weight(batch)
        sums = loss_sums(product, head, StackOutput(x, None), batch, weight, loss, None)
        return sums.total, sums

    return models.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


def router_statistics(tokens, **changes):
    """L layers; layer i has a balance loss of i + 1."""
    values = {
        "load_balance_loss": jnp.arange(1.0, L + 1),
        "router_z_loss": jnp.array([0.5, 1.0, 3.0]),
        "entropy": jnp.array([1.0, 1.0, 4.0]),
        "confidence": jnp.array([0.3, 0.6, 0.9]),
        "chosen": jnp.tile(jnp.array([4.0, 2.0, 2.0, 0.0]), (L, 1)),
        "served": jnp.array([[4.0, 2, 2, 0], [2, 2, 2, 0], [2, 2, 0, 0]]),
        "tokens": jnp.full((L,), float(tokens)),
    }
    return RouterStatistics(**(values | changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, r"Loss.label_smoothing: 1.0 is not in \[0, 1\)"),
        ({"label_smoothing": -0.1}, "Loss.label_smoothing: -0.1"),
        ({"z_loss": -1.0}, "Loss.z_loss: -1.0 is negative"),
        ({"chunk_length": 0}, "Loss.chunk_length: 0; at least 1"),
    ],
)
def test_refuses_what_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Loss(**settings)


def test_score_targets_and_their_gradient():
    logits, targets = product(HEAD, X), BATCH["targets"]
    one, two = np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

    def plainly(logits):
        target = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1), target

    def both(fn):
        return models.jit(lambda x: (fn(x), jax.vjp(fn, x)[1]((one, two))))(logits)

    models.assert_close(both(lambda x: score_targets(x, targets)), both(plainly))


class TestChunks:
    @pytest.mark.parametrize("loss", SETTINGS.values(), ids=SETTINGS)
    def test_equal_the_plain_loss(self, loss):
        """T = 10 in chunks of at most 4, so two positions of the last are filling."""
        loss = Loss(label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, chunk_length=4)
        (total, _), grads = chunked(loss)(HEAD, X, BATCH)
        plain = models.jit(
            jax.value_and_grad(lambda h, x: plain_loss(product(h, x), BATCH, loss), (0, 1))
        )
        models.assert_close((total, grads), plain(HEAD, X))

    @pytest.mark.parametrize("chunk_length", [1, 5, 64])
    def test_their_length_does_not_matter(self, chunk_length):
        expected = chunked(PLAIN)(HEAD, X, BATCH)
        models.assert_close(chunked(Loss(chunk_length=chunk_length))(HEAD, X, BATCH), expected)

    def test_all_logits_never_exist_at_once(self):
        head = np.ones((M, 77), np.float32)
        program = str(chunked(Loss(chunk_length=5)).trace(head, X, BATCH).jaxpr)
        assert f"f32[{B},5,77]" in program
        assert f"{B},{T},77]" not in program

    def test_values_without_gradients_are_the_same(self):
        (total, sums), _ = chunked(PLAIN)(HEAD, X, BATCH)
        alone = models.jit(
            lambda: loss_sums(
                product,
                HEAD,
                StackOutput(X, None),
                BATCH,
                losses.batch_weight(BATCH),
                PLAIN,
                None,
            )
        )()
        models.assert_close(alone, sums)
        models.assert_close(alone.total, total)

    def test_a_bfloat16_head_sums_its_gradient_in_float32(self):
        """512 chunks of one: a sum in bfloat16 would stop at 256."""
        x = np.ones((1, 512, 1), jnp.bfloat16)
        batch = {
            "targets": np.zeros((1, 512), np.int32),
            "loss_weights": np.ones((1, 512), np.float32),
            "segment_ids": np.ones((1, 512), np.int32),
        }

        def total(head):
            sums = loss_sums(
                lambda head, x: (x @ head).astype(jnp.float32),
                head,
                StackOutput(x, None),
                batch,
                BatchWeight(jnp.float32(1), jnp.float32(1)),
                Loss(chunk_length=1),
                None,
            )
            return sums.total

        grad = models.jit(jax.grad(total))(jnp.zeros((1, 2), jnp.bfloat16))
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(grad, [[-256, 256]])

    def test_a_models_loss_is_that_of_its_logits(self):
        """`apply_layers` and chunks against the logits of `apply`, gradients too."""
        config = models.tiny(num_layers=1)
        layout, model = models.stacked(config), Transformer(config)
        loss = Loss(label_smoothing=0.1, z_loss=0.01, chunk_length=3)
        batch, params = models.make_batch(rows=2), models.draw(config, layout)

        def ours(params):
            output = model.apply_layers(params, batch, layout)
            weight = losses.batch_weight(batch)
            head = model.head_params(params)
            return loss_sums(model.logits, head, output, batch, weight, loss, config.moe).total

        def plainly(params):
            output = model.apply(params, batch, layout)
            router = losses.router_loss(output.router, config.moe)
            return plain_loss(output.logits, batch, loss) + router

        got, expected = (models.jit(jax.value_and_grad(fn))(params) for fn in (ours, plainly))
        models.assert_close(got, expected, 2e-6)


class TestSums:
    def test_by_hand(self):
        # Two tokens over V = 2: logits (0, 0) and (0, log 3), targets 0 and 1, weights 1 and 2.
        head = np.eye(2, dtype=np.float32)
        x = np.array([[[0, 0], [0, np.log(3)]]], np.float32)
        batch = {
            "targets": np.array([[0, 1]]),
            "loss_weights": np.array([[1, 2]], np.float32),
            "segment_ids": np.array([[1, 1]]),
        }
        (total, sums), _ = chunked(Loss(chunk_length=1))(head, x, batch)
        log2, log4 = np.log(2), np.log(4)
        cross_entropy = log2 + 2 * (log4 - np.log(3))
        assert float(sums.tokens.cross_entropy) == pytest.approx(cross_entropy, rel=1e-6)
        assert float(sums.tokens.z) == pytest.approx(log2**2 + 2 * log4**2, rel=1e-6)
        assert float(sums.tokens.correct) == 3.0
        assert float(sums.tokens.targets) == 3.0
        assert float(total) == pytest.approx(cross_entropy / 3, rel=1e-6)
        metrics = losses.summarize(sums)
        assert float(metrics["loss"]) == pytest.approx(cross_entropy / 3, rel=1e-6)
        assert float(metrics["z_loss"]) == pytest.approx((log2**2 + 2 * log4**2) / 3, rel=1e-6)
        assert float(metrics["accuracy"]) == 1.0

    def test_loss_is_the_cross_entropy_alone(self):
        (total, sums), _ = chunked(SETTINGS["both"])(HEAD, X, BATCH)
        metrics = losses.summarize(sums)
        logits = product(HEAD, X)
        assert float(metrics["loss"]) == pytest.approx(
            float(plain_loss(logits, BATCH, PLAIN)), rel=1e-5
        )
        assert float(metrics["total_loss"]) == float(total)
        right = BATCH["loss_weights"] * (logits.argmax(-1) == BATCH["targets"])
        expected = right.sum() / BATCH["loss_weights"].sum()
        assert float(metrics["accuracy"]) == pytest.approx(expected, rel=1e-6)

    def test_of_equal_logits_the_first_is_predicted(self):
        """B27: where all logits are equal, accuracy is that of predicting id 0."""
        targets = jnp.arange(8)[None]
        logits = lambda head, x: jnp.zeros((*x.shape[:2], 320))  # noqa: E731
        _, sums = losses.token_sums(
            logits, Loss(), None, jnp.zeros((1, 8, 1)), targets, jnp.ones((1, 8))
        )
        assert float(sums.correct) == 1.0

    def test_only_padding_gives_zeros(self):
        """An all-padding batch: loss 0, gradient 0, no NaN."""
        empty = BATCH | {
            "loss_weights": np.zeros((B, T), np.float32),
            "segment_ids": np.zeros((B, T), np.int32),
        }
        (total, sums), grads = chunked(SETTINGS["both"])(HEAD, X, empty)
        assert float(total) == 0.0
        assert not any(np.asarray(g).any() for g in grads)
        metrics = losses.summarize(sums)
        assert {name: float(value) for name, value in metrics.items()} == dict.fromkeys(
            ("loss", "total_loss", "z_loss", "accuracy"), 0.0
        )

    def test_parts_add_up_to_the_batch(self):
        """B1: sums divided by the weight of the whole batch."""
        (total, sums), grads = chunked(SETTINGS["both"])(HEAD, X, BATCH)
        weight = losses.batch_weight(BATCH)

        def part(row):
            batch = {name: value[row : row + 1] for name, value in BATCH.items()}

            def total(head):
                output = StackOutput(X[row : row + 1], None)
                sums = loss_sums(product, head, output, batch, weight, SETTINGS["both"], None)
                return sums.total, sums

            return models.jit(jax.value_and_grad(total, has_aux=True))(HEAD)

        ((_, first), first_grad), ((_, second), second_grad) = part(0), part(1)
        added = losses.add(first, second)
        models.assert_close(added, sums)
        models.assert_close(added.total, total)
        models.assert_close(first_grad + second_grad, grads[0])

    def test_batch_weight_counts_weights_and_routed_tokens(self):
        weight = losses.batch_weight(BATCH)
        assert (float(weight.targets), float(weight.routed)) == (12.5, 14.0)


@models.jit
def sums_with_router(router, weight):
    moe = models.experts(load_balance_loss=0.1, router_z_loss=0.01)
    return loss_sums(product, HEAD, StackOutput(X, router), BATCH, weight, PLAIN, moe)


class TestRouter:
    def test_losses_are_weighted_means_over_sparse_layers(self):
        """B4: the mean over MoE layers: (1 + 2 + 3) / 3, and (0.5 + 1 + 3) / 3."""
        moe = models.experts(load_balance_loss=0.1, router_z_loss=0.01)
        loss = losses.router_loss(router_statistics(14), moe)
        assert float(loss) == pytest.approx(0.1 * 2 + 0.01 * 1.5, rel=1e-6)

    def test_are_added_by_share_of_routed_tokens(self):
        """B2: a part with 14 of 56 routed tokens brings a quarter of its router losses."""
        weight = losses.batch_weight(BATCH)
        whole = sums_with_router(router_statistics(14), weight)
        plain = float(whole.tokens.cross_entropy / whole.tokens.targets)
        assert float(whole.total) == pytest.approx(plain + 0.215, rel=1e-6)
        part = sums_with_router(router_statistics(14), weight.replace(routed=jnp.float32(56)))
        assert float(part.total) == pytest.approx(plain + 0.215 / 4, rel=1e-6)

    def test_statistics_of_parts_are_weighed_by_their_tokens(self):
        """B2: parts of 10 and 30 tokens with balance losses 1 and 2 (in every layer): 1.75."""
        weight = losses.batch_weight(BATCH).replace(routed=jnp.float32(40))
        parts = (
            sums_with_router(router_statistics(n, load_balance_loss=jnp.full((L,), loss)), weight)
            for n, loss in ((10, 1.0), (30, 2.0))
        )
        metrics = losses.summarize(losses.add(*parts))
        assert float(metrics["load_balance_loss"]) == pytest.approx(1.75, rel=1e-6)
        assert float(metrics["router_z_loss"]) == pytest.approx(1.5, rel=1e-6)
        assert float(metrics["router_entropy"]) == pytest.approx(2.0, rel=1e-6)
        assert float(metrics["router_confidence"]) == pytest.approx(0.6, rel=1e-6)
        # Layers dropped 0, 2 and 4 of 8.
        assert float(metrics["fraction_dropped"]) == pytest.approx(0.25, rel=1e-6)
        np.testing.assert_allclose(metrics["expert_load"], np.tile([0.5, 0.25, 0.25, 0], (L, 1)))

    def test_without_routed_tokens_there_is_no_nan(self):
        zeros = jax.tree.map(jnp.zeros_like, router_statistics(0))
        metrics = losses.summarize(sums_with_router(zeros, losses.batch_weight(BATCH)))
        for name in ("load_balance_loss", "router_z_loss", "router_entropy", "fraction_dropped"):
            assert float(metrics[name]) == 0.0, name
        assert not np.asarray(metrics["expert_load"]).any()

    def test_a_dense_model_has_no_router_metrics(self):
        tokens = TokenSums(*(jnp.float32(1),) * 4)
        metrics = losses.summarize(LossSums(tokens, jnp.float32(1), None))
        assert set(metrics) == {"loss", "total_loss", "z_loss", "accuracy"}
