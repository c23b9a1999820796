"""Objectives: what a model is to predict of a document.

An objective cuts a document into parts and turns each into one sequence for a decoder: inputs,
targets (the inputs one step on), and the length of a prefix that sees itself in full. Loss is where
the target is not in the prefix. For the document `a b c d` with its end `.` and start id 0, at most
4 tokens a sequence (7 and 9 for the last two, which cut out `b`):

    LanguageModelling    0 a b c -> a b c d                      d -> .
    Answering            0 a b c -> - - c d  (of a prompt a b)   d -> .      (prefix 0 a b)
    TaskTargets          0 a b c -> - - c d                                  (inputs a b)
    PrefixLM             0 a b c -> - - c d                      d -> .      (prefix 0 a b)
    SpanDenoising        0 a <X> c d <X> b -> - - - - <X> b .                (prefix 0 a <X> c d)
    TextDenoising        0 a <X> c d a b c d -> - - - - a b c d .            (prefix 0 a <X> c d)

All are functions of the document, its part and a random key: nothing is kept between examples.
Lengths depend on the number of tokens alone, so that packing needs no tokens.
"""

import dataclasses
from typing import Any, ClassVar, Protocol

import numpy as np

from m6jax.data.randomness import fold, random_bits, uniform
from m6jax.data.vocab import Vocabulary
from m6jax.foundation.validated import ConfigError, validated


@dataclasses.dataclass(frozen=True)
class Example:
    """One sequence for a decoder.

    Attributes:
      tokens: inputs, int32 [n].
      targets: int32 [n]; `targets[i]` follows `tokens[i]`.
      prefix: how many inputs see each other, and the picture, in full; targets inside it carry no
        loss. It is n + 1 or more where even the last target is given, so that nothing carries loss.
      patches: float32 [I, F] of the picture that stands before the tokens; I = 0: there is none.
    """

    tokens: np.ndarray
    targets: np.ndarray
    prefix: int = 0
    patches: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))

    @property
    def length(self) -> int:
        """Positions that the example takes in a row."""
        return len(self.patches) + len(self.tokens)


class Objective(Protocol):
    """What every objective offers.

    Attributes:
      predicts_all: whether every token of a document, and its end, carries loss once; only then do
        losses add up to the bits of the text.
    """

    predicts_all: ClassVar[bool]

    def num_units(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns what is to be cut of documents of so many tokens: the tokens, or one more."""

    def units_at_most(self, length: int) -> int:
        """Returns the most units that make a sequence no longer than `length`; 0 if none do."""

    def sequence_length(self, num_units: np.ndarray) -> np.ndarray:
        """Returns the length of the sequence made of so many units; 0 where none can be made."""

    def num_sentinels(self, num_units: int) -> int:
        """Returns how many sentinels a sequence of so many units needs."""

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the sequence of the units `begin` to `end` of a document.

        Args:
          document: integers [n], without start and end; only the part is read.
          begin: first unit.
          end: unit after the last.
          key: decides all that is random.
          vocabulary: gives the special ids.
          prompt: first tokens of the document that are given, not asked for; most objectives make
            no difference.
        """


class _NextToken:
    """Cutting for objectives that score every token of a document and its end once."""

    def num_units(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens and one for the end of the document."""
        return num_tokens + 1

    def units_at_most(self, length: int) -> int:
        """Returns `length`: a unit is a target."""
        return length

    def sequence_length(self, num_units: np.ndarray) -> np.ndarray:
        """Returns `num_units`: a unit is a target."""
        return num_units

    def num_sentinels(self, num_units: int) -> int:
        """Returns 0."""
        return 0


@validated
class LanguageModelling(_NextToken):
    """Predict every token from those before it.

    A part in the middle of a document begins with the token before it as its first input, so each
    token is scored exactly once, and the first one of the document too (from the start id).
    """

    predicts_all: ClassVar[bool] = True

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the units `begin` to `end` as targets; nothing is random."""
        return _next_token(document, begin, end, vocabulary)


@validated
class PrefixLM(_NextToken):
    """Predict the rest of a part from its beginning, which sees itself in full.

    The split is uniform: of n inputs the prefix has 1 to n, so between n and 1 targets carry loss
    (Raffel et al., 2020, section 3.2.1).
    """

    predicts_all: ClassVar[bool] = False

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the units `begin` to `end` as targets, split at random."""
        whole = _next_token(document, begin, end, vocabulary)
        prefix = 1 + int(uniform(key, np.zeros(1, np.int64))[0] * len(whole.tokens))
        return dataclasses.replace(whole, prefix=prefix)


@validated
class Answering(_NextToken):
    """Predict what follows a document's prompt, which sees itself and its picture in full.

    Of a picture with a prompt such as `English: `, its caption; of a picture and a question, the
    answer. A document without a prompt is predicted from its start id, and its picture, on.
    """

    predicts_all: ClassVar[bool] = False

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the units `begin` to `end` as targets; nothing is random."""
        whole = _next_token(document, begin, end, vocabulary)
        return dataclasses.replace(whole, prefix=1 + max(0, prompt - begin))


@validated
class TaskTargets(_NextToken):
    """Predict the targets of a `seqio.Task` from its inputs, which see themselves in full.

    The sequence is what the task made and nothing else: an end is predicted where the task appended
    one. Without inputs every token is predicted from those before it.
    """

    predicts_all: ClassVar[bool] = False

    def num_units(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of inputs and targets."""
        return num_tokens

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the units `begin` to `end` as targets; nothing is random."""
        whole = _next_token(document, begin, end, vocabulary)
        return dataclasses.replace(whole, prefix=1 + prompt - begin if prompt > begin else 0)


@validated
class SpanDenoising:
    """Predict spans cut out of the text: T5's objective (Raffel et al., 2020) for one decoder.

    The corrupted text, a sentinel in place of each span, is the prefix; then follow the sentinels,
    each with its span, and the end. A part of a single token cannot be corrupted: it is dropped and
    counted.

    Attributes:
      noise_density: fraction of the tokens that are cut out.
      mean_span_length: tokens of a span, on average.
    """

    predicts_all: ClassVar[bool] = False

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def check(self) -> None:
        """Checks the ranges."""
        if not 0 < self.noise_density < 1 or self.mean_span_length < 1:
            raise ConfigError(
                f"SpanDenoising: noise_density {self.noise_density} must be in (0, 1) and "
                f"mean_span_length {self.mean_span_length} at least 1"
            )

    def num_units(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens: the end is part of every target."""
        return num_tokens

    def units_at_most(self, length: int) -> int:
        """Returns the most tokens whose corrupted text and target fit into `length`."""
        fits = self.sequence_length(np.arange(length + 1)) <= length
        most = int(np.flatnonzero(fits)[-1])
        return most if most > 1 else 0

    def sequence_length(self, num_units: np.ndarray) -> np.ndarray:
        """Returns tokens + 2 a span + the end; 0 for a single token."""
        _, spans = self._counts(num_units)
        return np.where(num_units < 2, 0, num_units + 2 * spans + 1)

    def num_sentinels(self, num_units: int) -> int:
        """Returns the number of spans."""
        return int(self._counts(np.array(num_units))[1])

    def example(
        self,
        document: np.ndarray,
        begin: int,
        end: int,
        key: int,
        vocabulary: Vocabulary,
        prompt: int = 0,
    ) -> Example:
        """Returns the tokens `begin` to `end`, random spans of them cut out and asked for."""
        part = document[begin:end]
        noise, spans = (int(count) for count in self._counts(np.array(len(part))))
        cut_lengths = _random_parts(noise, spans, fold(key, 0))
        # Between two spans at least one token is kept; before the first and after the last perhaps
        # none. (T5 always cuts out the end, which in a short text is all that it cuts.)
        kept_lengths = _random_parts(len(part) - noise + 2, spans + 1, fold(key, 1))
        kept_lengths[[0, -1]] -= 1
        at = kept_lengths[0]
        corrupted: list[Any] = [part[:at]]
        wanted: list[Any] = []
        for i, (cut, kept) in enumerate(zip(cut_lengths, kept_lengths[1:], strict=True)):
            sentinel = [vocabulary.sentinel(i)]
            corrupted += [sentinel, part[at + cut : at + cut + kept]]
            wanted += [sentinel, part[at : at + cut]]
            at += cut + kept
        wanted = self._wanted(part, wanted)
        targets = np.concatenate([*corrupted, *wanted, [vocabulary.eos_id]]).astype(np.int32)
        tokens = np.concatenate([[vocabulary.start_id], targets[:-1]]).astype(np.int32)
        # The inputs of the prefix are the start and the corrupted text, whose last token predicts
        # the first target.
        return Example(tokens, targets, prefix=len(part) - noise + spans + 1)

    def _wanted(self, part: np.ndarray, spans: list[Any]) -> list[Any]:
        """Returns what is asked for: the sentinels, each with its span."""
        return spans

    def _counts(self, num_units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens cut out and the spans they make, of parts of so many tokens (>= 2)."""
        noise = np.round(num_units * self.noise_density).clip(1, np.maximum(num_units - 1, 1))
        spans = np.round(noise / self.mean_span_length)
        spans = spans.clip(1, np.minimum(noise, np.maximum(num_units - noise, 1)))
        return noise.astype(np.int64), spans.astype(np.int64)


@validated
class TextDenoising(SpanDenoising):
    """Predict the whole text from what spans cut out of it leave, and from its picture.

    As `SpanDenoising`, but after the corrupted text follows the text itself, not its spans alone:
    BART's objective (Lewis et al., 2020) for one decoder.
    """

    def sequence_length(self, num_units: np.ndarray) -> np.ndarray:
        """Returns what is left of the tokens, the tokens and the end; 0 for a single token."""
        noise, spans = self._counts(num_units)
        return np.where(num_units < 2, 0, 2 * num_units - noise + spans + 1)

    def _wanted(self, part: np.ndarray, spans: list[Any]) -> list[Any]:
        return [part]


# As settings name them.
Objectives = LanguageModelling | PrefixLM | SpanDenoising | TextDenoising | Answering | TaskTargets


def _next_token(document: np.ndarray, begin: int, end: int, vocabulary: Vocabulary) -> Example:
    targets = document[begin:end].astype(np.int32)
    if end > len(document):
        targets = np.append(targets, np.int32(vocabulary.eos_id))
    previous = document[begin - 1] if begin else vocabulary.start_id
    return Example(np.concatenate([[previous], targets[:-1]]).astype(np.int32), targets)


def _random_parts(total: int, parts: int, key: int) -> np.ndarray:
    """Returns `parts` positive integers that add up to `total`, all ways equally likely."""
    order = np.argsort(random_bits(key, np.arange(total - 1)), kind="stable")
    cuts = np.sort(order[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
