"""Leaves in host memory: saved and restored in place, a few pieces at a time.

orbax hands all pieces of a leaf to its writer at once, and each of them is copied: a second copy of
a state that rests on the host, where there is room for one. Here a process writes the pieces of its
shards one after another, with a bounded number of bytes under way, and reads one shard after
another:

    for shard in leaf.addressable_shards:              those of replica 0, once over all processes
        for index in pieces of the shard:
            write values[index]                        wait where enough bytes are under way

On disk such a leaf is the same as any other.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from m6jax.checkpointing.pieces import Index, PieceReader, assemble


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """A leaf on the host that is to be saved.

    Attributes:
      array: jax array in host memory.
      piece: shape of a piece; divides that of a shard along every axis.
    """

    array: jax.Array
    piece: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""
        return np.dtype(self.array.dtype)

    def parts(self) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the pieces of this process's shards: where in the whole leaf, and their values."""
        for shard in self.array.addressable_shards:
            if shard.replica_id != 0:
                continue
            values = np.asarray(shard.data)  # the memory itself where it can be had
            starts = [part.start or 0 for part in shard.index]
            counts = (n // step for n, step in zip(values.shape, self.piece, strict=True))
            for number in itertools.product(*map(range, counts)):
                inside = tuple(
                    slice(i * step, (i + 1) * step)
                    for i, step in zip(number, self.piece, strict=True)
                )
                whole = tuple(
                    slice(start + part.start, start + part.stop)
                    for start, part in zip(starts, inside, strict=True)
                )
                yield whole, values[inside]


def piece_of(array: jax.Array, size: int, by_layer: bool) -> tuple[int, ...]:
    """Returns the shape of the pieces in which an array is saved.

    Args:
      array: with shards of equal shapes.
      size: bytes of a piece at most.
      by_layer: whether a piece shall be of one layer, the first axis.
    """
    piece = list(array.sharding.shard_shape(array.shape))
    if by_layer:
        piece[0] = 1
    for axis, length in enumerate(piece):
        room = size // (array.dtype.itemsize * math.prod(piece) // length)
        piece[axis] = max(n for n in range(1, length + 1) if length % n == 0 and n <= max(room, 1))
    return tuple(piece)


def read_host_leaves(
    path: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct], saved: dict[str, Any]
) -> dict[str, Any]:
    """Reads leaves that shall rest on the host, shard by shard, straight where they belong.

    Args:
      path: where the arrays of a step are.
      wanted: by name, ShapeDtypeStructs or arrays with shardings, of the saved shapes; values are
        converted to their types.
      saved: what is there, from `arrays.saved_arrays`.
    """
    reader = PieceReader(path, saved, threads=4)

    return {
        name: assemble(leaf, functools.partial(reader.read, name)) for name, leaf in wanted.items()
    }
