"""The one order of training examples, and the rows that they are packed into.

The seed alone decides it: which source comes next (drawn by the rates), which of its examples (each
once an epoch, every epoch in a new order), and which row it is packed into. Nothing depends on how
many processes there are or how many rows a batch has. Rows are planned in rounds:

    draw 128 examples a shard  ->  deal them to the shards in turn  ->  pack inside each shard
    ->  deal the rows: the first of shard 0, of shard 1, ..., the second of shard 0, ...

Rows that are open at the end of a round go on in the next; with best-fit packing they are single
examples that wait, among which the next rows' are chosen. A plan holds numbers of examples and no
tokens (planning takes about five millionths of a second an example), so every process plans all
rows and reads only its own; and a `Place`, from which all that follows can be planned again, is a
few hundred numbers.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from m6jax.data.best_fit import best_fit
from m6jax.data.examples import Examples
from m6jax.data.feature_converters import OpenRow, Room, first_fit
from m6jax.data.randomness import fold, permuted, uniform
from m6jax.foundation.validated import ConfigError

_DRAWN_A_SHARD = 128
_MOST_OPEN = 8
_DRAW, _SHUFFLE, _EXAMPLE = range(3)  # what a random key is for


class Item(NamedTuple):
    """An example in the order: number of the source, epoch, number of the example."""

    source: int
    epoch: int
    example: int


class Size(NamedTuple):
    """What an example takes: length of its sequence, 0 if it has none, pictures, text's tokens."""

    length: int
    pictures: int
    units: int

    @property
    def room(self) -> Room:
        """What it takes of a row."""
        return Room(self.length, self.pictures)


Row = tuple[Item, ...]


@dataclasses.dataclass(frozen=True)
class RoundStart:
    """All that decides a round and those after it.

    Attributes:
      number: of the round.
      drawn: examples drawn so far, for each source.
      open_rows: rows begun and not closed, for each shard.
      tokens_in: tokens of the examples drawn so far.
      tokens_out: tokens of the rows so far.
      tokens_dropped: tokens of examples that the objective could make nothing of.
    """

    number: int
    drawn: tuple[int, ...]
    open_rows: tuple[tuple[Row, ...], ...]
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_dropped: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the order of rows: `row` rows after the start of a round."""

    start: RoundStart
    row: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the place as numbers, lists and dicts."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, value: Any) -> "Place":
        """Returns the place that `to_json` gave `value`.

        Raises:
          ConfigError: `value` is something else.
        """
        try:
            start = dict(value["start"])
            start["drawn"] = tuple(start["drawn"])
            start["open_rows"] = tuple(
                tuple(tuple(Item(*item) for item in row) for row in shard)
                for shard in start["open_rows"]
            )
            return cls(RoundStart(**start), value["row"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is not a place in the training data: {error!r}") from error


class Round(NamedTuple):
    """A planned round: its rows, the tokens in each, and the start of the next round."""

    rows: list[Row]
    tokens: list[int]
    next_start: RoundStart


class Order:
    """Plans the rows of a training run.

    Args:
      examples: of each source.
      rates: how often to draw from each source, any positive numbers.
      room: what a row has.
      packing: whether a row holds as many examples as fit, or one.
      look_ahead: examples of a shard that a row is chosen from; 0: each goes into the first row
        that has room.
      seed: decides everything.
      shards: how many streams the order is cut into.
    """

    def __init__(
        self,
        examples: Sequence[Examples],
        rates: Sequence[float],
        *,
        room: Room,
        packing: bool,
        look_ahead: int,
        seed: int,
        shards: int,
    ):
        self._examples = examples
        self._rates = np.array(rates, np.float64) / np.sum(rates)
        self._cumulative = np.cumsum(rates) / np.sum(rates)
        self._cumulative[-1] = 1.0  # rounding must not leave a gap below 1
        self._room = room
        self._packing = packing
        self._look_ahead = look_ahead
        self._seed = seed
        self._shards = shards
        self._last: tuple[RoundStart, Round] | None = None

    def begin(self) -> Place:
        """Returns the place of the first row."""
        return Place(RoundStart(0, (0,) * len(self._examples), ((),) * self._shards))

    def rows(self, place: Place, count: int) -> tuple[list[Row], Place]:
        """Returns the next `count` rows and the place after them."""
        rows: list[Row] = []
        while len(rows) < count:
            planned = self._round(place.start)
            taken = planned.rows[place.row : place.row + count - len(rows)]
            rows += taken
            place = Place(place.start, place.row + len(taken))
            if place.row == len(planned.rows):
                place = Place(planned.next_start)
        return rows, place

    def counts(self, place: Place) -> dict[str, int]:
        """Returns `tokens_in`, `tokens_out`, `tokens_dropped` and `tokens_waiting` at a place.

        Waiting are those in rows that are open, or planned and not yet taken.
        """
        planned = self._round(place.start)
        after = planned.next_start
        open_items = _items(after.open_rows)
        sizes = self._sizes(open_items)
        return {
            "tokens_in": after.tokens_in,
            "tokens_out": place.start.tokens_out + sum(planned.tokens[: place.row]),
            "tokens_dropped": after.tokens_dropped,
            "tokens_waiting": sum(planned.tokens[place.row :])
            + sum(sizes[item].units for item in open_items),
        }

    def filled(self, place: Place, count: int) -> float:
        """Returns which part of the positions of the next `count` rows is used."""
        rows, _ = self.rows(place, count)
        sizes = self._sizes([item for row in rows for item in row])
        used = sum(sizes[item].length for row in rows for item in row)
        return used / (len(rows) * self._room.tokens)

    def epochs(self, num_rows: int, filled: float) -> list[float]:
        """Returns how often each example of every source comes in so many rows, on average.

        Args:
          num_rows: of the run.
          filled: which part of their positions is used.
        """
        lengths = [float(e.sizes(np.arange(e.count))[0].mean()) for e in self._examples]
        drawn = num_rows * self._room.tokens * filled / float(self._rates @ np.array(lengths))
        pairs = zip(self._rates.tolist(), self._examples, strict=True)
        return [drawn * rate / examples.count for rate, examples in pairs]

    def key(self, item: Item) -> int:
        """Returns the random key of an example, another in every epoch."""
        return fold(self._seed, _EXAMPLE, *item)

    def _round(self, start: RoundStart) -> Round:
        last = self._last  # another thread may put its own there at any time
        if last is None or last[0] != start:
            last = self._last = start, self._plan(start)
        return last[1]

    def _plan(self, start: RoundStart) -> Round:
        items, drawn = self._draw(start)
        sizes = self._sizes([*_items(start.open_rows), *items])
        by_shard, open_rows = [], []
        for shard, begun in enumerate(start.open_rows):
            closed, left = self._pack(items[shard :: self._shards], begun, sizes)
            by_shard.append(closed)
            open_rows.append(left)
        dealt = itertools.chain.from_iterable(itertools.zip_longest(*by_shard))
        rows = [row for row in dealt if row is not None]
        tokens = [sum(sizes[item].units for item in row) for row in rows]
        after = RoundStart(
            number=start.number + 1,
            drawn=drawn,
            open_rows=tuple(open_rows),
            tokens_in=start.tokens_in + sum(sizes[i].units for i in items),
            tokens_out=start.tokens_out + sum(tokens),
            tokens_dropped=start.tokens_dropped
            + sum(sizes[i].units for i in items if not sizes[i].length),
        )
        return Round(rows, tokens, after)

    def _pack(
        self, items: list[Item], begun: tuple[Row, ...], sizes: dict[Item, Size]
    ) -> tuple[list[Row], tuple[Row, ...]]:
        """Returns the rows that a shard closes in a round and those it leaves open."""
        usable = [item for item in items if sizes[item].length]
        if not self._packing:
            return [(item,) for item in usable], ()
        pairs = ((item, sizes[item].room) for item in usable)
        if self._look_ahead:
            waiting = [(item, sizes[item].room) for row in begun for item in row]
            rows = [tuple(row) for row in best_fit(pairs, self._room, waiting, self._look_ahead)]
            return rows, tuple((item,) for item, _ in waiting)
        open_rows = [OpenRow(list(row), Room.of(sizes[i].room for i in row)) for row in begun]
        closed = [tuple(row) for row in first_fit(pairs, self._room, open_rows, _MOST_OPEN)]
        return closed, tuple(tuple(row.items) for row in open_rows)

    def _draw(self, start: RoundStart) -> tuple[list[Item], tuple[int, ...]]:
        """Returns the examples of a round and how many were drawn of each source after it."""
        place = np.arange(self._shards * _DRAWN_A_SHARD)
        chance = uniform(fold(self._seed, _DRAW, start.number), place)
        source = np.searchsorted(self._cumulative, chance, side="right")
        epoch, example = np.zeros_like(place), np.zeros_like(place)
        drawn = list(start.drawn)
        for s, examples in enumerate(self._examples):
            mine = np.flatnonzero(source == s)
            turn = drawn[s] + np.arange(len(mine))
            drawn[s] += len(mine)
            epoch[mine] = turn // examples.count
            for e in np.unique(epoch[mine]).tolist():
                now = mine[epoch[mine] == e]
                key = fold(self._seed, _SHUFFLE, s, e)
                inside = turn[epoch[mine] == e] % examples.count
                example[now] = permuted(key, inside, examples.count)
        columns = (source.tolist(), epoch.tolist(), example.tolist())
        return [Item(*item) for item in zip(*columns, strict=True)], tuple(drawn)

    def _sizes(self, items: Sequence[Item]) -> dict[Item, Size]:
        table = np.array(items, np.int64).reshape(-1, 3)
        lengths, pictures, units = np.zeros((3, len(items)), np.int64)
        for s, examples in enumerate(self._examples):
            mine = table[:, 0] == s
            lengths[mine], units[mine] = examples.sizes(table[mine, 2])
            pictures[mine] = examples.num_pictures
        columns = lengths.tolist(), pictures.tolist(), units.tolist()
        return dict(zip(items, map(Size, *columns), strict=True))


def _items(open_rows: tuple[tuple[Row, ...], ...]) -> list[Item]:
    return [item for shard in open_rows for row in shard for item in row]
