import numpy as np
import pytest

from m6jax.data.preprocessors import LanguageModelling, PrefixLM, SpanDenoising
from m6jax.foundation.validated import ConfigError

DOCUMENT = np.array([10, 11, 12, 13], np.uint16)
END = 1


def test_language_modelling_scores_every_token_once(ids_vocabulary):
    """Four tokens and the end, at most 3 a sequence: the second goes on from the token before."""
    objective = LanguageModelling()
    first = objective.example(DOCUMENT, 0, 3, 0, ids_vocabulary)
    second = objective.example(DOCUMENT, 3, 5, 0, ids_vocabulary)
    assert first.tokens.tolist() == [0, 10, 11]
    assert first.targets.tolist() == [10, 11, 12]
    assert second.tokens.tolist() == [12, 13]
    assert second.targets.tolist() == [13, END]
    assert first.prefix == second.prefix == 0
    assert first.tokens.dtype == first.targets.dtype == np.int32
    assert objective.num_units(np.array([4, 0])).tolist() == [5, 1]


def test_an_empty_document_is_its_end(ids_vocabulary):
    only = LanguageModelling().example(DOCUMENT[:0], 0, 1, 0, ids_vocabulary)
    assert (only.tokens.tolist(), only.targets.tolist()) == ([0], [END])


def test_prefix_is_uniform_and_leaves_a_target(ids_vocabulary):
    """Of 5 inputs the prefix has 1 to 5, each in 400 of 2,000, give or take 4 deviations."""
    examples = [PrefixLM().example(DOCUMENT, 0, 5, key, ids_vocabulary) for key in range(2000)]
    counts = np.bincount([e.prefix for e in examples], minlength=6)
    assert counts[0] == 0
    assert abs(counts[1:] - 400).max() < 72
    assert all(e.tokens.tolist() == [0, 10, 11, 12, 13] for e in examples[:9])
    again = PrefixLM().example(DOCUMENT, 0, 5, 7, ids_vocabulary)
    assert again.prefix == examples[7].prefix


def restored(example, num_units, vocabulary):
    """Puts the spans of a denoising example back in place of their sentinels."""
    targets = example.targets.tolist()
    corrupted, wanted = targets[: example.prefix - 1], targets[example.prefix - 1 :]
    assert wanted.pop() == vocabulary.eos_id
    spans, sentinel = {}, None
    for token in wanted:
        if token >= vocabulary.base_size:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    assert list(spans) == [vocabulary.sentinel(i) for i in range(len(spans))]
    assert all(spans.values())
    return [t for token in corrupted for t in spans.get(token, [token])], spans


@pytest.mark.parametrize("num_units", [2, 3, 10, 20, 30])
def test_denoising_loses_nothing(ids_vocabulary, num_units):
    objective = SpanDenoising()
    document = np.arange(10, 50)
    seen = set()
    for key in range(20):
        example = objective.example(document, 5, 5 + num_units, key, ids_vocabulary)
        back, spans = restored(example, num_units, ids_vocabulary)
        assert back == document[5 : 5 + num_units].tolist()
        assert len(spans) == objective.num_sentinels(num_units)
        assert example.tokens.tolist() == [0, *example.targets[:-1].tolist()]
        assert len(example.tokens) == objective.sequence_length(np.array(num_units))
        seen.add(tuple(back.index(t) for span in spans.values() for t in span))
    assert len(seen) > 1


def test_denoising_by_hand(ids_vocabulary):
    """Four tokens: round(4 x 0.15) = 1 is cut out, any of them as often as another."""
    x = ids_vocabulary.sentinel(0)
    cut = []
    for key in range(400):
        example = SpanDenoising().example(DOCUMENT, 0, 4, key, ids_vocabulary)
        cut.append(int(example.targets[5]))
        kept = [x if t == cut[-1] else t for t in DOCUMENT.tolist()]
        assert example.targets.tolist() == [*kept, x, cut[-1], END]
        assert example.tokens.tolist() == [0, *kept, x, cut[-1]]
        assert example.prefix == 5
    assert abs(np.bincount(cut)[10:] - 100).max() < 36


def test_denoising_counts():
    """100 tokens: 15 noise in 5 spans, 100 + 2 x 5 + 1 = 111; a dense setting keeps one."""
    objective = SpanDenoising()
    assert objective.sequence_length(np.array([1, 2, 100])).tolist() == [0, 5, 111]
    assert objective.units_at_most(111) == 100
    assert objective.units_at_most(5) == 2
    assert objective.units_at_most(4) == 0
    dense = SpanDenoising(noise_density=0.9, mean_span_length=1.0)
    assert dense.num_sentinels(10) == 1  # 9 are cut out, 1 is kept, between them one border
    assert objective.num_units(np.array([4])).tolist() == [4]


@pytest.mark.parametrize(
    "options", [{"noise_density": 0.0}, {"noise_density": 1.0}, {"mean_span_length": 0.5}]
)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=f"SpanDenoising: .*{next(iter(options))}"):
        SpanDenoising(**options)
