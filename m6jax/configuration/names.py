"""From a name in a gin file to the class or function that it means, or the nearest one.

A class is called by the shortest name that Python knows it by: `m6jax.training.Update`, which its
package exports, and not `m6jax.training.train_step.Update`, where it is written.

A file sees the modules that it imports itself, as in gin's dynamic registration. The command line
sees those of all files and whatever m6jax's packages export, and also knows a class by the end of
its name: `Stage` or `experiment.Stage` for `m6jax.experiment.Stage`.
"""

import dataclasses
import functools
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from m6jax.configuration import moves
from m6jax.configuration.syntax import DYNAMIC_REGISTRATION, Assignment, Import, Reference
from m6jax.foundation.validated import (
    ConfigError,
    adjustable_fields,
    field_defaults,
    field_types,
    is_validated,
    nearest,
)

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


class Names(Protocol):
    """Where names are looked up."""

    def find(self, selector: str) -> Any:
        """Returns what `selector` stands for, UNUSABLE if a failed import should have given it.

        Raises:
          ConfigError: if it stands for nothing; says what is nearest.
        """
        ...


class FileNames:
    """The names that one file's imports make known.

    Args:
      known: classes that the user may have forgotten to import.
      saved: whether a run wrote the file; then names of before are understood.
    """

    def __init__(self, known: Sequence[type], saved: bool = False) -> None:
        self._known = known
        self._saved = saved
        self._table: dict[str, Any] = {}
        self._dynamic_registration = False

    def add(self, statement: Import) -> None:
        """Imports what the statement asks for.

        Raises:
          ConfigError: if it cannot be imported; names that it should have given are UNUSABLE.
        """
        if statement.module == DYNAMIC_REGISTRATION:
            self._dynamic_registration = True
            return
        self._table[statement.name] = UNUSABLE
        if statement.module.startswith("__gin__."):
            raise ConfigError(f"gin has no {statement.module!r}, only {DYNAMIC_REGISTRATION!r}")
        if not self._dynamic_registration:
            line = "from __gin__ import dynamic_registration"
            raise ConfigError(f"put {line!r} above the first import")
        name = moves.current(statement.module)
        if name != statement.module and not self._saved:
            raise ConfigError(_moved(statement.module))
        try:
            module = importlib.import_module(name)
            if not statement.whole:
                module = importlib.import_module(statement.name)
        except ImportError as error:
            raise ConfigError(_import_reason(name, error, self._known)) from None
        self._table[statement.name] = module

    def find(self, selector: str) -> Any:
        """See `Names`."""
        first, *rest = selector.split(".")
        if first not in self._table:
            raise ConfigError(self._unknown(first, rest))
        target = self._table[first]
        for name in rest:
            if target is UNUSABLE:
                break
            if not hasattr(target, name):
                old = f"{full_name(target)}.{name}"
                if moves.current(old) != old and self._saved:
                    target = locate(moves.current(old))
                    continue
                if moves.current(old) != old:
                    raise ConfigError(_moved(old))
                choices = _nearest_member(name, target)
                raise ConfigError(f"{full_name(target)} has no {name!r}{choices}")
            target = getattr(target, name)
        return target

    def _unknown(self, first: str, rest: list[str]) -> str:
        message = f"no import of this file gives {first!r}"
        for cls in self._known:
            if cls.__name__ == (rest or [first])[-1]:
                module, short = home(cls), home(cls).rpartition(".")[2]
                return f"{message}: import {module} for {short}.{cls.__qualname__}"
        return f"{message}{nearest(first, self._table)}"


class CommandLineNames:
    """The names of all files, and classes by the end of their name.

    Args:
      files: names of the files.
      known: classes that may be meant although no binding has them.
      bound: classes that the files set fields of.
    """

    def __init__(self, files: Sequence[FileNames], known: Sequence[type], bound: Sequence[type]):
        self._files = files
        self._classes = list(dict.fromkeys([*known, *bound]))

    def find(self, selector: str) -> Any:
        """See `Names`."""
        found: list[Any] = []
        for file in self._files:
            try:
                found.append(file.find(selector))
            except ConfigError:
                continue
        if not found:
            found = [cls for cls in self._classes if _ends_with(cls, selector)]
        if not found:
            found = self._exported(selector)
        if not found:
            if moves.current(selector) != selector:
                raise ConfigError(_moved(selector))
            names = {cls.__name__ for cls in self._classes}
            raise ConfigError(f"there is no class {selector!r}{nearest(selector, names)}")
        if any(target is not found[0] for target in found):
            names = {full_name(target) for target in found}
            raise ConfigError(f"{selector!r} may be {' or '.join(sorted(names))}: say which")
        return found[0]

    def _exported(self, selector: str) -> list[Any]:
        """Returns what `selector` names in the packages of the known classes, if it does."""
        packages = dict.fromkeys(cls.__module__.partition(".")[0] for cls in self._classes)
        for name in (selector, *(f"{package}.{selector}" for package in packages)):
            if "." in selector and name.partition(".")[0] in packages:
                target = locate(name)
                if target is not None:
                    return [target]
        return []


def locate(name: str) -> Any:
    """Returns the module, class or function with a full name, None if there is none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


@functools.cache
def home(target: Any) -> str:
    """Returns the package that exports a class or function, else the module that defines it.

    >>> home(Update)  # is defined in m6jax.training.train_step
    'm6jax.training'
    """
    parts = str(target.__module__).split(".")
    for end in range(len(parts) - 1, 0, -1):
        package = importlib.import_module(".".join(parts[:end]))
        name = target.__qualname__
        if name in getattr(package, "__all__", ()) and getattr(package, name) is target:
            return package.__name__
    return str(target.__module__)


def classes_within(roots: Iterable[type]) -> list[type]:
    """Returns the `@validated` classes among `roots` and, at any depth, their fields' types."""
    found: dict[type, None] = {}
    waiting = list(roots)
    while waiting:
        hint = waiting.pop(0)
        if is_validated(hint) and hint not in found:
            found[hint] = None
            waiting.extend(field_types(hint).values())
        waiting.extend(typing.get_args(hint))
    return list(found)


def adjustable(root: type) -> frozenset[str]:
    """Returns the `adjustable` fields of all classes within `root`, each as `Class.field`."""
    return frozenset(
        f"{cls.__name__}.{name}"
        for cls in classes_within([root])
        for name in adjustable_fields(cls)
    )


def defaults(root: type) -> dict[str, Any]:
    """Returns the default of each field, as `Class.field`, of all classes within `root`."""
    return {
        f"{cls.__name__}.{name}": value
        for cls in classes_within([root])
        for name, value in field_defaults(cls).items()
    }


def full_name(target: Any) -> str:
    """Returns the name by which a user calls a class, function or module."""
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", repr(target)))
    return f"{home(target)}.{name}" if getattr(target, "__module__", None) else name


def resolve(value: Any, names: Names, report: typing.Callable[[str], None]) -> Any:
    """Returns `value` with its references replaced by what they stand for.

    Those that stand for nothing are reported and become UNUSABLE.
    """
    if isinstance(value, Reference):
        try:
            return _referred(names.find(value.selector), value)
        except ConfigError as error:
            report(f"{value!r}: {error}")
            return UNUSABLE
    if isinstance(value, dict):
        return {resolve(k, names, report): resolve(v, names, report) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(resolve(part, names, report) for part in value)
    return value


def target_class(statement: Assignment, names: Names) -> type | None:
    """Returns the class whose field `statement` sets, None if its import has failed.

    Raises:
      ConfigError: if there is no such class or field.
    """
    target = names.find(statement.selector)
    if target is UNUSABLE:
        return None
    if not is_validated(target):
        raise ConfigError(f"{statement.selector!r} is not a settings class: it has nothing to set")
    if statement.name not in field_types(target):
        choices = nearest(statement.name, field_types(target))
        raise ConfigError(f"{target.__name__} has no field {statement.name!r}{choices}")
    return target


def _referred(target: Any, reference: Reference) -> Any:
    if target is UNUSABLE:
        return UNUSABLE
    if reference.call:
        if not is_validated(target):
            raise ConfigError(
                f"{full_name(target)} is not a settings class, and gin calls only those here; where"
                " a setting takes a function, give it without parentheses; to give what a call of"
                " it returns, wrap the call in a function of a module of your own"
            )
        return Call(target, reference.scopes)
    if is_validated(target):
        raise ConfigError(f"a settings class needs parentheses: {reference!r}()")
    if not callable(target) or reference.scopes:
        raise ConfigError("without parentheses only a function without a scope can be given")
    return target


def _ends_with(cls: type, selector: str) -> bool:
    names = (full_name(cls), f"{cls.__module__}.{cls.__qualname__}")
    return any(f".{name}".endswith(f".{selector}") for name in names)


def _moved(old: str) -> str:
    """Returns the message for a name of before."""
    new = moves.current(old)
    target = locate(new)
    if isinstance(target, types.ModuleType):
        members = [m for m in vars(target).values() if getattr(m, "__module__", None) == new]
        exported = [m for m in members if is_validated(m) and home(m) != new]
        if exported:
            package, names = home(exported[0]), sorted(map(full_name, exported))
            short = ", ".join(name.removeprefix(f"{package.rpartition('.')[0]}.") for name in names)
            return f"{old} has moved: import {package} and write {short}"
        return f"{old} has moved: import {new}"
    return f"{old} is now called {full_name(target)}"


def _nearest_member(name: str, target: Any) -> str:
    members = getattr(target, "__dict__", {})
    classes = [key for key, member in members.items() if is_validated(member)]
    return nearest(name, classes or [key for key in members if not key.startswith("_")])


def _import_reason(module: str, error: ImportError, known: Sequence[type]) -> str:
    missing = error.name or ""
    if not missing or not f"{module}.".startswith(f"{missing}."):
        return f"importing {module} failed: {error}"
    parent, _, name = missing.rpartition(".")
    if not parent:
        packages = {cls.__module__.partition(".")[0] for cls in known}
        return f"there is no module {missing!r}{nearest(missing, packages)}"
    package = importlib.import_module(parent)
    if hasattr(package, name):
        short = parent.rpartition(".")[2]
        return f"gin imports only modules: import {parent} and write {short}.{name}"
    modules = [info.name for info in pkgutil.iter_modules(getattr(package, "__path__", []))]
    return f"there is no module {missing!r}{nearest(name, modules)}"
