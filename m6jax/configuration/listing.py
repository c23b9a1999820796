"""What may be set, read from the classes themselves: names, types, defaults, docstrings.

>>> print(reference([Experiment], "AdamW"))
optimizers.AdamW (from m6jax import optimizers): ...
  AdamW.b1: float = 0.9
      ...
"""

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterable
from typing import Any

from m6jax.configuration.names import classes_within, full_name, home
from m6jax.foundation.validated import (
    ConfigError,
    adjustable_fields,
    field_defaults,
    field_types,
    is_validated,
    nearest,
    type_name,
)

_ATTRIBUTE = re.compile(r"  (\w+): (.*)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a settings class.

    Attributes:
      name: as `Class.field`, as a command line takes it.
      kind: its type.
      default: as gin text; None: it must be given.
      meaning: from the docstring.
      adjustable: whether a resumed run may change it.
    """

    name: str
    kind: str
    default: str | None
    meaning: str
    adjustable: bool

    def __str__(self) -> str:
        default = " (must be given)" if self.default is None else f" = {self.default}"
        note = " May change when a run is resumed." if self.adjustable else ""
        return f"  {self.name}: {self.kind}{default}\n      {self.meaning}{note}"


def reference(roots: Iterable[type], name: str | None = None, word: str | None = None) -> str:
    """Returns what may be set, as text.

    Args:
      roots: the classes that modes make.
      name: of a class, or `Class.field`; None: a line for each class.
      word: list instead every setting whose name or meaning has this text, in any case of letters.

    Raises:
      ConfigError: there is no such class or setting, or none with the word.
    """
    classes = classes_within(roots)
    if word is not None:
        return _found(classes, word)
    if name is None:
        return "\n".join(headline(cls) for cls in sorted(classes, key=full_name))
    wanted = [cls for cls in classes if f".{full_name(cls)}".endswith(f".{name}")]
    if wanted:
        return "\n\n".join(
            "\n".join([headline(cls), *map(str, settings_of(cls))]) for cls in wanted
        )
    named = [s for cls in classes for s in settings_of(cls) if s.name == name]
    if named:
        return "\n".join(map(str, named))
    names = {cls.__name__ for cls in classes} | {s.name for c in classes for s in settings_of(c)}
    raise ConfigError(f"there is no setting {name!r}{nearest(name, names)}")


def settings_of(cls: type) -> list[Setting]:
    """Returns the settings of a `@validated` class, in the order of its fields."""
    meanings, defaults = _meanings(cls), field_defaults(cls)
    return [
        Setting(
            name=f"{cls.__name__}.{field.name}",
            kind=_kind(field_types(cls)[field.name]),
            default=_written(defaults[field.name]) if field.name in defaults else None,
            meaning=meanings.get(field.name, ""),
            adjustable=field.name in adjustable_fields(cls),
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


def headline(cls: type) -> str:
    """Returns a class's name, the import that gives it, and what it is, in a line."""
    package, _, short = home(cls).rpartition(".")
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    line = f"from {package} import {short}" if package else f"import {short}"
    return f"{short}.{cls.__name__} ({line}): {summary}"


def _found(classes: list[type], word: str) -> str:
    found = [
        setting
        for cls in classes
        for setting in settings_of(cls)
        if word.casefold() in f"{setting.name} {setting.meaning}".casefold()
    ]
    if not found:
        raise ConfigError(f"no setting has {word!r} in its name or meaning (try a shorter word)")
    return "\n".join(map(str, found))


def _meanings(cls: type) -> dict[str, str]:
    """Returns what the docstrings of a class and its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        name = ""
        doc = inspect.cleandoc(base.__doc__ or "")
        for line in re.split(r"^Attributes\b.*:$", doc, flags=re.MULTILINE)[-1].splitlines():
            start = _ATTRIBUTE.fullmatch(line)
            if start:
                name = start[1]
                found[name] = start[2]
            elif line.startswith("    ") and name:
                found[name] += f" {line.strip()}"
            else:
                name = ""
    return found


def _kind(hint: Any) -> str:
    """Returns a type as a reader would write it; an enum with its members."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " | ".join(repr(member) for member in hint.__members__)
    return type_name(hint)


def _written(value: Any) -> str:
    """Returns a value as gin writes it; an object by its class and what is not its default."""
    if is_validated(type(value)):
        cls: type = type(value)
        own = {name: getattr(value, name) for name in field_types(cls)}
        defaults = field_defaults(cls).items()
        changed = [f"{k}={_written(v)}" for k, v in own.items() if (k, v) not in defaults]
        return f"@{type(value).__name__}()" + (f" with {', '.join(changed)}" if changed else "")
    return repr(value.name) if isinstance(value, enum.Enum) else repr(value)
