"""A corpus of text, or of token ids, on disk.

A document that gives no token is left out, counted and named: an empty record, one that is not
UTF-8, or a text of which a vocabulary that normalises leaves nothing, such as U+3000 alone.
"""

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from m6jax.data.errors import DataError
from m6jax.data.files import Scan
from m6jax.data.source import DOCUMENTS_AT_ONCE, Source, TextSource, no_documents
from m6jax.data.tasks import seqio_task
from m6jax.data.vocab import Vocabulary

_NAMED = 5  # of the documents that were left out, how many are named


def write(
    source: TextSource,
    scan: Scan,
    split: str,
    vocabulary: Vocabulary,
    dtype: type,
    directory: Path,
) -> dict[str, Any]:
    """Writes the arrays of a corpus; returns the bytes of its text and what was left out.

    Raises:
      DataError: there is no document that can be used, or an id is outside the vocabulary.
    """
    task = seqio_task(source, scan.fingerprint, vocabulary)
    documents = task.get_dataset(None, split, shuffle=False, try_in_mem_cache=False)
    end = num_documents = num_bytes = num_altered = 0
    left_out: list[tuple[int, str]] = []
    with (
        open(directory / "tokens.bin", "wb") as tokens,
        open(directory / "offsets.bin", "wb") as offsets,
        open(directory / "hashes.bin", "wb") as hashes,
    ):
        offsets.write(np.zeros(1, np.int64).tobytes())
        for batch in documents.ragged_batch(DOCUMENTS_AT_ONCE):
            ids, splits = batch["targets"].flat_values.numpy(), batch["targets"].row_splits.numpy()
            _check_ids(ids, splits, num_documents, vocabulary.base_size, source)
            texts = batch["targets_pretokenized"].numpy() if source.is_text else None
            empty = np.diff(splits) == 0
            for i in np.flatnonzero(empty).tolist():
                left_out.append((num_documents + i, _reason(None if texts is None else texts[i])))
            tokens.write(ids.astype(dtype).tobytes())
            offsets.write((end + splits[1:][~empty]).astype(np.int64).tobytes())
            hashes.write(document_hashes(ids, splits)[~empty].tobytes())
            end += len(ids)
            num_documents += len(empty)
            if texts is not None:
                num_bytes += sum(len(text) + len(source.separator) for text in texts[~empty])
                if not vocabulary.restores_all:
                    num_altered += _num_altered(texts[~empty], ids, splits[:-1][~empty], vocabulary)
    named = [f"{source.where(split, n)}: {reason}" for n, reason in left_out[:_NAMED]]
    if end == 0:
        first = f"; {len(left_out)} were left out, the first: {named[0]}" if named else ""
        raise DataError(no_documents(source, split) + first)
    return {
        "num_bytes": num_bytes if source.is_text else None,
        "num_altered": num_altered,
        "left_out": [number for number, _ in left_out],
        "skipped": named,
    }


def document_hashes(ids: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Returns 64 bits for each document, uint64 [n].

    Args:
      ids: tokens of all documents, integers.
      splits: where each begins and the last ends, [n + 1].
    """
    data = ids.astype(np.int32).tobytes()
    cuts = (4 * splits).tolist()
    digests = (
        hashlib.blake2b(data[begin:end], digest_size=8).digest()
        for begin, end in itertools.pairwise(cuts)
    )
    return np.frombuffer(b"".join(digests), np.uint64)


def _num_altered(
    texts: np.ndarray, ids: np.ndarray, begins: np.ndarray, vocabulary: Vocabulary
) -> int:
    """Returns of how many texts decoding gives back another; those of no token are left out."""
    documents = zip(texts, np.split(ids, begins[1:]), strict=True)
    return sum(vocabulary.decode(own.tolist()).encode() != text for text, own in documents)


def _reason(text: bytes | None) -> str:
    if not text:
        return "it is empty or lacks the field"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    return f"the vocabulary makes no token of {text.decode()[:20]!r}"


def _check_ids(ids: np.ndarray, splits: np.ndarray, first: int, size: int, source: Source) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= size))
    if len(wrong):
        document = first + int(np.searchsorted(splits, wrong[0], side="right")) - 1
        raise DataError(
            f"source {source.name!r}: token id {ids[wrong[0]]} in document {document} is outside "
            f"the vocabulary of {size} ids"
        )
