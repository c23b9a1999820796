"""Rows for training and for evaluation, as features, for one of several processes.

rows = data.train_rows(process_index=0, process_count=2)
batch = rows.take(8)        # the first 4 of the next 8 rows; process 1 gets the other 4
state = rows.state()        # to be saved, by any process
rows.restore(state)         # here or elsewhere, on any number of processes
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from m6jax.data.examples import Examples
from m6jax.data.feature_converters import Room, RowShape, first_fit, to_features
from m6jax.data.order import Order, Place
from m6jax.data.prefetch import Prefetcher
from m6jax.data.randomness import fold
from m6jax.foundation.validated import ConfigError

# Axis letters: B rows of a batch, T length of a row.

_EVALUATION_KEY = 0xE7A1  # held-out examples are cut and split alike in every evaluation


class TrainRows:
    """An endless stream of training rows.

    Rows that were made ahead in the background do not count as taken.

    Attributes:
      examples: of each source, one for every part of it.

    Args:
      order: of all rows.
      examples: of each source.
      shape: of a row.
      fingerprint: of all that decides the rows; kept in the state.
      process_index: of this process.
      process_count: over how many processes the rows are dealt.
      prefetch: batches to make ahead; 0 makes each when it is asked for.
    """

    def __init__(
        self,
        order: Order,
        examples: Sequence[Examples],
        *,
        shape: RowShape,
        fingerprint: str,
        process_index: int,
        process_count: int,
        prefetch: int,
    ):
        _check_processes(process_index, process_count)
        self._maker = _BatchMaker(order, examples, shape, process_index, process_count)
        self.examples = tuple(examples)
        self._order = order
        self._fingerprint = fingerprint
        self._process_count = process_count
        self._prefetch = prefetch
        self._place = order.begin()
        self._rows_taken = 0
        self._ahead: Prefetcher[tuple[dict[str, np.ndarray], Place]] | None = None
        self._end_ahead: weakref.finalize | None = None
        self._ahead_rows = 0

    def take(self, num_rows: int) -> dict[str, np.ndarray]:
        """Returns this process's share of the next `num_rows` rows of the one global order.

        Args:
          num_rows: over all processes; may differ from call to call, but asking for another number
            throws away what was made ahead.

        Returns:
          The features, each [num_rows / process_count, T], see `feature_converters`.

        Raises:
          ConfigError: `num_rows` is not a positive multiple of the number of processes.
        """
        if num_rows < 1 or num_rows % self._process_count:
            raise ConfigError(
                f"the number of rows, {num_rows}, must be a positive multiple of the number of "
                f"processes, {self._process_count}"
            )
        if self._prefetch:
            batch, self._place = self._made_ahead(num_rows).get()
        else:
            batch, self._place = self._maker.make(self._place, num_rows)
        self._rows_taken += num_rows
        return batch

    @property
    def fingerprint(self) -> str:
        """Stands for all that decides the rows."""
        return self._fingerprint

    def state(self) -> dict[str, Any]:
        """Returns the place after the last row taken, JSON-able, the same in every process."""
        return {
            "fingerprint": self._fingerprint,
            "rows_taken": self._rows_taken,
            "place": self._place.to_json(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place of a `state`: the rows that follow are those that followed there.

        Raises:
          ConfigError: the state is of other data, another seed or other settings of the data.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise ConfigError(
                "the saved place is in other training data: its fingerprint is "
                f"{state.get('fingerprint')!r}, that of this data {self._fingerprint!r}; files, "
                "vocabulary, rates, objective, length, packing, seed and shards must be the same"
            )
        self.close()
        self._place = Place.from_json(state.get("place"))
        self._rows_taken = int(state["rows_taken"])

    def counts(self) -> dict[str, int]:
        """Returns tokens in, out, dropped and waiting so far; in = out + dropped + waiting."""
        return self._order.counts(self._place)

    @property
    def skipped(self) -> tuple[str, ...]:
        """A line for every source of which records could not be used."""
        return tuple(e.left_out for e in self.examples if e.left_out is not None)

    def peek(self, num_rows: int = 1) -> dict[str, np.ndarray]:
        """Returns features of the next rows, for each process as many; none is taken."""
        return self._maker.make(self._place, num_rows * self._process_count)[0]

    def epochs(self, num_rows: int) -> list[float]:
        """Returns how often each example of `examples` comes in so many rows."""
        return self._order.epochs(num_rows, self.filled())

    def filled(self, num_rows: int = 256) -> float:
        """Returns which part of the positions of the next rows is used; none is taken."""
        return self._order.filled(self._place, num_rows)

    def close(self) -> None:
        """Ends the background thread; `take` starts it again."""
        if self._end_ahead is not None:
            self._end_ahead()
        self._ahead = self._end_ahead = None

    def _made_ahead(self, num_rows: int) -> Prefetcher[tuple[dict[str, np.ndarray], Place]]:
        if self._ahead is not None and self._ahead_rows != num_rows:
            self.close()
        if self._ahead is None:
            batches = self._maker.batches(self._place, num_rows)
            self._ahead = Prefetcher(batches.__next__, self._prefetch)
            self._ahead_rows = num_rows
            # The thread knows nothing of this object, so that it can be collected and end it.
            self._end_ahead = weakref.finalize(self, self._ahead.close)
        return self._ahead


class _BatchMaker:
    """Reads the tokens of planned rows and makes features of this process's share."""

    def __init__(
        self,
        order: Order,
        examples: Sequence[Examples],
        shape: RowShape,
        process_index: int,
        process_count: int,
    ):
        self._order = order
        self._examples = examples
        self._shape = shape
        self._process_index = process_index
        self._process_count = process_count

    def make(self, place: Place, num_rows: int) -> tuple[dict[str, np.ndarray], Place]:
        """Returns the features of this process's share and the place after all the rows."""
        rows, after = self._order.rows(place, num_rows)
        share = num_rows // self._process_count
        mine = rows[self._process_index * share : (self._process_index + 1) * share]
        made = [
            [self._examples[i.source].example(i.example, self._order.key(i)) for i in row]
            for row in mine
        ]
        return to_features(made, self._shape), after

    def batches(self, place: Place, num_rows: int) -> Iterator[tuple[dict[str, np.ndarray], Place]]:
        """Yields batch after batch, each with the place after it."""
        while True:
            batch, place = self.make(place, num_rows)
            yield batch, place


def evaluation_batches(
    examples: Examples,
    batch_size: int,
    *,
    shape: RowShape,
    packing: bool,
    process_index: int,
    process_count: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's share of every held-out example, once and in order.

    Rows of padding fill the last batch, so all batches have one shape and every process makes the
    same number of them.

    Args:
      examples: of the held-out documents.
      batch_size: rows of a batch over all processes; rounded up to a multiple of their number.
      shape: of a row.
      packing: whether a row holds as many examples as follow each other and fit, or one.
      process_index: of this process.
      process_count: over how many processes the rows are dealt.

    Raises:
      ConfigError: `batch_size` is not positive, or there is no such process.
    """
    _check_processes(process_index, process_count)
    if batch_size < 1:
        raise ConfigError(f"the rows of an evaluation batch, {batch_size}, must be positive")
    share = -(-batch_size // process_count)
    rows = _rows_in_order(examples, shape.room, packing)
    return (
        to_features(
            [
                [examples.example(n, fold(_EVALUATION_KEY, n)) for n in row]
                for row in batch[process_index * share : (process_index + 1) * share]
            ],
            shape,
        )
        for batch in _filled_batches(rows, share * process_count)
    )


def _check_processes(process_index: int, process_count: int) -> None:
    """Checks that there is such a process."""
    if not 0 <= process_index < process_count:
        raise ConfigError(f"process_index {process_index} is not in 0 ... {process_count - 1}")


def _rows_in_order(examples: Examples, room: Room, packing: bool) -> Iterator[list[int]]:
    def sized() -> Iterator[tuple[int, Room]]:
        for start in range(0, examples.count, 1024):
            numbers = np.arange(start, min(start + 1024, examples.count))
            sizes, _ = examples.sizes(numbers)
            for number, size in zip(
                numbers[sizes > 0].tolist(), sizes[sizes > 0].tolist(), strict=True
            ):
                yield number, Room(size, examples.num_pictures)

    if not packing:
        yield from ([number] for number, _ in sized())
        return
    open_rows: list[Any] = []
    yield from first_fit(sized(), room, open_rows, most_open=1)
    yield from (row.items for row in open_rows)


def _filled_batches(rows: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    while batch := list(itertools.islice(rows, size)):
        yield batch + [[] for _ in range(size - len(batch))]
