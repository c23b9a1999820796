"""How orbax writes leaves that give their pieces one after another.

orbax hands all of a leaf to its writer at once. What comes in pieces is written with a bounded
number of bytes under way; on disk it is the same as any other array.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from m6jax.checkpointing.host_leaves import HostLeaf
from m6jax.checkpointing.pieces import Index, Streamed, context

_UNDER_WAY = 128 * 2**20


class InPieces(Protocol):
    """A leaf that gives its pieces one after another; see `Streamed` and `HostLeaf`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece."""

    def parts(self) -> Iterator[tuple[Index, np.ndarray]]:
        """Yields this process's pieces: where in the whole leaf, and their values."""


class PieceHandler(ocp.type_handlers.NumpyHandler):
    """Writes leaves in pieces, every process its own; they are read as numpy arrays are."""

    def __init__(self, threads: int | None = None, under_way: int = 0):
        """Writes nothing yet.

        Args:
          threads: how many pieces are written at once; None: as many as tensorstore takes.
          under_way: bytes that may wait to be written; at least one piece does.
        """
        super().__init__()
        self._threads, self._under_way = threads, under_way

    async def serialize(
        self,
        values: Sequence[InPieces],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> list[ocp.future.Future]:
        """See `orbax.checkpoint.type_handlers.TypeHandler`."""
        del args  # each leaf says itself how it is cut
        task = self._write(values, infos)
        return [ocp.future.CommitFutureAwaitingContractedSignals(task, name="leaves in pieces")]

    async def _write(
        self, values: Sequence[InPieces], infos: Sequence[ocp.type_handlers.ParamInfo]
    ) -> None:
        resources = context(self._threads)
        largest = max(math.prod(leaf.piece) * leaf.dtype.itemsize for leaf in values)
        most, held = max(self._under_way, largest), 0
        waiting: list[Any] = []
        for leaf, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            spec = ts.Spec(_spec(leaf, info))
            if jax.process_index() == 0:
                await ts.open(spec, create=True, open=True, context=resources)
            store = await ts.open(spec, open=True, assume_metadata=True, context=resources)
            for index, part in leaf.parts():
                write = store[index].write(part, can_reference_source_data_indefinitely=True)
                waiting.append(write)
                held += part.nbytes
                del part, write
                # Small pieces wait for each other: a write that is waited for costs a new tree.
                if held >= most:
                    await _all_of(waiting)
                    held = 0
        await _all_of(waiting)


def registry() -> ocp.type_handlers.TypeHandlerRegistry:
    """Returns how orbax writes what a state may consist of."""
    # Of those that write the same type the last reads it.
    return ocp.type_handlers.create_type_handler_registry(
        # With more threads each of them would keep some of what was made for it.
        (Streamed, PieceHandler(threads=1)),
        (HostLeaf, PieceHandler(under_way=_UNDER_WAY)),
        *((kind, ocp.type_handlers.get_type_handler(kind)) for kind in (np.ndarray, jax.Array)),
    )


async def _all_of(writes: list[Any]) -> None:
    """Waits for all writes, and forgets them."""
    while writes:
        await writes.pop()


def _spec(leaf: InPieces, info: ocp.type_handlers.ParamInfo) -> dict[str, Any]:
    """Returns how tensorstore opens a leaf for writing it in pieces."""
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=leaf.shape,
        local_shape=leaf.shape,
        dtype=leaf.dtype,
        process_index=jax.process_index(),
    )
    spec["metadata"]["chunks"] = leaf.piece
    return spec
