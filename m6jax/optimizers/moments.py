"""What an optimizer remembers of gradients, found in its state by structure.

The state of any optimizer is some trees shaped like the parameters, in records (NamedTuples,
structs) that may be nested in tuples. The records say what the trees are: in those known here a
field grows with a power of the gradients, first moments with the first, second with the second.

>>> state = optax.adamw(1e-3).init(params)       # (ScaleByAdamState(count, mu, nu), ...)
>>> scale_moments(state, lambda name: 0.5 if LeafName.of(name).in_stack else 1.0)  # mu / 2, nu / 4
>>> reset_moments(state, lambda name: LeafName.of(name).in_stack)
Traceback (most recent call last):
LayoutError: 0/count: ScaleByAdamState has one count for all layers, ...

A record that is not known is copied by who asks for nothing else, and refused by name otherwise.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from m6jax.foundation.pytrees import Tree, flatten_named, map_named
from m6jax.layouts import LayoutError, LeafName, has_layers

_OPTAX: dict[type, Mapping[str, int]] = {
    optax.ScaleByAdamState: {"mu": 1, "nu": 2},
    optax.ScaleByLionState: {"mu": 1},
    optax.ScaleByRmsState: {"nu": 2},
    optax.ScaleByRssState: {"sum_of_squares": 2},
    optax.TraceState: {"trace": 1},
}
# Fields that say nothing of the layers' moments, though they are no trees of layers.
_UNUSED_COUNTS = {optax.ScaleByLionState: ("count",)}


def gradient_powers(record: Any) -> Mapping[str, int] | None:
    """Returns the fields that grow with gradients, and with which power; None if not known."""
    return getattr(type(record), "GRADIENT_POWERS", None) or _OPTAX.get(type(record))


def scale_moments(state: Any, factor: Callable[[str], float]) -> Any:
    """Returns the state that gradients `factor` times as large would have left behind.

    First moments are multiplied by the factor, second moments by its square. Adafactor's momentum
    is of directions, and stays.

    Args:
      state: of an optimizer.
      factor: of a leaf's name, such as U / L in the stack and 1 elsewhere.

    Raises:
      LayoutError: a leaf with another factor than 1 is in a record that is not known, or in a
        second one: whether that sees gradients or what the first makes of them is not known.
    """
    scaled: list[str] = []

    def scale(path: str, record: Any) -> Any:
        concerned = [name for name in _names(path, record) if factor(name) != 1]
        if not concerned:
            return record
        powers = gradient_powers(record)
        if powers is None:
            raise LayoutError(
                f"{concerned[0]}: how it grows with the gradients is not known of"
                f" {type(record).__name__} (known: AdamState, AdafactorState,"
                f" {', '.join(known.__name__ for known in _OPTAX)}); choose COPY or RESET"
            )
        if scaled:
            raise LayoutError(
                f"{concerned[0]}: whether {type(record).__name__} sees gradients, or what"
                f" {scaled[0]} makes of them, is not known; choose COPY or RESET"
            )
        scaled.append(type(record).__name__)
        fields = {
            field: map_named(lambda name, m, n=power: m * factor(name) ** n, getattr(record, field))
            for field, power in powers.items()
        }
        return (
            record._replace(**fields) if hasattr(record, "_replace") else record.replace(**fields)
        )

    return _map_records(scale, state)


def reset_moments(state: Any, forgotten: Callable[[str], bool]) -> Any:
    """Returns the state with zeros in the leaves whose names are to be forgotten.

    Raises:
      LayoutError: a record keeps a number for all layers together, such as a count of steps:
        zero moments under an old count would make the first steps several times too large.
    """

    def reset(path: str, record: Any) -> Any:
        concerned = {name for name in _names(path, record) if forgotten(name)}
        if concerned and _is_record(record):
            for field in _fields(record):
                names = _names(_join(path, field), getattr(record, field))
                together = names and not any(LeafName.of(name).in_stack for name in names)
                if together and field not in _UNUSED_COUNTS.get(type(record), ()):
                    raise LayoutError(
                        f"{names[0]}: {type(record).__name__} has one {field} for all layers,"
                        " which goes on while some of them begin anew; choose COPY, or an optimizer"
                        " with counts of their own (AdamW, Adafactor)"
                    )
        return map_named(
            lambda name, x: jnp.zeros_like(x) if _join(path, name) in concerned else x, record
        )

    return _map_records(reset, state)


def check_shapes(state: Any, params: Tree) -> None:
    """Raises LayoutError for a record from optax whose trees are not shaped like the parameters.

    What it has reduced over layers, or kept a placeholder for, no layer can have a copy of.
    """
    shapes = {name: leaf.shape for name, leaf in flatten_named(params)}

    def check(path: str, record: Any) -> None:
        if not _is_record(record) or hasattr(record, "GRADIENT_POWERS"):
            return
        for field in _fields(record):
            for name, leaf in flatten_named(getattr(record, field)):
                wanted = shapes.get(name, leaf.shape)
                if LeafName.of(name).in_stack and leaf.shape != wanted:
                    raise LayoutError(
                        f"{_join(path, field, name)}: {type(record).__name__} keeps shape"
                        f" {leaf.shape} of a parameter of shape {wanted}, which cannot be divided"
                        " into layers (use AdamW or Adafactor of m6jax)"
                    )

    _map_records(check, state)


def _map_records(fn: Callable[[str, Any], Any], state: Any) -> Any:
    """Applies `fn` to (name, node) of every record with layers in it, and of leaves elsewhere."""
    return map_named(fn, state, is_leaf=_is_holder)


def _is_holder(node: Any) -> bool:
    """Whether a node is a record of moments: known, or with a tree of layers for a field."""
    if not _is_record(node):
        return False
    return gradient_powers(node) is not None or any(
        has_layers(tree)
        for value in (getattr(node, field) for field in _fields(node))
        for tree in (value, *(value if isinstance(value, list) else ()))
    )


def _is_record(node: Any) -> bool:
    return dataclasses.is_dataclass(node) or hasattr(node, "_fields")


def _fields(record: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(record):
        fields = dataclasses.fields(record)
        return tuple(f.name for f in fields if f.metadata.get("pytree_node", True))
    return record._fields


def _names(path: str, node: Any) -> list[str]:
    return [_join(path, name) for name, _ in flatten_named(node)]


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
