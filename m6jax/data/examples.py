"""The examples that an objective makes of a corpus, by number.

Document i gives `ceil(units / most units a sequence)` examples, numbered on from those of document
i - 1. With at most 4 units and documents of 6, 3 and 4 units, the examples are

    number    0    1    2    3
    document  0    0    1    2
    units     0-4  4-6  0-3  0-4

Where an example lies, and how long it is, follows from its number without looking at a token. If
documents have pictures, each example begins with the patches of its document's picture (`Matching`:
or of another's).
Eight bytes a document are held in memory, the tokens stay on disk.
"""

import dataclasses

import numpy as np

from m6jax.data import pictures
from m6jax.data.corpus import Corpus
from m6jax.data.matching import Matching, other_picture
from m6jax.data.preprocessors import Example, Objective
from m6jax.data.vocab import Vocabulary


class Examples:
    """All examples of a corpus.

    Attributes:
      name: of the source.
      corpus: the documents.
      count: how many there are.
      num_units: tokens of all documents, with their ends if the objective scores them.
      usable: whether the objective can make a sequence of any of them.
      left_out: a line about records that could not be used, or None.
      num_pictures: that stand before each of them, 0 or 1.
    """

    def __init__(self, corpus: Corpus, objective: Objective, length: int, vocabulary: Vocabulary):
        self.name = corpus.name
        self.left_out = corpus.left_out
        self.corpus = corpus
        self._objective = objective
        self._vocabulary = vocabulary
        self._patches = corpus.num_patches
        self._most = objective.units_at_most(length - self._patches)
        units = objective.num_units(corpus.lengths())
        parts = -(-units // self._most)
        self._first = np.concatenate([[0], np.cumsum(parts)])
        self.count = int(self._first[-1])
        self.usable = bool(objective.sequence_length(np.minimum(units, self._most)).any())
        self.num_units = int(units.sum())
        self.num_pictures = int(self._patches > 0)

    def fingerprint(self) -> str:
        """Returns what stands for the corpus."""
        return self.corpus.fingerprint()

    def sizes(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence lengths and the units of examples, int64 [n] each.

        A length of 0 means that the objective can make nothing of the example.
        """
        _, begin, end = self._locate(numbers)
        lengths = self._objective.sequence_length(end - begin)
        return np.where(lengths, lengths + self._patches, 0), end - begin

    def example(self, number: int, key: int) -> Example:
        """Returns an example; `key` decides all that is random in it."""
        document, begin, end = (int(x[0]) for x in self._locate(np.array([number])))
        tokens, prompt = self.corpus.document(document), self.corpus.prompt(document)
        if isinstance(self._objective, Matching):
            return self._matched(self._objective, document, tokens[begin:end], key)
        made = self._objective.example(tokens, begin, end, key, self._vocabulary, prompt)
        if not self._patches:
            return made
        patches = pictures.to_features(self.corpus.patches(document))
        return dataclasses.replace(made, patches=patches)

    def _matched(self, objective: Matching, document: int, text: np.ndarray, key: int) -> Example:
        """Returns a text with its own picture or another's; its own where all have this text."""
        other = None if objective.matches(key) else other_picture(self.corpus, document, key)
        made = objective.asked(text, other is None, self._vocabulary)
        album = self.corpus.album
        assert album is not None  # only sources with pictures have this objective
        patches = album.patches[album.numbers[document] if other is None else other]
        return dataclasses.replace(made, patches=pictures.to_features(patches))

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns document, first unit and unit after the last."""
        document = np.searchsorted(self._first, numbers, side="right") - 1
        begin = (numbers - self._first[document]) * self._most
        units = self._objective.num_units(self.corpus.lengths(document))
        return document, begin, np.minimum(begin + self._most, units)
