"""Stacks that were saved in runs (see `layouts`), read whole or in other runs.

A `WholeReader` shows a checkpoint as if no stack had been cut:

>>> reader.leaves().keys()
{'params/layers/0to1/w', 'params/layers/2to3/w'}
>>> WholeReader(reader).leaves().keys()
{'params/layers/w'}

What is asked for and what was saved have the same layers, cut in different places. Seen through
`as_wanted` they have the same leaves, and `values` reads a part of such a leaf from those that were
saved:

>>> saved = {"params/layers/0to1/w": f32[2, 8], "params/layers/2to3/w": f32[2, 8]}
>>> as_wanted(saved, {"params/layers/w": f32[4, 8]})
{'params/layers/w': f32[4, 8]}
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from m6jax.checkpointing.pieces import Index, PieceReader, SavedLeaf
from m6jax.layouts import LeafName


class WholeReader:
    """Reads parts of whole leaves of one step."""

    def __init__(self, reader: PieceReader):
        """Opens nothing.

        Args:
          reader: of the step.
        """
        self._reader = reader
        self._runs = _by_whole_name(reader.leaves())
        self._leaves = {name: self._joined(own) for name, own in self._runs.items()}

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


def as_wanted(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what was saved, by name, cut like what is wanted where it has the same layers."""
    named, asked = _by_whole_name(saved), _by_whole_name(wanted)
    seen: dict[str, Any] = {}
    for whole, names in named.items():
        others = asked.get(whole, names)
        cut = set(names) != set(others) and _layers(names, saved) == _layers(others, wanted)
        for name in others if cut else names:
            if not cut or name in saved:
                seen[name] = saved[name]
                continue
            any_run = saved[names[0]]
            shape = (wanted[name].shape[0], *any_run.shape[1:])
            seen[name] = jax.ShapeDtypeStruct(shape, any_run.dtype)
    return seen


def values(reader: WholeReader, name: str, index: Index) -> np.ndarray:
    """Returns a part of a leaf that was saved in other runs.

    Args:
      reader: of the step.
      name: of the leaf as it is wanted.
      index: of the part, with starts and stops.
    """
    first = _first(name)
    layers = slice(first + index[0].start, first + index[0].stop)
    return reader.read(LeafName.of(name).whole, (layers, *index[1:]))


def _by_whole_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of runs, in order of layers, by the name in a whole stack."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[LeafName.of(name).whole].append(name)
    return {whole: sorted(runs, key=_first) for whole, runs in groups.items()}


def _first(name: str) -> int:
    return LeafName.of(name).first


def _layers(names: list[str], leaves: Mapping[str, Any]) -> int:
    return sum(len(LeafName.of(name).layers(leaves[name].shape)) for name in names)
