"""A run's rows to look at: decoded with segments and weights, padding, lengths of examples."""

from collections.abc import Iterator, Mapping

import numpy as np

from m6jax.data.config import TextData
from m6jax.data.examples import Examples
from m6jax.data.overview import describe, segment_text
from m6jax.data.vocab import Vocabulary

_ROWS_SHOWN = 4
_ROWS_COUNTED = 256
_BAR = 40  # signs of the longest bar


def inspect(data: TextData, num_rows: int) -> Iterator[str]:
    """Yields the lines of `--mode=data`.

    Args:
      data: the setting.
      num_rows: that the run will take.
    """
    rows, vocabulary = data.train_rows(), data.vocab()
    yield from (f"data     {line}" for line in describe(data, rows, num_rows))
    many = rows.peek(_ROWS_COUNTED)
    used = many["segment_ids"] > 0
    yield (
        f"rows     of the next {_ROWS_COUNTED}: {1 - used.mean():.1%} of the positions are padding,"
        f" {many['segment_ids'].max(1).mean():.1f} examples a row, loss on"
        f" {(many['loss_weights'] > 0).mean():.1%} of the positions"
    )
    for b in range(_ROWS_SHOWN):
        yield from _row(many, b, vocabulary)
    for examples in rows.examples:
        yield from _lengths(examples)


def _row(features: Mapping[str, np.ndarray], b: int, vocabulary: Vocabulary) -> Iterator[str]:
    segments, weights = features["segment_ids"][b], features["loss_weights"][b]
    number = int(segments.max(initial=0))
    yield (
        f"row {b:<4} positions {len(segments)}, empty {int((segments == 0).sum())}, examples"
        f" {number}, with loss {int((weights > 0).sum())}"
    )
    for segment in range(1, number + 1):
        text = segment_text(features, b, segment, vocabulary)
        inside = segments == segment
        loss = _span(inside & (weights > 0))
        yield f"  {segment:<6} {_span(inside)}, loss on {loss}: {text}"


def _span(chosen: np.ndarray) -> str:
    """Returns the first and the last position that is chosen."""
    found = np.flatnonzero(chosen)
    return f"{found[0]}-{found[-1]}" if len(found) else "none"


def _lengths(examples: Examples) -> Iterator[str]:
    """Yields a histogram of the lengths of a source's examples, by powers of two."""
    lengths, _ = examples.sizes(np.arange(examples.count))
    ends = 2 ** np.arange(int(lengths.max(initial=1)).bit_length() + 1)
    counts = np.bincount(np.searchsorted(ends, lengths[lengths > 0]), minlength=len(ends))
    yield f"lengths  {examples.name}: {examples.count:,} examples, in positions"
    for i in np.flatnonzero(counts).tolist():
        first = int(ends[i - 1]) + 1 if i else 1
        bar = "#" * max(1, round(_BAR * counts[i] / counts.max()))
        yield f"  {first:>6} - {ends[i]:<6} {counts[i]:>9,}  {bar}"
    if not lengths.all():
        yield f"  unusable        {int((lengths == 0).sum()):>9,}"
