"""What a run's data is, in numbers: said when the run begins, and by `--mode=data`."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from m6jax.data.config import TextData
from m6jax.data.corpus import Corpus
from m6jax.data.pipeline import TrainRows
from m6jax.data.vocab import Vocabulary

_SHOWN = 200  # characters of a row, when a run begins


@dataclasses.dataclass(frozen=True)
class SetOverview:
    """The numbers of a source, or of a set that is evaluated on alone.

    Attributes:
      name: of the source.
      documents: to train on.
      num_bytes: UTF-8 bytes of their text; None if that is not known.
      tokens: of them, without ends.
      examples: that the objective makes of them.
      epochs: how often the run will see each of them; None of a set that is not trained on.
      held_out: documents that are held out.
      held_out_bytes: likewise.
      held_out_tokens: likewise.
      duplicates: held-out documents that are trained on too, in any source of text, token by token;
        None if that is not known.
      notes: what could not be used, and what the vocabulary cannot give back.
    """

    name: str
    documents: int = 0
    num_bytes: int | None = None
    tokens: int = 0
    examples: int = 0
    epochs: float | None = None
    held_out: int = 0
    held_out_bytes: int | None = None
    held_out_tokens: int = 0
    duplicates: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.documents:
            parts.append(_amount(self.documents, self.num_bytes, self.tokens))
        if self.epochs is not None:
            parts.append(f"{self.epochs:.3g} epochs in this run")
        if self.held_out:
            held_out = _amount(self.held_out, self.held_out_bytes, self.held_out_tokens)
            parts.append(f"held out {held_out}")
        if self.duplicates:
            parts.append(f"{self.duplicates:,} of them trained on too")
        return f"{self.name}: {'; '.join(parts)}"


def overviews(data: TextData, rows: TrainRows, num_rows: int) -> list[SetOverview]:
    """Returns the numbers of every source, and of the sets that are evaluated on alone.

    Args:
      data: the setting.
      rows: its training rows.
      num_rows: that the run will take.
    """
    epochs = rows.epochs(num_rows)
    evaluated = set(data.eval_names())
    found = []
    for source in (*data.sources, *data.held_out):
        parts = [
            (e, n) for e, n in zip(rows.examples, epochs, strict=True) if e.name == source.name
        ]
        held_out = data.held_out_corpus(source.name) if source.name in evaluated else None
        count = sum(e.count for e, _ in parts)
        seen = sum(e.count * n for e, n in parts) / count if count else None
        trained = [e.corpus for e, _ in parts]
        others = [e.corpus for e in rows.examples]
        found.append(_overview(source.name, trained, others, held_out, count, seen))
    return found


def describe(data: TextData, rows: TrainRows, num_rows: int) -> list[str]:
    """Returns the lines that are said of the data when a run begins.

    Args:
      data: the setting.
      rows: its training rows.
      num_rows: that the run will take.
    """
    sets = overviews(data, rows, num_rows)
    notes = dict.fromkeys(note for found in sets for note in found.notes)
    row = shown(rows.peek(), 0, data.vocab())
    return [
        *map(str, sets),
        *data.guesses(),
        *notes,
        f"rows are {rows.filled():.1%} full; the next: {row[:_SHOWN]}{'...' * (len(row) > _SHOWN)}",
    ]


def shown(features: Mapping[str, np.ndarray], b: int, vocabulary: Vocabulary) -> str:
    """Returns the text of a row: its examples between bars, a picture as <picture>."""
    segments = features["segment_ids"][b]
    examples = range(1, int(segments.max(initial=0)) + 1)
    return " | ".join(segment_text(features, b, number, vocabulary) for number in examples)


def segment_text(
    features: Mapping[str, np.ndarray], b: int, segment: int, vocabulary: Vocabulary
) -> str:
    """Returns the text of one example of a row, its line ends written out."""
    inside = features["segment_ids"][b] == segment
    picture = np.zeros_like(inside)
    if "patch_mask" in features:
        picture = inside & (features["patch_mask"][b] > 0)
    text = vocabulary.decode(features["targets"][b][inside & ~picture].tolist())
    return "<picture> " * bool(picture.any()) + repr(text)[1:-1]


def _overview(
    name: str,
    training: list[Corpus],
    all_training: list[Corpus],
    held_out: Corpus | None,
    examples: int,
    epochs: float | None,
) -> SetOverview:
    notes = [corpus.left_out for corpus in [*training, *filter(None, [held_out])]]
    found = SetOverview(
        name,
        documents=sum(len(corpus.lengths()) for corpus in training),
        num_bytes=_bytes(training),
        tokens=sum(int(corpus.offsets[-1]) for corpus in training),
        examples=examples,
        epochs=epochs,
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )
    if held_out is None:
        return found
    return dataclasses.replace(
        found,
        held_out=len(held_out.lengths()),
        held_out_bytes=held_out.num_bytes,
        held_out_tokens=int(held_out.offsets[-1]),
        duplicates=_duplicates(all_training, held_out),
    )


def _bytes(corpora: list[Corpus]) -> int | None:
    known = [corpus.num_bytes for corpus in corpora if corpus.num_bytes is not None]
    return sum(known) if known and len(known) == len(corpora) else None


def _duplicates(training: list[Corpus], held_out: Corpus) -> int | None:
    known = [corpus.hashes for corpus in training if corpus.hashes is not None]
    if held_out.hashes is None or not known:
        return None
    return int(np.isin(held_out.hashes, np.concatenate(known)).sum())


def _amount(documents: int, num_bytes: int | None, tokens: int) -> str:
    text = "" if num_bytes is None else f", {num_bytes:,} bytes"
    return f"{documents:,} documents{text}, {tokens:,} tokens"
