"""Leaves that are never in memory as a whole: read and written piece by piece.

A `Streamed` leaf is saved like an array, but its values are made when they are written. Together
with a `PieceReader` a checkpoint is turned into another one with a few pieces in memory at a time:

>>> reader = checkpoints.pieces(120)
>>> half = lambda index: reader.read("params/head", index) / 2
>>> head = reader.leaf("params/head")
>>> leaf = Streamed(head.shape, head.dtype, head.piece, half)
>>> others.save(120, {"params": {"head": leaf}}, data_state, description, wait=True)

A piece is what lies together on disk (in zarr: a chunk), so that nothing is read twice.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from m6jax.checkpointing.steps import CheckpointError

Index = tuple[slice, ...]


def context(threads: int | None = None) -> ts.Context:
    """Returns what tensorstore may use: no cache of pieces.

    Args:
      threads: how many pieces are read or written at once, each of which keeps some memory; None:
        as many as tensorstore takes.
    """
    settings: dict[str, Any] = {
        "cache_pool": {"total_bytes_limit": 0},
        "cache_pool#ocdbt": {"total_bytes_limit": 2**20},
    }
    if threads is not None:
        limit = {"limit": threads}
        settings |= {"file_io_concurrency": limit, "data_copy_concurrency": limit}
    return ts.Context(settings)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A leaf to be saved whose values are made piece by piece.

    Attributes:
      shape: of the whole leaf.
      dtype: numpy type of its elements.
      piece: shape of a piece; along each axis the last may be smaller.
      read: returns the values at an index of slices with a start and a stop; called once for each
        piece, from another thread.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    piece: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return self.size * self.dtype.itemsize

    def parts(self) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields the pieces: where in the whole leaf, and their values."""
        starts = (range(0, n, step) for n, step in zip(self.shape, self.piece, strict=True))
        for start in itertools.product(*starts):
            sizes = zip(start, self.piece, self.shape, strict=True)
            index = tuple(slice(first, min(first + step, n)) for first, step, n in sizes)
            yield index, self.read(index)


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """Shape, type and pieces of a leaf on disk."""

    shape: tuple[int, ...]
    dtype: np.dtype
    piece: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.dtype.itemsize


class PieceReader:
    """Reads parts of the leaves of one step."""

    def __init__(self, path: epath.Path, saved: dict[str, Any], threads: int = 1):
        """Opens nothing yet.

        Args:
          path: where the arrays of a step are.
          saved: what they are by name, from `arrays.saved_arrays`.
          threads: how many pieces are read at once.
        """
        self._path = path
        self._context = context(threads)
        self._open: tuple[str, Any] | None = None
        self._leaves = {
            name: SavedLeaf(tuple(a.shape), np.dtype(a.dtype), tuple(a.storage.chunk_shape))
            for name, a in saved.items()
        }

    def leaves(self) -> dict[str, SavedLeaf]:
        """Returns what is there, by name."""
        return dict(self._leaves)

    def leaf(self, name: str) -> SavedLeaf:
        """Returns what is known of one leaf."""
        return self._leaves[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns the values of a leaf at an index; raises CheckpointError if they are damaged."""
        try:
            return self._store(name)[index].read().result()
        except Exception as error:
            raise CheckpointError(
                f"{self._path}: {name} cannot be read: {str(error).split(' [')[0]}"
            ) from error

    def _store(self, name: str) -> Any:
        # Leaves are read one after the other, so one open array is enough.
        if self._open is None or self._open[0] != name:
            spec = ocp.type_handlers.get_json_tspec_read(self._info(name), use_ocdbt=True)
            self._open = name, ts.open(ts.Spec(spec), read=True, context=self._context).result()
        return self._open[1]

    def _info(self, name: str) -> ocp.type_handlers.ParamInfo:
        return ocp.type_handlers.ParamInfo(
            name=name, parent_dir=self._path, use_zarr3=False, ts_context=self._context
        )


def assemble(
    leaf: jax.ShapeDtypeStruct, read: Callable[[Index], np.ndarray]
) -> jax.Array | np.ndarray:
    """Makes an array shard by shard, straight where it rests; a numpy array without a sharding.

    Args:
      leaf: shape, type and sharding of the array.
      read: returns the values at an index; called once for all devices that have the same.
    """
    sharding = leaf.sharding
    if sharding is None:
        return read(tuple(slice(0, n) for n in leaf.shape))
    owners: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        parts = zip(index or (), leaf.shape, strict=True)
        owners.setdefault(tuple(part.indices(n)[:2] for part, n in parts), []).append(device)
    shards: list[jax.Array] = []
    for bounds, devices in owners.items():
        values = read(tuple(slice(*bound) for bound in bounds)).astype(leaf.dtype, copy=False)
        for device in devices:
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, place))
        jax.block_until_ready(shards)  # or the values of all shards would wait in memory
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)
