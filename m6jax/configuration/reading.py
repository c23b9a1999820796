"""What the files and the command line say: names resolved, places kept.

A relative path is looked for beside the including file, then in the current directory, in the
search paths given, and in the directory that holds m6jax and its configs/.

A class's fields, as seen in a scope, follow gin's rules: `a/b/Stage.unit` beats `a/Stage.unit`,
which beats `Stage.unit`, and of two bindings of one name the later wins.
"""

import collections
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import m6jax
from m6jax.configuration import moves
from m6jax.configuration.names import (
    CommandLineNames,
    FileNames,
    Names,
    Scopes,
    classes_within,
    resolve,
    target_class,
)
from m6jax.configuration.syntax import (
    REQUIRED,
    Assignment,
    Import,
    Include,
    Macro,
    parse,
    parse_binding,
)
from m6jax.foundation.validated import ConfigError, nearest

logger = logging.getLogger(__name__)

# configs/ is inside of an installed package, and beside it in a checkout.
_PACKAGE = pathlib.Path(m6jax.__file__).parent
SHIPPED = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent

PathLike = str | os.PathLike[str]


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


def read(
    files: Sequence[PathLike],
    bindings: Sequence[str],
    search_paths: Sequence[PathLike],
    roots: Iterable[type],
    problems: Problems,
) -> Settings:
    """Returns everything that `files` and `bindings` say.

    Raises:
      ConfigError: if a file is missing, not gin, or imports what is not there (a line for each), as
        then half of what follows would be wrong for that reason alone.
    """
    reader = _Reader(search_paths, classes_within(roots), problems)
    for index, path in enumerate(files):
        reader.read_file(os.fspath(path), origin=(index,), parents=(), asked_by="")
    for text in bindings:
        reader.read_binding(text)
    if reader.incomplete:
        problems.stop_if_any()
    return reader.settings


class _Reader:
    def __init__(
        self, search_paths: Sequence[PathLike], known: Sequence[type], problems: Problems
    ) -> None:
        self.settings = Settings()
        self.incomplete = False
        searched = [pathlib.Path(path).expanduser() for path in search_paths]
        self._directories = [pathlib.Path(), *searched, SHIPPED]
        self._known = known
        self._problems = problems
        self._file_names: list[FileNames] = []

    def read_binding(self, text: str) -> None:
        """Reads `NAME=VALUE` of the command line."""
        try:
            assignment = parse_binding(text)
        except ConfigError as error:
            self._fail(str(error))
            return
        names = CommandLineNames(self._file_names, self._known, self.settings.classes)
        self._bind(assignment, names, origin=())

    def read_file(
        self, path: str, origin: tuple[int, ...], parents: tuple[pathlib.Path, ...], asked_by: str
    ) -> None:
        """Reads a file and what it includes.

        Args:
          path: as written.
          origin: see `Binding`.
          parents: the including files, outermost first.
          asked_by: what to put before `path` in a message.
        """
        directories = [*(file.parent for file in parents[-1:]), *self._directories]
        found = _find(path, directories)
        if found is None:
            self._fail(f"{asked_by}{path}: no such file{_searched(path, directories)}")
            return
        if found in parents:
            self._fail(f"{asked_by}{path}: being read already, it would include itself")
            return
        try:
            text = found.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            self._fail(f"{asked_by}{path}: cannot be read: {error}")
            return
        try:
            self._read_text(text, found, origin, parents)
        except ConfigError as error:
            self._fail(str(error))

    def _read_text(
        self,
        text: str,
        file: pathlib.Path,
        origin: tuple[int, ...],
        parents: tuple[pathlib.Path, ...],
    ) -> None:
        names = FileNames(self._known, moves.is_saved(text, file))
        self._file_names.append(names)
        for index, statement in enumerate(parse(text, _short(file))):
            if isinstance(statement, Assignment):
                self._bind(statement, names, origin)
            elif isinstance(statement, Import):
                try:
                    names.add(statement)
                except ConfigError as error:
                    self._fail(f"{statement.place}: {error}")
            elif isinstance(statement, Include):
                asked_by = f"{statement.place}: include "
                self.read_file(statement.path, (*origin, index), (*parents, file), asked_by)

    def _bind(self, statement: Assignment, names: Names, origin: tuple[int, ...]) -> None:
        """Adds an assignment to the settings, or reports why it cannot be."""

        def report(reason: str) -> None:
            self._problems.add(f"{statement.place}: {reason}")

        value = resolve(statement.value, names, report)
        cls = None
        if statement.selector:
            try:
                cls = target_class(statement, names)
            except ConfigError as error:
                report(str(error))
            if cls is None:
                self.settings.stray.append(value)
                return
        self.settings.add(
            Binding(cls, statement.name, statement.scopes, value, statement.place, origin)
        )

    def _fail(self, line: str) -> None:
        """Notes a problem that leaves the picture incomplete."""
        self._problems.add(line)
        self.incomplete = True


def _find(path: str, directories: Sequence[pathlib.Path]) -> pathlib.Path | None:
    for directory in directories:
        candidate = pathlib.Path(os.path.abspath(directory / os.path.expanduser(path)))
        if candidate.is_file():
            return candidate
    return None


def _searched(path: str, directories: Sequence[pathlib.Path]) -> str:
    """Returns the nearest file's name and where a missing file was looked for."""
    folders = {os.path.dirname(os.path.abspath(directory / path)) for directory in directories}
    names = {
        os.path.join(os.path.dirname(path), file.name)
        for folder in folders
        for file in pathlib.Path(folder).glob("*.gin")
    }
    if os.path.isabs(path):
        return nearest(path, names)
    searched = dict.fromkeys(os.path.abspath(directory) for directory in directories)
    return f"{nearest(path, names)}; searched {', '.join(searched)}"


def _short(path: pathlib.Path) -> str:
    """Returns `path` as a user in the current directory would write it."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
