import io

import sentencepiece

from m6jax.data.vocab import SentencePiece
from m6jax.experiment.sampling import continued

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
