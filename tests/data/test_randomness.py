import numpy as np
import pytest

from m6jax.data.randomness import fold, permuted, random_bits, uniform


def test_numbers_are_for_ever():
    """Changing these changes the data of every run."""
    assert fold() == 16294208416658607535
    assert fold(1, 2) == 13586867223309004298
    assert random_bits(fold(1), np.arange(2)).tolist() == [
        14354219769793070295,
        2170460981747891340,
    ]


def test_fold_tells_sequences_apart():
    keys = [fold(*parts) for parts in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,)]]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_uniform_is_even():
    numbers = uniform(fold(3), np.arange(100_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts - 10_000).max() < 400  # four standard deviations are 380


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_permutation(size):
    image = permuted(fold(5), np.arange(size), size)
    assert sorted(image.tolist()) == list(range(size))
    assert permuted(fold(5), np.array([size - 1]), size)[0] == image[-1]


def test_permutations_differ_and_are_even():
    """First image of 8 under 4,000 keys: each 500 times, give or take 4 standard deviations."""
    first = [int(permuted(fold(i), np.zeros(1, np.int64), 8)[0]) for i in range(4000)]
    assert abs(np.bincount(first, minlength=8) - 500).max() < 84
    pairs = {tuple(permuted(fold(i), np.arange(4), 4).tolist()) for i in range(1000)}
    assert len(pairs) == 24  # all orders of four


def test_large_ranges_take_no_memory():
    image = permuted(fold(1), np.arange(1000), 10**12)
    assert image.max() < 10**12
    assert len(set(image.tolist())) == 1000
