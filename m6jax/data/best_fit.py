"""Best-fit packing: a row is filled with the largest of the next examples that fit.

Of examples of 5, 4, 3 and 2 tokens and rows of 7, `first_fit` with one open row makes 5, 4+3, 2;
best-fit begins a row with the oldest example, looks at the others that wait and makes 5+2, 4+3. An
example waits no longer than those before it last, since the oldest always begins the next row.
"""

import bisect
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from m6jax.data.feature_converters import Room

T = TypeVar("T")


def best_fit(
    items: Iterable[tuple[T, Room]], room: Room, waiting: list[tuple[T, Room]], look_ahead: int
) -> Iterator[list[T]]:
    """Packs items into rows; a row is made whenever `look_ahead` items wait.

    Args:
      items: pairs of an item and what it takes, at least one token.
      room: what a row has.
      waiting: items of before, oldest first; left holding those that wait at the end.
      look_ahead: items to choose from, at least 1.

    Yields:
      The items of each row.
    """
    pool = _Pool(waiting)
    for item, size in items:
        pool.add(item, size)
        if len(pool) >= look_ahead:
            yield pool.take_row(room)
    waiting[:] = pool.left()


class _Pool(Generic[T]):
    """Items that wait, found by age and by size."""

    def __init__(self, items: Iterable[tuple[T, Room]]):
        self._by_age: dict[int, tuple[T, Room]] = {}
        self._by_size: list[tuple[int, int]] = []  # (tokens, -age), so that the oldest comes last
        self._added = 0
        for item, size in items:
            self.add(item, size)

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, item: T, size: Room) -> None:
        self._by_age[self._added] = item, size
        bisect.insort(self._by_size, (size.tokens, -self._added))
        self._added += 1

    def left(self) -> list[tuple[T, Room]]:
        return list(self._by_age.values())

    def take_row(self, room: Room) -> list[T]:
        """Takes out the oldest item, then the largest that fits, again and again."""
        age = next(iter(self._by_age))
        size = self._by_age[age][1]
        row, used = [], Room(0)
        at: int | None = bisect.bisect_left(self._by_size, (size.tokens, -age))
        while at is not None:
            _, negative = self._by_size.pop(at)
            item, size = self._by_age.pop(-negative)
            row.append(item)
            used = used.plus(size)
            at = self._largest(room, used)
        return row

    def _largest(self, room: Room, used: Room) -> int | None:
        """Returns where in `_by_size` the largest item is that fits beside what is used."""
        free = room.tokens - used.tokens
        for at in range(bisect.bisect_right(self._by_size, (free, 0)) - 1, -1, -1):
            _, negative = self._by_size[at]
            if used.plus(self._by_age[-negative][1]).fits(room):
                return at
        return None
