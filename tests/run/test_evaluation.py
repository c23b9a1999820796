import gzip
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from m6jax.data.config import DataError
from m6jax.experiment.summary import describe_evaluation
from m6jax.run.evaluation import evaluate, evaluate_sets, gzip_bits_per_byte, perplexity
from m6jax.training.losses import Loss, LossSums, TokenSums, token_sums


def step(params, batch):
    """Sums of a batch that is given as (tokens, mean loss)."""
    del params
    tokens, loss = batch
    number = jnp.float32(tokens)
    return LossSums(
        tokens=TokenSums(number * loss, jnp.zeros(()), jnp.zeros(()), number),
        total=jnp.float32(loss),
        router=None,
    )


def test_evaluation_weighs_tokens():
    """B8: 2 tokens with mean loss 4 and 6 tokens with mean loss 2 have loss 2.5."""
    metrics = evaluate(step, None, [(2, 4.0), (6, 2.0)], num_bytes=8)
    assert float(metrics["loss"]) == 2.5
    assert metrics["perplexity"] == pytest.approx(math.exp(2.5))
    assert metrics["tokens"] == 8
    assert metrics["bits_per_byte"] == pytest.approx(8 * 2.5 / math.log(2) / 8)
    assert "total_loss" not in metrics


def test_sums_of_millions_of_tokens_are_exact():
    """B30: in float32 the loss of 41 million tokens is 0.1 % off, and their number inexact."""
    metrics = evaluate(step, None, [(8193, 3.1)] * 5001, num_bytes=None)
    assert metrics["tokens"] == 8193 * 5001
    batch = float(np.float32(8193) * np.float32(3.1)) / 8193
    assert metrics["loss"] == pytest.approx(batch, rel=1e-12)


def test_perplexity_is_of_the_cross_entropy_alone():
    """All logits 3 over 8 ids: perplexity 8, whatever smoothing and z-loss are minimised."""

    def smoothed(params, batch):
        loss = Loss(label_smoothing=0.3, z_loss=0.1)
        logits = lambda head, x: jnp.full((*x.shape[:2], 8), 3.0)  # noqa: E731
        zeros = jnp.zeros((1, batch), jnp.int32)
        total, sums = token_sums(
            logits, loss, None, jnp.zeros((1, batch, 1)), zeros, jnp.ones((1, batch))
        )
        assert float(total) > 2 * float(sums.cross_entropy)  # what is minimised is another number
        return LossSums(tokens=sums, total=total, router=None)

    metrics = evaluate(smoothed, None, [3, 5], num_bytes=None)
    assert metrics["perplexity"] == pytest.approx(8, rel=1e-6)
    assert metrics["loss"] == pytest.approx(math.log(8), rel=1e-6)


def test_a_perplexity_that_no_number_holds_is_infinite():
    assert perplexity(800.0) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_several_sets_have_a_mean_and_a_loss_of_all_tokens():
    class Data:
        def eval_names(self):
            return "large", "small"

        def eval_batches(self, name, *_):
            return iter([(6, 2.0)] if name == "large" else [(2, 4.0)])

        def predicted_bytes(self, name):
            return 8

    program = types.SimpleNamespace(evaluate=step, eval_rows=1)
    results = dict(evaluate_sets(types.SimpleNamespace(data=Data()), program, None))
    assert list(results) == ["large", "small", "all"]
    together = results["all"]
    assert (together["loss"], together["mean_loss"], together["tokens"]) == (2.5, 3.0, 8)
    assert "bits_per_byte" not in together
    assert "2.5000" in describe_evaluation("all", together)
    assert "mean of the sets' losses 3.0000" in describe_evaluation("all", together)


def test_without_text_there_are_no_bits_per_byte():
    assert "bits_per_byte" not in evaluate(step, None, [(1, 1.0)], num_bytes=None)


@pytest.mark.parametrize("batches", [[], [(0, 0.0)]])
def test_no_token_is_no_data(batches):
    with pytest.raises(DataError, match="no data"):
        evaluate(step, None, batches, num_bytes=1)


def test_gzip_is_the_command_at_its_best():
    text = b"to be or not to be " * 50
    assert gzip_bits_per_byte(text) == 8 * len(gzip.compress(text, 9)) / len(text)
