import gzip
import math

import jax.numpy as jnp
import pytest

from m6jax.data.config import DataError
from m6jax.run.evaluation import evaluate, gzip_bits_per_byte
from m6jax.training.losses import LossSums, TokenSums


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


def test_without_text_there_are_no_bits_per_byte():
    assert "bits_per_byte" not in evaluate(step, None, [(1, 1.0)], num_bytes=None)


@pytest.mark.parametrize("batches", [[], [(0, 0.0)]])
def test_no_token_is_no_data(batches):
    with pytest.raises(DataError, match="no data"):
        evaluate(step, None, batches, num_bytes=1)


def test_gzip_is_the_command_at_its_best():
    text = b"to be or not to be " * 50
    assert gzip_bits_per_byte(text) == 8 * len(gzip.compress(text, 9)) / len(text)
