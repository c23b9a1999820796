import itertools
import threading

import pytest

from m6jax.data.prefetch import Prefetcher


def test_in_order_and_no_further_than_asked():
    made = []
    enough = threading.Event()
    numbers = itertools.count()
    before = set(threading.enumerate())

    def produce():
        made.append(next(numbers))
        if len(made) == 5:
            enough.set()
        return made[-1]

    ahead = Prefetcher(produce, depth=3)
    assert [ahead.get(), ahead.get()] == [0, 1]
    assert enough.wait(10)  # two taken and three ready
    ahead.close()
    assert made == [0, 1, 2, 3, 4]
    assert set(threading.enumerate()) <= before


def test_an_error_comes_in_its_turn_and_stays():
    numbers = iter([1, 2])
    ahead = Prefetcher(lambda: 1 // (2 - next(numbers)), depth=4)
    assert ahead.get() == 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ahead.get()
    ahead.close()
