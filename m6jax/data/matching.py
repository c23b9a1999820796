"""Whether a picture goes with a text, as text: an objective for pictures alone.

Half of the examples, chosen by their random keys, show the picture of another document, and the
answer is another word:

    patches of its own picture    0 a b -> - - yes .        (prefix 0 a b)
    patches of another picture    0 a b -> - - no .

The text stays and the picture changes, so that the length of an example says nothing.
"""

from typing import ClassVar

import numpy as np

from m6jax.data.corpus import Corpus
from m6jax.data.errors import DataError
from m6jax.data.preprocessors import Example, Objectives
from m6jax.data.randomness import fold, random_bits
from m6jax.data.vocab import Vocabulary
from m6jax.foundation.validated import ConfigError, validated

_COIN, _OTHER = range(2)  # what a random key is for
_TRIES = 32
_SPARE = 3  # a vocabulary of others may begin every text with a sign of three bytes


@validated
class Matching:
    """Say whether the text goes with its picture, which is another document's half of the time.

    A question may be part of the text: `pairs = (('', '{text}. Is that right? '),)`.

    Attributes:
      yes: the answer where it does; a row keeps room for as many tokens as the answers have bytes.
      no: the answer where it does not.
    """

    predicts_all: ClassVar[bool] = False

    yes: str = "yes"
    no: str = "no"

    def check(self) -> None:
        """Checks that the answers differ."""
        if self.yes == self.no or not self.yes or not self.no:
            raise ConfigError(f"Matching: yes {self.yes!r} and no {self.no!r} must be two texts")

    def num_units(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens."""
        return num_tokens

    def units_at_most(self, length: int) -> int:
        """Returns the most tokens that fit into `length` with an answer and its end."""
        return max(0, length - self._most_asked)

    def sequence_length(self, num_units: np.ndarray) -> np.ndarray:
        """Returns the most positions that so many tokens, an answer and its end take."""
        return num_units + self._most_asked

    def num_sentinels(self, num_units: int) -> int:
        """Returns 0."""
        return 0

    def matches(self, key: int) -> bool:
        """Whether the picture is the document's own in the example with this key."""
        return bool(random_bits(fold(key, _COIN), np.zeros(1, np.int64))[0] >> np.uint64(63))

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the tokens `begin` to `end` and the answer that goes with the key."""
        return self.asked(document[begin:end], self.matches(key), vocabulary)

    def asked(self, text: np.ndarray, matches: bool, vocabulary: Vocabulary) -> Example:
        """Returns a text with its answer.

        Raises:
          DataError: the answer has more tokens than there is room for.
        """
        answer = vocabulary.encode(self.yes if matches else self.no)
        if len(answer) + 1 > self._most_asked:
            raise DataError(
                f"Matching: {(self.yes if matches else self.no)!r} has {len(answer)} tokens, at"
                f" most {self._most_asked - 1} were expected (choose another word)"
            )
        targets = np.concatenate([text, answer, [vocabulary.eos_id]]).astype(np.int32)
        tokens = np.concatenate([[vocabulary.start_id], targets[:-1]]).astype(np.int32)
        return Example(tokens, targets, prefix=1 + len(text))

    @property
    def _most_asked(self) -> int:
        return max(len(self.yes.encode()), len(self.no.encode())) + _SPARE + 1


PictureObjectives = Objectives | Matching  # as settings of sources with pictures name them


def other_picture(corpus: Corpus, document: int, key: int) -> int | None:
    """Returns the number of a picture that does not go with a document's text.

    None of that picture's documents has the same text, which two pictures of one class have.

    Args:
      corpus: with pictures.
      document: its number.
      key: decides which picture.

    Returns:
      All such pictures are as likely where they are many; None if there is none.
    """
    album = corpus.album
    assert album is not None
    own, count = int(album.numbers[document]), len(album.patches)
    text = corpus.document(document)
    drawn = (random_bits(fold(key, _OTHER), np.arange(_TRIES)) % np.uint64(count)).tolist()
    for number in [*drawn, *((drawn[-1] + i) % count for i in range(count))]:
        begin, end = np.searchsorted(album.numbers, [number, number + 1])
        texts = (corpus.document(int(d)) for d in range(begin, end))
        same = any(np.array_equal(other, text) for other in texts)
        if not same and not np.array_equal(album.patches[number], album.patches[own]):
            return number
    return None
