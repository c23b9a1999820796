"""Vocabularies: text to token ids and back, without losing a byte.

A vocabulary is trained, not shipped: SentencePiece's byte-pair encoding over the training documents
(never the held-out ones) takes under a second for the built-in texts and is then found in the
cache. Nothing is normalised and unknown characters fall back to bytes, so decoding gives back the
text exactly (only U+2581, SentencePiece's own sign for a space, becomes one).

Ids, for a trained vocabulary of size 8,000 with two sentinels:

    0 padding, and the input before a document's first token (as in T5)
    1 end of a document    2 unknown    3 ... 7999 pieces    8001 <extra_id_0>    8000 <extra_id_1>
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m6jax.data.cache import built, digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan, open_file
from m6jax.data.source import Source
from m6jax.data.vocab_training import train, training_lines, training_options
from m6jax.foundation.validated import ConfigError, PathName, validated


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary in use.

    Attributes:
      base_size: ids that text encodes to are below it.
      extra_ids: sentinels above them; text never encodes to one.
      eos_id: ends every document.
      pad_id: fills rows; masked everywhere.
      fingerprint: the same for two vocabularies only if they encode alike.
      encode: text to ids, without an end.
      decode_pieces: ids below `base_size` to text.
      model: the serialised SentencePiece model, to be kept beside a checkpoint, if there is one.
      start_id: the input before a document's first token.
      restores_all: whether decoding gives back every text; where not, a corpus counts which.
    """

    base_size: int
    extra_ids: int
    eos_id: int
    pad_id: int
    fingerprint: str
    encode: Callable[[str], list[int]]
    decode_pieces: Callable[[list[int]], str]
    model: bytes | None = None
    start_id: int = 0
    restores_all: bool = True

    @property
    def size(self) -> int:
        """Number of ids, sentinels included."""
        return self.base_size + self.extra_ids

    def sentinel(self, number: int) -> int:
        """Returns the id of `<extra_id_{number}>`; they count down from the last id, as in T5."""
        if not 0 <= number < self.extra_ids:
            raise ConfigError(f"sentinel {number}: the vocabulary has {self.extra_ids} extra_ids")
        return self.size - 1 - number

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` up to the first end-of-document; sentinels as `<extra_id_k>`.

        Raises:
          DataError: an id is outside the vocabulary.
        """
        text, run = "", []
        for i in map(int, ids):
            if not 0 <= i < self.size:
                raise DataError(f"token id {i} is outside the vocabulary of {self.size} ids")
            if i == self.eos_id:
                break
            if i < self.base_size:
                run.append(i)
            else:
                text, run = text + self.decode_pieces(run) + f"<extra_id_{self.size - 1 - i}>", []
        return text + self.decode_pieces(run)


def from_sentencepiece(model: bytes, extra_ids: int, where: str) -> Vocabulary:
    """Returns the vocabulary of a serialised SentencePiece model.

    Args:
      model: the model.
      extra_ids: sentinels above its pieces.
      where: it comes from, for messages.

    Raises:
      DataError: it is no model, or has no end of a document.
    """
    import sentencepiece

    sentencepiece.set_min_log_level(2)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{where}: not a SentencePiece model ({error})") from error
    if processor.eos_id() < 0:
        raise DataError(f"{where}: the model has no end-of-sentence piece (train with eos_id=1)")
    return Vocabulary(
        base_size=processor.vocab_size(),
        extra_ids=extra_ids,
        eos_id=processor.eos_id(),
        pad_id=max(processor.pad_id(), 0),  # without a padding piece 0 does: it is masked
        fingerprint=digest("sentencepiece", model.hex(), extra_ids),
        encode=processor.encode,
        decode_pieces=processor.decode,
        model=model,
        restores_all=_restores_all(model),
    )


def _restores_all(model: bytes) -> bool:
    """Whether a SentencePiece model neither changes text nor lacks bytes."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    proto = messages.ModelProto.FromString(model)
    spec = proto.normalizer_spec
    changes = spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces
    return proto.trainer_spec.byte_fallback and not changes


@validated
class SentencePiece:
    """A byte-pair vocabulary, trained from the sources or given as a model file.

    Attributes:
      size: ids without the sentinels; of a given model it is what the model has.
      extra_ids: sentinels for span denoising, above the others.
      path: a user's own SentencePiece model instead of a trained one.
      character_coverage: fraction of the characters that get pieces of their own, not bytes.
      training_bytes: text to train from, at most; taken evenly from all of it.
    """

    size: int = 8000
    extra_ids: int = 0
    path: PathName | None = None
    character_coverage: float = 0.995
    training_bytes: int = 20_000_000

    def check(self) -> None:
        """Checks the ranges."""
        if self.size < 1 or self.extra_ids < 0 or self.training_bytes < 10_000:
            raise ConfigError(
                "SentencePiece: size must be positive, extra_ids not negative and training_bytes "
                f"at least 10000, got {self.size}, {self.extra_ids}, {self.training_bytes}"
            )
        if not 0.98 <= self.character_coverage <= 1:  # SentencePiece accepts no other
            raise ConfigError(
                f"SentencePiece.character_coverage: {self.character_coverage} is not in [0.98, 1]"
            )

    def model_if_there(self) -> bytes | None:
        """Returns the user's own model; None where no path is set, or it is there no longer."""
        try:
            return None if self.path is None else _read_model(self.path)
        except DataError:
            return None

    def pinned(self, path: str) -> "SentencePiece":
        """Returns the setting of the same vocabulary whose model lies elsewhere."""
        return dataclasses.replace(self, path=path)

    def load(self, sources: Sequence[Source], scans: Sequence[Scan] | None = None) -> Vocabulary:
        """Returns the vocabulary, training it if it is not in the cache.

        Args:
          sources: of the text, which is not read where a model is given.
          scans: of the sources, where they are at hand.

        Raises:
          DataError: no such model, or the text cannot give a vocabulary of this size.
        """
        if self.path is not None:
            where = f"SentencePiece.path {self.path!r}"
            return from_sentencepiece(_read_model(self.path), self.extra_ids, where)
        if scans is None:
            scans = [source.scan() for source in sources]
        options = training_options(self.size, self.character_coverage)

        def write(directory: Path) -> None:
            lines = list(training_lines(sources, scans, self.training_bytes))
            (directory / "model").write_bytes(train(lines, options))

        key = digest(options, self.training_bytes, [s.fingerprint for s in scans])
        model = (built("vocabularies", key, write) / "model").read_bytes()
        return from_sentencepiece(model, self.extra_ids, "vocabulary")


@validated
class TokenIds:
    """No text at all: documents are lists of ids already, shown as numbers.

    Attributes:
      size: ids without the sentinels.
      extra_ids: sentinels for span denoising, above the others.
      eos_id: ends every document.
    """

    size: int
    extra_ids: int = 0
    eos_id: int = 1

    def check(self) -> None:
        """Checks the ranges."""
        if not 0 < self.eos_id < self.size or self.extra_ids < 0:
            raise ConfigError(
                f"TokenIds: eos_id {self.eos_id} must be in 1 ... size - 1 = {self.size - 1} and "
                f"extra_ids {self.extra_ids} not negative"
            )

    def load(self, sources: Sequence[Source], scans: Sequence[Scan] | None = None) -> Vocabulary:
        """Returns the vocabulary; 'text' is numbers between spaces."""
        return Vocabulary(
            base_size=self.size,
            extra_ids=self.extra_ids,
            eos_id=self.eos_id,
            pad_id=0,
            fingerprint=digest("ids", self.size, self.extra_ids, self.eos_id),
            encode=_numbers,
            decode_pieces=lambda ids: "".join(f"{i} " for i in ids),
        )


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[\d\s]*", text):
        raise DataError(f"TokenIds: {text[:40]!r} is not numbers between spaces")
    return [int(word) for word in text.split()]


def _read_model(path: str) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"SentencePiece.path {path!r}: {error}") from error
