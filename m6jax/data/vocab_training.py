"""Training a SentencePiece vocabulary from the training documents of some sources."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from m6jax.data.errors import DataError
from m6jax.data.files import Scan
from m6jax.data.source import TRAIN, Source

_LINE_BYTES = 4000  # SentencePiece leaves out lines of more than 4,192 bytes


def training_options(size: int, character_coverage: float) -> dict[str, Any]:
    """Returns SentencePiece's options for a vocabulary that loses no byte."""
    return {
        "vocab_size": size,
        "character_coverage": character_coverage,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
    }


def training_lines(sources: Sequence[Source], scans: Sequence[Scan], budget: int) -> Iterator[str]:
    """Yields lines of the training documents, an even share of `budget` bytes from each source.

    Where there is more text than that, every so many lines one is taken.

    Raises:
      DataError: a source holds no text.
    """
    for source, scan in zip(sources, scans, strict=True):
        if not source.is_text:
            raise DataError(
                f"source {source.name!r} holds token ids, no text to train a vocabulary from: set "
                "SentencePiece.path, or use TokenIds"
            )
        fraction = min(1.0, budget / len(sources) / max(scan.num_bytes, 1))
        lines = (x for text in source.documents(TRAIN) for x in _cut_lines(text))
        for i, line in enumerate(lines):
            if math.floor((i + 1) * fraction) > math.floor(i * fraction):
                yield line


def _cut_lines(document: bytes) -> Iterator[str]:
    try:
        text = document.decode()
    except UnicodeDecodeError:
        return  # the corpus leaves it out, and counts it
    for line in text.split("\n"):
        width = _LINE_BYTES if line.isascii() else _LINE_BYTES // 4  # 4 bytes a character at most
        yield from (line[i : i + width] for i in range(0, len(line), width))


def train(lines: list[str], options: dict[str, Any]) -> bytes:
    """Returns the serialised model; the same lines and options give the same bytes.

    Raises:
      DataError: there are no lines, or they cannot give a vocabulary of this size.
    """
    if not lines:
        raise DataError("there is no training document to train a vocabulary from")
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            minloglevel=2,
            num_threads=1,  # written into the model, so it must be the same everywhere
            **options,
        )
    except RuntimeError as error:
        raise _explained(error, options["vocab_size"]) from error
    return model.getvalue()


def _explained(error: RuntimeError, size: int) -> DataError:
    """SentencePiece's two errors about the size, in a user's words; any other as it is."""
    message = str(error)
    if most := re.search(r"size too high .*value <= (\d+)", message):
        return DataError(
            f"SentencePiece.size: {size}, but the training text gives at most {most[1]} pieces"
        )
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return DataError(
            f"SentencePiece.size: {size}, but the characters of the training text need {least[1]}; "
            "raise it, or lower SentencePiece.character_coverage"
        )
    return DataError(f"SentencePiece cannot be trained: {message}")
