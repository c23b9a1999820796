"""What the files and the command line say, with names resolved and places kept.

A class's fields, as seen in a scope, follow gin's rules: `a/b/Stage.unit` beats `a/Stage.unit`,
which beats `Stage.unit`, and of two bindings of one name the later wins.
"""

import collections
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from m6jax.configuration.syntax import REQUIRED, Macro
from m6jax.foundation.validated import ConfigError

logger = logging.getLogger(__name__)

Scopes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """`@scope/Class()` with the class found."""

    cls: type
    scopes: Scopes = ()

    def __repr__(self) -> str:
        return f"@{'/'.join((*self.scopes, self.cls.__name__))}()"


class Unusable:
    """Stands for a value whose problem has been reported."""

    def __repr__(self) -> str:
        return "an unusable value"


UNUSABLE = Unusable()


@dataclasses.dataclass(frozen=True)
class Binding:
    """One resolved assignment.

    Attributes:
      cls: class whose field it sets; None: it defines a macro.
      name: the field or the macro.
      scopes: scopes of the class.
      value: literals, containers, `Macro`, `Call`, functions; UNUSABLE where a name is unknown.
      place: file and line, or the command line.
      origin: which file it stands in, as numbers of the includes that led there; an including
        file's origin is a prefix of what it includes, the command line's of everything.
    """

    cls: type | None
    name: str
    scopes: Scopes
    value: Any
    place: str
    origin: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name as a command line may give it: `BATCH`, `stage_0/Stage.unit`."""
        if self.cls is None:
            return self.name
        return f"{'/'.join((*self.scopes, self.cls.__name__))}.{self.name}"


class Problems:
    """Everything wrong that was found, each once, in the order found."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Remembers one problem."""
        self._lines[line] = None

    def stop_if_any(self) -> None:
        """Raises ConfigError with a line for every problem, if there is one."""
        if self._lines:
            raise ConfigError("\n".join(self._lines))


class Settings:
    """All bindings of one load.

    Attributes:
      stray: values of bindings whose own name is wrong; what they refer to counts as used, so that
        one misspelt name is one problem and not ten.
    """

    def __init__(self) -> None:
        self.stray: list[Any] = []
        self._last: dict[tuple[Scopes, type | None, str], Binding] = {}
        self._by_class: dict[type, list[Binding]] = collections.defaultdict(list)
        self._macros: dict[str, list[Binding]] = collections.defaultdict(list)

    def add(self, binding: Binding) -> None:
        """Adds a binding, which wins over earlier ones of its name.

        A file may override what it includes, the command line everything; any other change of
        mind is logged with both places.
        """
        key = (binding.scopes, binding.cls, binding.name)
        old = self._last.get(key)
        if old is not None and not _may_override(binding, old):
            logger.warning(
                "%s: %s = %r replaces %r of %s",
                binding.place,
                binding.label,
                binding.value,
                old.value,
                old.place,
            )
        self._last[key] = binding
        if binding.cls is None:
            self._macros[binding.name].append(binding)
        else:
            self._by_class[binding.cls].append(binding)

    def __iter__(self) -> Iterator[Binding]:
        """Iterates over all bindings, macros first, overridden ones too."""
        for bindings in (*self._macros.values(), *self._by_class.values()):
            yield from bindings

    @property
    def classes(self) -> list[type]:
        """Classes with a binding of their own."""
        return list(self._by_class)

    @property
    def macro_names(self) -> list[str]:
        """Names of the macros that are defined."""
        return list(self._macros)

    def macro(self, name: str) -> Binding | None:
        """Returns the binding that defines macro `name`, None if there is none."""
        return self._macros[name][-1] if name in self._macros else None

    def definitions(self, name: str) -> list[Binding]:
        """Returns every binding that defines macro `name`, replaced ones too."""
        return self._macros.get(name, [])

    def is_overridden(self, binding: Binding) -> bool:
        """Whether a later binding of the same name and scope replaces this one."""
        return self._last[(binding.scopes, binding.cls, binding.name)] is not binding

    def applying(self, cls: type, scopes: Scopes) -> list[Binding]:
        """Returns the bindings of `cls` seen in `scopes`, replaced ones too, widest scope first."""
        seen = (b for b in self._by_class.get(cls, ()) if scopes[: len(b.scopes)] == b.scopes)
        return sorted(seen, key=lambda binding: len(binding.scopes))

    def fields(self, cls: type, scopes: Scopes) -> dict[str, Binding]:
        """Returns the winning binding of each bound field of `cls` seen in `scopes`."""
        return {binding.name: binding for binding in self.applying(cls, scopes)}

    def supplier(self, binding: Binding) -> Binding:
        """Returns the binding that holds the value: the last of a chain of macros."""
        seen = []
        while isinstance(binding.value, Macro) and binding not in seen:
            seen.append(binding)
            binding = self.macro(binding.value.name) or binding
        return binding


def _may_override(new: Binding, old: Binding) -> bool:
    """Whether `new` may replace `old` without a word."""
    if new.value == old.value or old.value == Macro(REQUIRED):
        return True
    return len(new.origin) < len(old.origin) and old.origin[: len(new.origin)] == new.origin


def macro_scopes(name: str) -> Scopes:
    """Returns the scopes in which gin evaluates a macro's value: the parts of its name."""
    return tuple(name.split("/"))


def parts(value: Any) -> Iterator[Any]:
    """Yields `value` and everything inside its containers."""
    yield value
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, tuple | list):
        for part in value:
            yield from parts(part)
