"""Rows: several examples in one, and the features that a model is given of them.

Two examples of 3 and 2 tokens in a row of length 6:

    tokens         0  a  b   0  c   0         segment_ids   1 1 1 2 2 0
    targets        a  b  .   c  .   0         positions     0 1 2 0 1 0
    loss_weights   1  1  1   1  1   0         bidirectional 0 0 0 0 0 0

The target of a document's last token is its own end, never the next document's first token.
Patches of a picture stand before the tokens of their own example, in its segment. A row has a
stated number of slots for patches, so that all batches have one shape; a picture that finds none
goes to a row that has. The second example above with a picture of 2 patches, in a row of length 8:

    tokens         0 a b - - 0 c 0        segment_ids   1 1 1 2 2 2 2 0
    patch_mask     0 0 0 1 1 0 0 0        positions     0 1 2 0 1 2 3 0

Plain functions over numpy, not a `seqio.FeatureConverter`: packing in tf.data keeps its open rows
where they cannot be saved exactly, and looks at every token where their number is enough.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from m6jax.data.preprocessors import Example

# Axis letters: B rows of a batch, T length of a row, I slots for patches in a row, F features of a
# patch.

T = TypeVar("T")

FEATURES: dict[str, Any] = {
    "tokens": np.int32,
    "targets": np.int32,
    "loss_weights": np.float32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "bidirectional": np.int32,
}


class Room(NamedTuple):
    """What examples take of a row, or a row has: tokens (positions of any kind) and pictures."""

    tokens: int
    pictures: int = 0

    @classmethod
    def of(cls, parts: Iterable["Room"]) -> "Room":
        """Returns what all parts take together."""
        return functools.reduce(cls.plus, parts, cls(0))

    def plus(self, other: "Room") -> "Room":
        """Returns the sum."""
        return Room(self.tokens + other.tokens, self.pictures + other.pictures)

    def fits(self, other: "Room") -> bool:
        """Whether this is no more than `other`, in tokens and in pictures."""
        return self.tokens <= other.tokens and self.pictures <= other.pictures


@dataclasses.dataclass
class OpenRow(Generic[T]):
    """A row that has room left: its `items`, and the tokens and pictures that they take."""

    items: list[T]
    used: Room


def first_fit(
    items: Iterable[tuple[T, Room]], room: Room, open_rows: list[OpenRow[T]], most_open: int
) -> Iterator[list[T]]:
    """Packs items into rows, each into the oldest open row that has room for it.

    Args:
      items: pairs of an item and what it takes, at least one token.
      room: what a row has.
      open_rows: rows begun before; left holding those that are open at the end.
      most_open: before one more would be opened, the fullest is closed. With 1 the items keep
        their order.

    Yields:
      The items of each row as it is closed; those still open at the end are the caller's.
    """
    for item, size in items:
        row = next((r for r in open_rows if r.used.plus(size).fits(room)), None)
        if row is None:
            if len(open_rows) == most_open:
                fullest = max(open_rows, key=lambda r: r.used.tokens)
                open_rows.remove(fullest)
                yield fullest.items
            row = OpenRow([], Room(0))
            open_rows.append(row)
        row.items.append(item)
        row.used = row.used.plus(size)
        if row.used.tokens == room.tokens:
            open_rows.remove(row)
            yield row.items


@dataclasses.dataclass(frozen=True)
class RowShape:
    """What a row is made of.

    Attributes:
      length: T.
      pad_id: the id that fills tokens and targets.
      pictures: of a row, at most.
      slots: I, for patches.
      patch_dim: F.
    """

    length: int
    pad_id: int
    pictures: int = 0
    slots: int = 0
    patch_dim: int = 0

    @property
    def room(self) -> Room:
        """What a row has for examples."""
        return Room(self.length, self.pictures)


def to_features(rows: Sequence[Sequence[Example]], shape: RowShape) -> dict[str, np.ndarray]:
    """Returns the features of rows of examples; a row of no examples is all padding.

    Args:
      rows: the examples of each row, together no longer than T and with at most I patches.
      shape: of a row.

    Returns:
      `FEATURES`, each [B, T]; with I > 0 `patch_mask` int32 [B, T], 1 where a patch stands, and
      `patches` float32 [B, I, F], which fills them in order.
    """
    flat = (len(rows), shape.length)
    features: dict[str, np.ndarray] = {
        name: np.zeros(flat, dtype) for name, dtype in FEATURES.items()
    }
    features["tokens"].fill(shape.pad_id)
    features["targets"].fill(shape.pad_id)
    if shape.slots:
        features["patch_mask"] = np.zeros(flat, np.int32)
        features["patches"] = np.zeros((len(rows), shape.slots, shape.patch_dim), np.float32)
    for b, row in enumerate(rows):
        views = {name: values[b] for name, values in features.items()}
        at = slot = 0
        for segment, example in enumerate(row, start=1):
            _place(views, at, slot, segment, example)
            at += example.length
            slot += len(example.patches)
    return features


def _place(row: dict[str, np.ndarray], at: int, slot: int, segment: int, example: Example) -> None:
    """Writes an example into a row's features, from a position and a slot on."""
    first, end = at + len(example.patches), at + example.length
    if len(example.patches):
        row["patch_mask"][at:first] = 1
        row["patches"][slot : slot + len(example.patches)] = example.patches
    row["tokens"][first:end] = example.tokens
    row["targets"][first:end] = example.targets
    row["segment_ids"][at:end] = segment
    row["positions"][at:end] = np.arange(example.length)
    if example.prefix:
        row["bidirectional"][at : min(first + example.prefix, end)] = 1
    # The last input of the prefix predicts the first token after it: that one counts.
    row["loss_weights"][first + max(example.prefix - 1, 0) : end] = 1
