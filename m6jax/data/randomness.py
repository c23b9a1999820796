"""Random numbers that are a function of their place: no state to carry, save or share.

The n-th number under a key is a hash of (key, n), so any process can ask for any of them, and the
numbers are those of this file for ever (numpy's generators may change between versions).

>>> random_bits(fold(7, 1), np.arange(4))[2:] == random_bits(fold(7, 1), np.arange(2, 4))
array([ True,  True])

The hash is the finaliser of splitmix64 (Steele et al., 2014, "Fast splittable pseudorandom number
generators"). Permutations are Feistel networks over it (Luby and Rackoff, 1988), walked until they
land inside the range, so that shuffling a billion things takes no memory.
"""

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FEISTEL_ROUNDS = 6


def fold(*parts: int) -> int:
    """Returns a 64-bit key made of 64-bit integers, another for another sequence of them."""
    key = 0
    for part in (len(parts), *parts):
        key ^= (part + 1) * _GOLDEN & _MASK
        # _mix, on one integer of Python's: this runs once an example, and numpy is slow on scalars
        key = (key ^ key >> 30) * _MIX_1 & _MASK
        key = (key ^ key >> 27) * _MIX_2 & _MASK
        key ^= key >> 31
    return key


def random_bits(key: int, index: np.ndarray) -> np.ndarray:
    """Returns uint64, 64 random bits for each non-negative integer in `index`."""
    return _mix(index.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


def uniform(key: int, index: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), one for each integer in `index`."""
    return (random_bits(key, index) >> np.uint64(11)) * 2.0**-53


def permuted(key: int, index: np.ndarray, size: int) -> np.ndarray:
    """Returns int64, the images of `index` under a random permutation of `range(size)`."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = [fold(key, i) for i in range(_FEISTEL_ROUNDS)]
    image = _feistel(index.astype(np.uint64), half, keys)
    # The network permutes the next power of four; following it from inside the range until it is
    # inside again is a permutation of the range.
    while len(outside := np.flatnonzero(image >= np.uint64(size))):
        image[outside] = _feistel(image[outside], half, keys)
    return image.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, keys: list[int]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (random_bits(key, right) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))
