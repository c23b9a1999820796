"""The examples that an objective makes of a corpus, by number.

Document i gives `ceil(units / most units a sequence)` examples, numbered on from those of document
i - 1. With at most 4 units and documents of 6, 3 and 4 units, the examples are

    number    0    1    2    3
    document  0    0    1    2
    units     0-4  4-6  0-3  0-4

Where an example lies, and how long it is, follows from its number without looking at a token.
Eight bytes a document are held in memory, the tokens stay on disk.
"""

import numpy as np

from m6jax.data.corpus import Corpus
from m6jax.data.preprocessors import Example, Objective
from m6jax.data.vocab import Vocabulary


class Examples:
    """All examples of a corpus.

    Attributes:
      name: of the source.
      count: how many there are.
      num_units: tokens of all documents, with their ends if the objective scores them.
      usable: whether the objective can make a sequence of any of them.
    """

    def __init__(self, corpus: Corpus, objective: Objective, length: int, vocabulary: Vocabulary):
        self.name = corpus.name
        self._corpus = corpus
        self._objective = objective
        self._vocabulary = vocabulary
        self._most = objective.units_at_most(length)
        units = objective.num_units(corpus.lengths())
        parts = -(-units // self._most)
        self._first = np.concatenate([[0], np.cumsum(parts)])
        self.count = int(self._first[-1])
        self.usable = bool(objective.sequence_length(np.minimum(units, self._most)).any())
        self.num_units = int(units.sum())

    def sizes(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sequence lengths and the units of examples, int64 [n] each.

        A length of 0 means that the objective can make nothing of the example.
        """
        _, begin, end = self._locate(numbers)
        return self._objective.sequence_length(end - begin), end - begin

    def example(self, number: int, key: int) -> Example:
        """Returns an example; `key` decides all that is random in it."""
        document, begin, end = (int(x[0]) for x in self._locate(np.array([number])))
        tokens = self._corpus.document(document)
        return self._objective.example(tokens, begin, end, key, self._vocabulary)

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns document, first unit and unit after the last."""
        document = np.searchsorted(self._first, numbers, side="right") - 1
        begin = (numbers - self._first[document]) * self._most
        units = self._objective.num_units(self._corpus.lengths(document))
        return document, begin, np.minimum(begin + self._most, units)
