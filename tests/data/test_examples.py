import numpy as np
import pytest

from m6jax.data.corpus import Corpus
from m6jax.data.examples import Examples
from m6jax.data.preprocessors import LanguageModelling, SpanDenoising


@pytest.fixture
def corpus():
    """Documents of 5, 2 and 3 tokens: 6, 3 and 4 with their ends."""
    tokens = np.array([10, 11, 12, 13, 14, 20, 21, 30, 31, 32], np.uint16)
    return Corpus(name="x", tokens=tokens, offsets=np.array([0, 5, 7, 10]), num_bytes=None)


def test_numbering(corpus, ids_vocabulary):
    examples = Examples(corpus, LanguageModelling(), 4, ids_vocabulary)
    assert (examples.name, examples.count, examples.num_units) == ("x", 4, 13)
    lengths, units = examples.sizes(np.arange(4))
    assert lengths.tolist() == units.tolist() == [4, 2, 3, 4]
    targets = [examples.example(i, 0).targets.tolist() for i in range(4)]
    assert targets == [[10, 11, 12, 13], [14, 1], [20, 21, 1], [30, 31, 32, 1]]
    assert examples.example(1, 0).tokens.tolist() == [13, 14]


def test_what_cannot_be_used_has_no_length(corpus, ids_vocabulary):
    """Denoising 4 tokens takes 7; the fifth token of the first document is alone."""
    examples = Examples(corpus, SpanDenoising(), 7, ids_vocabulary)
    lengths, units = examples.sizes(np.arange(examples.count))
    assert units.tolist() == [4, 1, 2, 3]
    assert lengths.tolist() == [7, 0, 5, 6]
    assert examples.usable


def test_nothing_usable(ids_vocabulary):
    single = Corpus(name="x", tokens=np.array([5, 6]), offsets=np.array([0, 1, 2]), num_bytes=None)
    assert not Examples(single, SpanDenoising(), 7, ids_vocabulary).usable
    assert Examples(single, LanguageModelling(), 7, ids_vocabulary).usable
