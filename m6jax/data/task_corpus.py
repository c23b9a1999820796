"""The examples of seqio tasks, kept as a corpus: inputs and targets one after another.

An example with the inputs `a b` and the targets `c d` is the document `a b c d` with a prompt of 2
tokens. Without a `version` the examples are made once in every run's process and kept by their
contents, so that a run whose task makes others is not resumed.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m6jax.data.cache import built, digest, stored
from m6jax.data.corpus import Corpus, mapped
from m6jax.data.errors import DataError
from m6jax.data.seqio_modules import INPUTS, TARGETS
from m6jax.data.seqio_sources import SeqioTask, TaskPart
from m6jax.data.source import DOCUMENTS_AT_ONCE, no_documents
from m6jax.data.tensorflow_import import import_tensorflow, running
from m6jax.data.vocab import Vocabulary

_FORMAT = 1


def open_tasks(
    source: SeqioTask, split: str, vocabulary: Vocabulary, length: int
) -> list[tuple[Corpus, float]]:
    """Returns the examples of every task of a source that has a split, each with its rate.

    Args:
      source: the tasks.
      split: 'train' or 'validation'.
      vocabulary: of the run.
      length: T, of a row.

    Raises:
      DataError: a task cannot be found, fails, makes no example or ids outside the vocabulary.
      ConfigError: inputs and targets are together longer than a row.
    """
    parts = source.in_split(source.parts(vocabulary), split)
    return [(_open(source, part, split, vocabulary, length), part.rate) for part in parts]


def joined(name: str, corpora: Sequence[Corpus]) -> Corpus:
    """Returns the examples of several tasks as one corpus; their tokens are copied."""
    starts = np.cumsum([0, *(corpus.offsets[-1] for corpus in corpora)])
    offsets = [c.offsets[1:] + start for c, start in zip(corpora, starts[:-1], strict=True)]
    return Corpus(
        name=name,
        tokens=np.concatenate([corpus.tokens for corpus in corpora]),
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        num_bytes=None,
        prompts=np.concatenate([c.prompts for c in corpora if c.prompts is not None]),
        skipped=tuple(line for corpus in corpora for line in corpus.skipped),
        num_skipped=sum(corpus.num_skipped for corpus in corpora),
        num_cut=sum(corpus.num_cut for corpus in corpora),
    )


def _open(
    source: SeqioTask, part: TaskPart, split: str, vocabulary: Vocabulary, length: int
) -> Corpus:
    lengths = source.lengths(part, length)
    dtype = np.uint16 if vocabulary.size <= 1 << 16 else np.int32

    def write(directory: Path) -> None:
        with running(f"task {part.name!r}"):
            found = _write(source, part, split, vocabulary, lengths, dtype, directory)
        (directory / "corpus.json").write_text(json.dumps(found))

    settings = dataclasses.replace(source, module="", version=None)
    key = [_FORMAT, repr(settings), part.name, split, vocabulary.fingerprint, lengths]
    if source.version is not None:
        entry = built("tasks", digest(source.version, *key), write)
    else:
        name = digest(*key)
        entry = source.kept.get(name) or stored("tasks", write)
        source.kept[name] = entry
    found = json.loads((entry / "corpus.json").read_text())
    return Corpus(
        name=source.name,
        tokens=mapped(entry, "tokens", dtype),
        offsets=mapped(entry, "offsets", np.int64),
        num_bytes=None,
        prompts=mapped(entry, "prompts", np.int64),
        skipped=tuple(found["skipped"]),
        num_skipped=found["num_skipped"],
        num_cut=found["num_cut"],
    )


def _write(
    source: SeqioTask,
    part: TaskPart,
    split: str,
    vocabulary: Vocabulary,
    lengths: Mapping[str, int],
    dtype: type,
    directory: Path,
) -> dict[str, Any]:
    """Writes the arrays of a corpus; returns how many examples were left out or cut."""
    limits = lengths if part.has_inputs or source.targets_length else {}
    offsets, prompts, empty, num_cut = [0], [], [], 0
    with open(directory / "tokens.bin", "wb") as tokens:
        for number, (inputs, targets) in enumerate(_pairs(source, part, split, lengths)):
            if not len(targets):
                empty.append(number)
                continue
            cut = inputs[: limits.get(INPUTS)], targets[: limits.get(TARGETS)]
            num_cut += sum(map(len, cut)) < len(inputs) + len(targets)
            ids = np.concatenate(cut)
            wrong = ids[(ids < 0) | (ids >= vocabulary.size)]
            if len(wrong):
                raise DataError(
                    f"task {part.name!r}: token id {wrong[0]} in example {number} is outside the"
                    f" vocabulary of {vocabulary.size} ids"
                )
            tokens.write(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + len(ids))
            prompts.append(len(cut[0]))
    if not prompts:
        raise DataError(no_documents(source, split))
    np.array(offsets, np.int64).tofile(directory / "offsets.bin")
    np.array(prompts, np.int64).tofile(directory / "prompts.bin")
    named = [f"task {part.name!r}, example {number}: no targets" for number in empty[:5]]
    return {"num_skipped": len(empty), "skipped": named, "num_cut": int(num_cut)}


def _pairs(
    source: SeqioTask, part: TaskPart, split: str, lengths: Mapping[str, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields inputs and targets of every example, int64 [n] each."""
    tf, _ = import_tensorflow()
    names = list(part.task.output_features)
    examples = source.examples(part, split, lengths).map(
        lambda example: {name: tf.cast(example[name], tf.int64) for name in names}
    )
    none = np.zeros(0, np.int64)
    for batch in examples.ragged_batch(DOCUMENTS_AT_ONCE):
        columns = {name: _rows(batch[name]) for name in names}
        yield from zip(
            columns.get(INPUTS, [none] * len(columns[TARGETS])), columns[TARGETS], strict=True
        )


def _rows(ragged: Any) -> list[np.ndarray]:
    values, splits = ragged.flat_values.numpy(), ragged.row_splits.numpy()
    return np.split(values, splits[1:-1])
