"""Stacks that were saved in runs (see `layouts`), read whole or in other runs.

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

from m6jax.checkpointing.pieces import Index, PieceReader
from m6jax.layouts import run_of, without_run


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


def values(reader: PieceReader, wanted: Mapping[str, Any], name: str, index: Index) -> np.ndarray:
    """Returns a part of a leaf that was saved in other runs.

    Args:
      reader: of the step.
      wanted: leaves of the types that are asked for, by name.
      name: of the leaf as it is wanted.
      index: of the part, with starts and stops.
    """
    start, stop = (_first(name) + edge for edge in (index[0].start, index[0].stop))
    parts, saved = [], reader.leaves()
    for other in _by_whole_name(saved)[without_run(name)]:
        begin = _first(other)
        low, high = max(start, begin), min(stop, begin + saved[other].shape[0])
        if low < high:
            parts.append(reader.read(other, (slice(low - begin, high - begin), *index[1:])))
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype(wanted[name].dtype, copy=False)


def _by_whole_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names of runs, in order of layers, by the name in a whole stack."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[without_run(name)].append(name)
    return {whole: sorted(runs, key=_first) for whole, runs in groups.items()}


def _first(name: str) -> int:
    run = run_of(name)
    return run.first if run else 0


def _layers(names: list[str], leaves: Mapping[str, Any]) -> int:
    return sum(leaves[name].shape[0] if leaves[name].shape else 0 for name in names)
