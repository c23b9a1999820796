"""A checkpoint's leaves as if no stack had been cut in runs (see `layouts`).

>>> reader.leaves().keys()
{'params/layers/0to1/w', 'params/layers/2to3/w'}
>>> WholeReader(reader).leaves().keys()
{'params/layers/w'}
"""

from collections import defaultdict

import numpy as np

from m6jax.checkpointing.pieces import Index, PieceReader, SavedLeaf
from m6jax.layouts import run_of, without_run


class WholeReader:
    """Reads parts of whole leaves of one step."""

    def __init__(self, reader: PieceReader):
        """Opens nothing.

        Args:
          reader: of the step.
        """
        self._reader = reader
        runs: dict[str, list[str]] = defaultdict(list)
        for name in sorted(reader.leaves(), key=_first):
            runs[without_run(name)].append(name)
        self._runs = dict(runs)
        self._leaves = {name: self._joined(own) for name, own in runs.items()}

    def leaves(self) -> dict[str, SavedLeaf]:
        """Returns what is there, by name."""
        return dict(self._leaves)

    def leaf(self, name: str) -> SavedLeaf:
        """Returns what is known of one leaf."""
        return self._leaves[name]

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns the values of a leaf at an index; raises CheckpointError if they are damaged."""
        runs = self._runs[name]
        if runs == [name]:
            return self._reader.read(name, index)
        parts = []
        for run in runs:
            first, length = _first(run), self._reader.leaf(run).shape[0]
            start, stop = max(index[0].start, first), min(index[0].stop, first + length)
            if start < stop:
                layers = slice(start - first, stop - first)
                parts.append(self._reader.read(run, (layers, *index[1:])))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _joined(self, runs: list[str]) -> SavedLeaf:
        first = self._reader.leaf(runs[0])
        if len(runs) == 1:
            return first
        layers = sum(self._reader.leaf(run).shape[0] for run in runs)
        return SavedLeaf((layers, *first.shape[1:]), first.dtype, first.piece)


def _first(name: str) -> int:
    run = run_of(name)
    return run.first if run else 0
