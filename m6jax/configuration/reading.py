"""Files and includes: from paths and the command line to `Settings`.

A relative path is looked for beside the including file, then in the current directory, in the
search paths given, and in the directory that holds m6jax and its configs/.
"""

import os
import pathlib
from collections.abc import Iterable, Sequence

import m6jax
from m6jax.configuration.bindings import Binding, Problems, Settings
from m6jax.configuration.names import (
    CommandLineNames,
    FileNames,
    Names,
    classes_within,
    resolve,
    target_class,
)
from m6jax.configuration.syntax import Assignment, Import, Include, parse, parse_binding
from m6jax.foundation.validated import ConfigError, nearest

REPOSITORY = pathlib.Path(m6jax.__file__).parent.parent

PathLike = str | os.PathLike[str]


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
        self._directories = [pathlib.Path(), *map(pathlib.Path, search_paths), REPOSITORY]
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
        names = CommandLineNames(self._file_names, self._known, self.settings)
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
            text = found.read_text(encoding="utf-8")
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
        names = FileNames(self._known)
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
        candidate = pathlib.Path(os.path.abspath(directory / path))
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
