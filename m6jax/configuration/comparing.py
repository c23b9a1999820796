"""Two resolved configurations, place by place.

Texts are compared without importing anything, so that one written by an older m6jax can be read:

>>> compare("run.Run.batch_size = 8", "run.Run.batch_size = 16")
['Run.batch_size: 8 became 16']
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from m6jax.configuration.syntax import Assignment, Macro, Reference, parse
from m6jax.foundation.validated import ConfigError


class _Absent:
    def __repr__(self) -> str:
        return "(not set)"


_ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class _Node:
    """An object: the name of its class, and its fields."""

    name: str
    fields: dict[str, Any]

    def __repr__(self) -> str:
        return f"@{self.name}()"


def compare(text_a: str, text_b: str, ignore: Collection[str] = ()) -> list[str]:
    """Returns a line with both values for every setting in which two resolved texts differ.

    Args:
      text_a: the earlier configuration, as `describe` wrote it.
      text_b: the later one.
      ignore: fields that may differ, each as `Class.field`, with all that is below them.

    Raises:
      ConfigError: if a text is not gin.
    """
    differences: list[str] = []
    a, b = _tree(text_a, "the earlier configuration"), _tree(text_b, "the later configuration")
    _compare(a, b, b.name, ignore, differences)
    return differences


def _compare(a: Any, b: Any, path: str, ignore: Collection[str], found: list[str]) -> None:
    if isinstance(a, _Node) and isinstance(b, _Node) and a.name == b.name:
        for name in dict.fromkeys([*a.fields, *b.fields]):
            if f"{a.name}.{name}" not in ignore:
                value_a, value_b = (node.fields.get(name, _ABSENT) for node in (a, b))
                _compare(value_a, value_b, f"{path}.{name}", ignore, found)
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and _partwise(a, b):
        for index, (part_a, part_b) in enumerate(zip(a, b, strict=True)):
            _compare(part_a, part_b, f"{path}[{index}]", ignore, found)
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            _compare(a[key], b[key], f"{path}[{key!r}]", ignore, found)
    elif a != b:
        found.append(f"{path}: {a!r} became {b!r}")


def _partwise(a: Any, b: Any) -> bool:
    """Whether two tuples are compared part by part: objects, as many here as there."""
    return len(a) == len(b) and any(isinstance(part, _Node) for part in (*a, *b))


def _tree(text: str, name: str) -> _Node:
    """Returns the first object of `text` with all that it refers to."""
    macros: dict[str, Any] = {}
    objects: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for statement in parse(text, name):
        if isinstance(statement, Assignment) and statement.selector:
            fields = objects.setdefault((statement.scopes, statement.selector), {})
            fields[statement.name] = statement.value
        elif isinstance(statement, Assignment):
            macros[statement.name] = statement.value
    if not objects:
        raise ConfigError(f"{name} sets nothing")

    def expand(value: Any) -> Any:
        if isinstance(value, Macro):
            return expand(macros[value.name]) if value.name in macros else value
        if isinstance(value, Reference) and value.call:
            return node(value.scopes, value.selector)
        if isinstance(value, dict):
            return {key: expand(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(expand(part) for part in value)
        return value

    def node(scopes: tuple[str, ...], selector: str) -> _Node:
        fields = objects.get((scopes, selector), {})
        last_part = selector.rpartition(".")[2]
        return _Node(last_part, {field: expand(value) for field, value in fields.items()})

    return node(*next(iter(objects)))
