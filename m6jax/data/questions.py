"""What a model can be asked of pictures: prompts with their right answers.

Axis letters: I patches of a picture, F features of a patch.
"""

from typing import NamedTuple

import numpy as np

from m6jax.data.config import TextData
from m6jax.data.corpus import Corpus, open_corpus
from m6jax.data.picture_records import Pairs, label
from m6jax.data.picture_sources import PicturesWithTexts
from m6jax.data.preprocessors import Answering
from m6jax.data.vocab import Vocabulary


class Question(NamedTuple):
    """A picture, what is asked of it, and what is right.

    Attributes:
      patches: uint8 [I, F].
      tokens: of the prompt.
      prompt: as text.
      answers: any of them is right.
      label: what metrics call questions of this kind, such as a language.
    """

    patches: np.ndarray
    tokens: list[int]
    prompt: str
    answers: tuple[str, ...]
    label: str


def sources_with_questions(data: TextData) -> list[PicturesWithTexts]:
    """Returns the sources whose objective is to answer."""
    return [
        source
        for source in data.sources
        if isinstance(source, PicturesWithTexts) and isinstance(source.objective, Answering)
    ]


def questions(data: TextData, source: PicturesWithTexts, split: str) -> list[Question]:
    """Returns all questions of 'train' or 'validation' of a source, in its order.

    Raises:
      DataError: there is no document.
    """
    vocabulary = data.vocab()
    corpus = open_corpus(source, source.scan(), split, vocabulary, data.pictures)
    return questions_of(corpus, source.pairs, vocabulary)


def questions_of(corpus: Corpus, pairs: Pairs, vocabulary: Vocabulary) -> list[Question]:
    """Returns the questions of a corpus: documents of one picture and prompt are one question."""
    assert corpus.album is not None
    found: dict[tuple[int, int, tuple[int, ...]], list[str]] = {}
    for i, (number, kind) in enumerate(
        zip(corpus.album.numbers.tolist(), corpus.album.kinds.tolist(), strict=True)
    ):
        tokens, prompt = corpus.document(i).tolist(), corpus.prompt(i)
        before, whole = vocabulary.decode(tokens[:prompt]), vocabulary.decode(tokens)
        key = number, kind, tuple(tokens[:prompt])
        found.setdefault(key, []).append(whole.removeprefix(before).strip())
    return [
        Question(
            corpus.album.patches[number],
            list(tokens),
            vocabulary.decode(tokens),
            tuple(answers),
            label(pairs, kind),
        )
        for (number, kind, tokens), answers in found.items()
    ]
