"""Leaves in host memory: saved and restored in place, a few pieces at a time.

orbax hands all pieces of a leaf to its writer at once, and each of them is copied: a second copy of
a state that rests on the host, where there is room for one. Here a process writes the pieces of its
shards one after another, with a bounded number of bytes under way, and reads one shard after
another:

    for shard in leaf.addressable_shards:              those of replica 0, once over all processes
        for index in pieces of the shard:
            write values[index]                        wait where `_UNDER_WAY` bytes are written

On disk such a leaf is the same as any other.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from m6jax.checkpointing.pieces import (
    Index,
    PieceReader,
    Streamed,
    StreamedHandler,
    all_of,
    assemble,
    piece_spec,
)

_UNDER_WAY = 128 * 2**20
_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "cache_pool#ocdbt": {"total_bytes_limit": 2**20},
}


@dataclasses.dataclass(frozen=True)
class Resting:
    """A leaf on the host that is to be saved.

    Attributes:
      array: jax array in host memory.
      piece: shape of a piece; divides that of a shard along every axis.
    """

    array: jax.Array
    piece: tuple[int, ...]

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


class RestingHandler(ocp.type_handlers.NumpyHandler):
    """Writes `Resting` leaves, every process its own shards."""

    async def serialize(
        self,
        values: Sequence[Resting],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        """See `orbax.checkpoint.type_handlers.TypeHandler`."""
        del args  # each leaf says itself how it is cut
        task = self._write(values, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(task, name="leaves on the host")]

    async def _write(
        self, values: Sequence[Resting], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        context = ts.Context(_CONTEXT)
        waiting: list[Any] = []
        held = 0
        for leaf, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ts.Spec(
                piece_spec(
                    leaf.array.shape,
                    np.dtype(leaf.array.dtype),
                    leaf.piece,
                    info,
                    jax.process_index(),
                )
            )
            if jax.process_index() == 0:
                await ts.open(spec, create=True, open=True, context=context)
            store = await ts.open(spec, open=True, assume_metadata=True, context=context)
            for index, part in leaf.parts():
                waiting.append(
                    store[index].write(part, can_reference_source_data_indefinitely=True)
                )
                held += part.nbytes
                if held >= _UNDER_WAY:
                    await all_of(waiting)
                    held = 0
        await all_of(waiting)


def read_resting(
    path: epath.Path, wanted: dict[str, jax.ShapeDtypeStruct], saved: dict[str, Any]
) -> dict[str, Any]:
    """Reads leaves that shall rest on the host, shard by shard, straight where they belong.

    Args:
      path: where the arrays of a step are.
      wanted: by name, ShapeDtypeStructs or arrays with shardings, of the saved shapes and types.
      saved: what is there, from `arrays.saved_arrays`.
    """
    reader = PieceReader(path, saved, threads=4)

    return {
        name: assemble(leaf, functools.partial(reader.read, name)) for name, leaf in wanted.items()
    }


def registry() -> ocp.type_handlers.TypeHandlerRegistry:
    """Returns how orbax writes what a state may consist of."""
    # Of those that write the same type the last reads it.
    return ocp.type_handlers.create_type_handler_registry(
        (Streamed, StreamedHandler()),
        (Resting, RestingHandler()),
        *((kind, ocp.type_handlers.get_type_handler(kind)) for kind in (np.ndarray, jax.Array)),
    )
