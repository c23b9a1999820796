"""What every leaf of a state is made of when its layers come to lie otherwise.

`delinking` says how a state changes. Here it is shown the same state with tiny leaves, one number
for each layer of each leaf, and where a number comes out says where a layer comes from. So whatever
it does to states in memory can be done to states on disk, a part of a layer at a time:

>>> made = recipes(pseudo, Layout(depth=2, unit=1), real, Layout(depth=2, unit=2), Policy.COPY)
>>> made["params/layers/mlp/up"].copies
((Origin('params/layers/mlp/up', 0), Origin('params/layers/mlp/up', 0)),)

Towards fewer layers is the same read backwards: those that one would become now become one.
"""

import dataclasses
import enum
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from m6jax.foundation import pytrees
from m6jax.layouts import Layout, LayoutError, LeafName
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training.train_state import TrainState


class Direction(enum.Enum):
    """Towards MORE distinct layers (or as many), or towards FEWER."""

    MORE = "more"
    FEWER = "fewer"


@dataclasses.dataclass(frozen=True)
class Origin:
    """A leaf of the source, or one layer of it.

    Attributes:
      name: of the leaf.
      layer: index on its leading axis; None: it has no axis of layers.
    """

    name: str
    layer: int | None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one leaf of the target is made of.

    Attributes:
      name: of the leaf.
      shape: of the whole leaf.
      dtype: of its elements.
      stacked: whether its first axis is that of layers.
      copies: origins of its layers (one origin if it is not stacked); where several layers become
        one, such a tuple for each of them.
      factor: with which values are multiplied, a numpy scalar; 0: they begin anew.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool
    copies: tuple[tuple[Origin, ...], ...]
    factor: Any

    def sources(self) -> list[str]:
        """Returns the leaves that it is made of."""
        return list(dict.fromkeys(o.name for copy in self.copies for o in copy))


def recipes(
    source: TrainState,
    old: Layout,
    target: TrainState,
    new: Layout,
    policy: Policy | None,
    direction: Direction = Direction.MORE,
) -> dict[str, Recipe]:
    """Returns the recipe of every leaf of a state, by name.

    Args:
      source: the state as it lies, shapes and types.
      old: its layout.
      target: the state as it shall lie, shapes and types.
      new: its layout.
      policy: for the optimizer's state; None where distinct layers stay the same. Towards FEWER,
        COPY keeps what one layer has (means of layers that differ), and RESCALE undoes what it does
        towards MORE.
      direction: where to.

    Raises:
      LayoutError: the new layout cannot be reached from the old one in this direction, or the
        policy is missing or does not know the optimizer's state.
    """
    if direction is Direction.FEWER:
        few, little, many, much = target, new, source, old
    else:
        few, little, many, much = source, old, target, new
    numbers, origins = _numbered(few)
    _check_shapes(few, little, many, much, policy)
    moved = dict(pytrees.flatten_named(_delink(numbers, little, much, Policy.COPY)))
    factors = dict(pytrees.flatten_named(_delink(_ones(few), little, much, policy)))
    copies: dict[str, list[tuple[Origin, ...]]] = defaultdict(list)
    factor: dict[str, Any] = {}
    if direction is Direction.MORE:
        for name, found in moved.items():
            copies[name].append(tuple(origins[i] for i in np.ravel(found)))
            factor[name] = np.ravel(factors[name])[0]
    else:
        for name, lists in _inverted(moved, origins).items():
            copies[name] = lists
            scale = np.ravel(factors[lists[0][0].name])[0]
            factor[name] = scale if scale in (0, 1) else 1 / scale
    return {
        name: Recipe(
            name=name,
            shape=tuple(leaf.shape),
            dtype=np.dtype(leaf.dtype),
            stacked=LeafName.of(name).stacked,
            copies=tuple(copies[name]),
            factor=factor[name],
        )
        for name, leaf in pytrees.flatten_named(target)
    }


def _delink(state: Any, old: Layout, new: Layout, policy: Policy | None) -> Any:
    return state if old == new else delinking.delink(state, old, new, policy)


def _check_shapes(few: Any, old: Layout, many: Any, new: Layout, policy: Policy | None) -> None:
    """Makes sure that delinking goes from the shapes of one state to those of the other."""
    reached = jax.eval_shape(lambda state: _delink(state, old, new, policy), few)
    lines = pytrees.differences(reached, many)
    if lines:
        raise LayoutError(f"delinking does not lead there; reached against wanted: {lines[0]}")


def _layers(name: str, leaf: Any) -> tuple[int, ...]:
    """Returns the shape of the tiny leaf: the axis of layers, if there is one."""
    return tuple(leaf.shape[:1]) if LeafName.of(name).stacked else ()


def _numbered(state: TrainState) -> tuple[TrainState, list[Origin]]:
    """Returns the state with a number for each layer of each leaf, and what the numbers mean."""
    origins: list[Origin] = []

    def number(name: str, leaf: Any) -> np.ndarray:
        first, shape = len(origins), _layers(name, leaf)
        origins.extend(Origin(name, i) for i in range(*shape)) if shape else origins.append(
            Origin(name, None)
        )
        return np.arange(first, len(origins), dtype=np.int32).reshape(shape)

    return pytrees.map_named(number, state), origins


def _ones(state: TrainState) -> TrainState:
    return pytrees.map_named(lambda name, leaf: np.ones(_layers(name, leaf), leaf.dtype), state)


def _inverted(moved: dict[str, Any], origins: list[Origin]) -> dict[str, list[tuple[Origin, ...]]]:
    """Returns, for each leaf that would be delinked, what would be made of its layers.

    The first tuple has for each layer the first that would be made of it, and so on.
    """
    made: list[list[Origin]] = [[] for _ in origins]
    for name in sorted(moved, key=lambda name: LeafName.of(name).first):  # in order of layers
        found = np.asarray(moved[name])
        for layer, number in enumerate(np.ravel(found)):
            made[number].append(Origin(name, layer if found.ndim else None))
    lists: dict[str, list[list[Origin]]] = defaultdict(list)
    for origin, copies in zip(origins, made, strict=True):
        lists[origin.name].append(copies)
    return {name: list(zip(*layers, strict=True)) for name, layers in lists.items()}
