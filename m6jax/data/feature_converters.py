"""Rows: several examples in one, and the features that a model is given of them.

Two examples of 3 and 2 tokens in a row of length 6:

    tokens         0  a  b   0  c   0         segment_ids   1 1 1 2 2 0
    targets        a  b  .   c  .   0         positions     0 1 2 0 1 0
    loss_weights   1  1  1   1  1   0         bidirectional 0 0 0 0 0 0

The target of a document's last token is its own end, never the next document's first token. Plain
functions over numpy, not a `seqio.FeatureConverter`: packing in tf.data keeps its open rows where
they cannot be saved exactly, and looks at every token where their number is enough.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from m6jax.data.preprocessors import Example

# Axis letters: B rows of a batch, T length of a row.

T = TypeVar("T")

FEATURES: dict[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "loss_weights": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "bidirectional": np.int32,
}


@dataclasses.dataclass
class OpenRow(Generic[T]):
    """A row that has room left: its `items` and the tokens they take."""

    items: list[T]
    used: int


def first_fit(
    items: Iterable[tuple[T, int]], length: int, open_rows: list[OpenRow[T]], most_open: int
) -> Iterator[list[T]]:
    """Packs items into rows, each into the oldest open row that has room for it.

    Args:
      items: pairs of an item and its number of tokens, 1 to `length`.
      length: tokens of a row.
      open_rows: rows begun before; left holding those that are open at the end.
      most_open: before one more would be opened, the fullest is closed. With 1 the items keep
        their order.

    Yields:
      The items of each row as it is closed; those still open at the end are the caller's.
    """
    for item, size in items:
        row = next((r for r in open_rows if r.used + size <= length), None)
        if row is None:
            if len(open_rows) == most_open:
                fullest = max(open_rows, key=lambda r: r.used)
                open_rows.remove(fullest)
                yield fullest.items
            row = OpenRow([], 0)
            open_rows.append(row)
        row.items.append(item)
        row.used += size
        if row.used == length:
            open_rows.remove(row)
            yield row.items


def to_features(
    rows: Sequence[Sequence[Example]], length: int, pad_id: int
) -> dict[str, np.ndarray]:
    """Returns the features of rows of examples, each [B, T]; a row of no examples is all padding.

    Args:
      rows: the examples of each row, together no longer than `length`.
      length: T.
      pad_id: the id that fills tokens and targets.
    """
    shape = (len(rows), length)
    features: dict[str, np.ndarray] = {
        name: np.zeros(shape, dtype) for name, dtype in FEATURES.items()
    }
    features["tokens"].fill(pad_id)
    features["targets"].fill(pad_id)
    for b, row in enumerate(rows):
        at = 0
        for segment, example in enumerate(row, start=1):
            _place(features, b, at, segment, example)
            at += len(example.tokens)
    return features


def _place(
    features: dict[str, np.ndarray], row: int, at: int, segment: int, example: Example
) -> None:
    n = len(example.tokens)
    here = slice(at, at + n)
    features["tokens"][row, here] = example.tokens
    features["targets"][row, here] = example.targets
    features["segment_ids"][row, here] = segment
    features["positions"][row, here] = np.arange(n)
    features["bidirectional"][row, at : at + example.prefix] = 1
    # The last input of the prefix predicts the first token after it: that one counts.
    features["loss_weights"][row, at + max(example.prefix - 1, 0) : at + n] = 1
