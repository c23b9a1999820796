import io

import pytest
import sentencepiece

from m6jax.data.vocab import SentencePiece
from m6jax.decoding import Beam, Greedy
from m6jax.experiment import Sample
from m6jax.experiment.sampling import _certain, _stop_at, batches, continued
from m6jax.foundation.validated import ConfigError

TEXT = "the ship sailed at noon and the captain said nothing"


def vocabulary_of(directory, size=60, **options):
    """A user's own model, with the library's defaults where `options` do not say otherwise."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 9),
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path = directory / "own.model"
    path.write_bytes(model.getvalue())
    return SentencePiece(path=str(path)).load((), ())


def test_words_are_not_glued(tmp_path):
    """With the library's defaults a word's first piece alone decodes without its space."""
    vocabulary = vocabulary_of(tmp_path)
    prompt, new = vocabulary.encode("the ship"), vocabulary.encode("sailed at noon")
    assert vocabulary.decode(new) == "sailed at noon"
    assert continued(vocabulary, "the ship", prompt, new) == "the ship sailed at noon"


def test_a_prompt_stays_as_it_was_given(tmp_path):
    """The model itself would show one space and a character that it does not know."""
    vocabulary = vocabulary_of(tmp_path)
    given = "  the   ship"
    assert continued(vocabulary, given, vocabulary.encode(given), []) == given


def test_a_character_that_the_prompt_begins_is_whole(tmp_path):
    """Half of it decodes as a sign of its own, so the prompt is shown as it decodes."""
    vocabulary = vocabulary_of(tmp_path, size=320, byte_fallback=True)
    ids = vocabulary.encode("the 爱")
    whole = vocabulary.decode(ids)
    assert whole == "the 爱"
    assert continued(vocabulary, "the ?", ids[:-1], ids[-1:]) == whole


def test_rows_of_similar_lengths_are_together():
    assert list(batches([5, 90, 7, 80, 6], 2)) == [[0, 4], [2, 3], [1]]
    assert list(batches([5, 90, 7], 1)) == [[0], [1], [2]]


def test_stop_strings_begin_after_the_prompt():
    assert _stop_at("a. b c. d", 2, (".", "d")) == 6
    assert _stop_at("a. b", 2, (".",)) is None


def test_what_may_still_become_a_stop_string_is_not_shown():
    assert _certain("one two\n", 0, ("\n\n",)) == "one two"
    assert _certain("one two\n\nthree", 0, ("\n\n",)) == "one two"
    assert _certain("one tw", 0, ("\n\n", "two!")) == "one "
    assert _certain("half \ufffd", 0, ()) == "half "


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": ("",)}, "every text has the empty string"),
        ({"num_samples": 2, "method": Greedy()}, "Greedy finds one text of a prompt, not 2"),
        ({"stop": (".",), "method": Beam(num_beams=2)}, "Beam change until the end"),
        ({"batch_size": 0}, "Sample.batch_size: 0"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        Sample(**settings)
