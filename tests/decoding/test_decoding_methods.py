"""Methods of decoding on chains of tokens, against numbers by hand and enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m6jax.decoding import Beam, DecodingState, Greedy, Sampling, Task, methods
from m6jax.foundation.validated import ConfigError

# B rows, V vocabulary, N new tokens, K beams.

NEVER = -1  # an end that no token is
PAD = 0


def draws(probabilities, **settings):
    """Returns how often each token is drawn, of 4000 draws."""
    logits = jnp.tile(jnp.log(jnp.array(probabilities)), (4000, 1))
    tokens = Sampling(**settings).choose(logits, jax.random.split(jax.random.key(0), 4000))
    return np.bincount(tokens, minlength=len(probabilities)) / 4000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.2, 0.4, 0.1, 0.3]),
        ({"temperature": 0.5}, [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.2, 0.4, 0.1, 0.3]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"top_p": 1e-6}, [0, 1, 0, 0]),
        # Of the two that top_k leaves the first has 4 / 7, more than 0.55.
        ({"top_k": 2, "top_p": 0.55}, [0, 1, 0, 0]),
    ],
)
def test_frequencies_of_sampling(settings, expected):
    frequencies = draws([0.2, 0.4, 0.1, 0.3], **settings)
    np.testing.assert_allclose(frequencies, expected, atol=0.03)
    np.testing.assert_array_equal(frequencies == 0, np.array(expected) == 0)


def test_draws_of_rows_and_steps_are_independent():
    texts, scores, _ = follow(Sampling(), np.full((2, 4, 4), np.log(0.25)), 200)
    counts = [[np.bincount(t, minlength=4) for t in texts], np.bincount(np.equal(*texts))]
    np.testing.assert_allclose(counts[0], np.full((2, 4), 50), atol=25)  # four times the deviation
    np.testing.assert_allclose(counts[1], [150, 50], atol=25)
    for text in texts:
        repeats = np.equal(text[1:], text[:-1]).sum()
        assert 25 < repeats < 75
    np.testing.assert_allclose(scores, [200 * np.log(0.25)] * 2, rtol=1e-5)


def test_equal_logits_do_not_exceed_top_k():
    np.testing.assert_array_equal(draws([0.25] * 4, top_k=1), [1, 0, 0, 0])


def follow(method, tables, num_tokens, eos_id=NEVER):
    """Runs a method on chains in which a token depends on the two before it; they begin with 0 0.

    The "cache" of a row is the token before the last, so that it has to follow its beam.

    Args:
      method: as for `generate`.
      tables: log-probabilities [B, V, V, V], or [B, V, V] if only the last token counts.
      num_tokens: N.
      eos_id: token that ends a text.

    Returns:
      The texts, the sums of their log-probabilities, and the number of steps.
    """
    B, V, steps = len(tables), len(tables[0]), []
    if np.ndim(tables) == 3:
        tables = np.broadcast_to(np.asarray(tables)[:, None], (B, V, V, V))

    @jax.jit
    def search(tables):
        def step(state, tokens, active):
            jax.debug.callback(lambda: steps.append(1))
            row, before = jnp.arange(len(tokens)) // (len(tokens) // B), state.caches[0]
            return DecodingState(tokens[None], state.lengths + active, tables[row, before, tokens])

        zeros = jnp.zeros(B, jnp.int32)
        start = DecodingState(zeros[None], zeros, tables[:, 0, 0])
        keys = jax.random.split(jax.random.key(0), B)
        seen = jnp.zeros((B, V), bool).at[:, 0].set(True)
        return methods.search(method, start, Task(step, num_tokens, eos_id, PAD, keys, seen))

    found = jax.device_get(search(jnp.asarray(tables, jnp.float32)))
    jax.effects_barrier()
    rows = zip(found.tokens, found.length, strict=True)
    return [row[:n].tolist() for row, n in rows], found.log_probability, len(steps)


def all_texts(vocab_size, num_tokens, eos_id):
    """Returns every text that ends, or has `num_tokens` tokens."""
    texts = set()
    for text in itertools.product(range(vocab_size), repeat=num_tokens):
        texts.add(text[: text.index(eos_id) + 1] if eos_id in text else text)
    return sorted(texts)


def test_the_loop_stops_when_all_rows_have_ended():
    counting = np.log(np.eye(4)[[1, 2, 3, 0]] * 0.96 + 0.01)  # 0 -> 1 -> 2 -> 3, the end
    waiting = np.log(np.eye(4)[[3, 3, 3, 3]] * 0.96 + 0.01)
    for method in (Greedy(), Beam(num_beams=1)):
        texts, scores, steps = follow(method, [counting, waiting], 50, eos_id=3)
        assert (texts, steps) == ([[1, 2, 3], [3]], 2)
        np.testing.assert_allclose(scores, [3 * np.log(0.97), np.log(0.97)], rtol=1e-5)


def test_repetition_penalty_by_hand():
    # Log-probabilities are negative: a token that was there counts three times as much. The prompt
    # has 0; then 1 (0.4), 2 (0.25: -1.39 against -0.92 * 3), 3 (0.15), and 1 again (0.4 ** 3).
    table = np.log([[0.2, 0.4, 0.25, 0.15]] * 4)
    texts, scores, _ = follow(Greedy(repetition_penalty=3.0), [table], 4)
    assert texts == [[1, 2, 3, 1]]
    np.testing.assert_allclose(scores, np.log([0.4 * 0.25 * 0.15 * 0.4]), rtol=1e-5)
    sampled, _, _ = follow(Sampling(top_k=1, repetition_penalty=3.0), [table], 4)
    assert sampled == texts
    with pytest.raises(ConfigError, match=r"Greedy.repetition_penalty: 0.0 is not greater"):
        Greedy(repetition_penalty=0)


def test_beam_by_hand():
    # 3 is the end, 0 only the start. Greedy takes 1 (0.6) and 3 (0.4), 0.24 together; the best text
    # is 2 (0.4) and 3 (0.9), 0.36.
    table = np.log([[1e-9, 0.6, 0.4, 1e-9], [0.2, 0.2, 0.2, 0.4], [0.03, 0.03, 0.04, 0.9], [1] * 4])
    for method, text, score in [(Greedy(), [1, 3], 0.24), (Beam(num_beams=2), [2, 3], 0.36)]:
        texts, scores, steps = follow(method, [table], 2, eos_id=3)
        assert (texts, steps) == ([text], 1)
        np.testing.assert_allclose(scores, np.log([score]), rtol=1e-5)


def test_length_penalty_by_hand():
    # 2 is the end. `2` has 0.51, `1 2` 0.49 * 0.95 = 0.4655: with a penalty of 1 that is -0.673 / 1
    # against -0.765 / (7 / 6) = -0.655. The score stays the log-probability.
    table = np.log([[1e-9, 0.49, 0.51], [0.025, 0.025, 0.95], [1, 1, 1]])
    # Without a penalty nothing can overtake `2` once it has ended: no step is needed.
    for penalty, text, score, steps in [(0, [2], 0.51, 0), (1, [1, 2], 0.4655, 1)]:
        method = Beam(num_beams=2, length_penalty=penalty)
        texts, scores, taken = follow(method, [table], 9, eos_id=2)
        assert (texts, taken) == ([text], steps)
        np.testing.assert_allclose(scores, np.log([score]), rtol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_beam_finds_the_best_text_of_all(penalty):
    V, N, eos_id = 3, 4, 1
    logits = np.random.default_rng(0).normal(scale=0.7, size=(20, V, V, V))
    tables = np.asarray(jax.nn.log_softmax(logits))
    texts = all_texts(V, N, eos_id)
    assert len(texts) == 31  # 1 + 2 + 4 + 8 ended, 16 of full length
    method = Beam(num_beams=31, length_penalty=penalty)
    found, scores, _ = follow(method, tables, N, eos_id)
    for table, text, score in zip(tables, found, scores, strict=True):
        sums = {t: sum(table[i] for i in zip((0, 0, *t), (0, *t), t, strict=False)) for t in texts}
        best = max(texts, key=lambda t: sums[t] / ((5 + len(t)) / 6) ** penalty)
        assert tuple(text) == best
        np.testing.assert_allclose(score, sums[best], rtol=1e-5)
    greedy, _, _ = follow(Greedy(), tables, N, eos_id)
    assert sum(a != b for a, b in zip(greedy, found, strict=True)) > 3


@pytest.mark.parametrize(
    ("make_settings", "message"),
    [
        (lambda: Sampling(temperature=0.0), "Sampling.temperature: 0.0 is not greater than 0"),
        (lambda: Sampling(top_k=0), "Sampling.top_k: 0 is not greater than 0"),
        (lambda: Sampling(top_p=0.0), "Sampling.top_p: 0.0 is not greater than 0"),
        (lambda: Sampling(top_p=1.5), r"Sampling.top_p: 1.5 is not in \(0, 1\]"),
        (lambda: Beam(num_beams=0), "Beam.num_beams: 0 is not greater than 0"),
        (lambda: Beam(num_beams=2, length_penalty=-1), "Beam.length_penalty: -1.0 is less than 0"),
    ],
)
def test_settings_out_of_range(make_settings, message):
    with pytest.raises(ConfigError, match=message):
        make_settings()
