r"""Text of gin files to statements that know their line.

Only here does m6jax touch gin, and only its parser: that one has no global state, and unlike gin's
own tables it keeps the line of every statement.

>>> [*parse("BATCH = 8\nstage_0/train.Stage.batch_size = %BATCH", "run.gin")]
[Assignment(scopes=(), selector='', name='BATCH', value=8, place='run.gin:1'),
 Assignment(scopes=('stage_0',), selector='train.Stage', name='batch_size', value=%BATCH,
            place='run.gin:2')]
"""

import dataclasses
import re
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

from gin import config_parser

from m6jax.foundation.validated import ConfigError, nearest

REQUIRED = "gin.REQUIRED"
DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"

_PYTHON_WORDS = ("True", "False", "None")


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name` inside a value; `scope/name` is one name."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/selector()`, or without the parentheses, inside a value."""

    scopes: tuple[str, ...]
    selector: str
    call: bool

    def __repr__(self) -> str:
        return f"@{'/'.join((*self.scopes, self.selector))}{'()' * self.call}"


@dataclasses.dataclass(frozen=True)
class Assignment:
    """`scope/selector.name = value`; a macro has no selector, and its scopes in its name."""

    scopes: tuple[str, ...]
    selector: str
    name: str
    value: Any
    place: str


@dataclasses.dataclass(frozen=True)
class Import:
    """`import a.b`, `import a.b as name` or `from a import b [as name]`.

    Attributes:
      module: full name of the module.
      name: what the statement makes known to its file.
      whole: whether `name` stands for `module` itself, and not for its outermost package.
      place: file and line.
    """

    module: str
    name: str
    whole: bool
    place: str


@dataclasses.dataclass(frozen=True)
class Include:
    """`include 'path'`."""

    path: str
    place: str


Statement = Assignment | Import | Include


def parse(text: str, file: str) -> Iterator[Statement]:
    """Yields the statements of a gin file's text, in order.

    Raises:
      ConfigError: at the first thing that is not gin; statements before it were yielded.
    """
    return _statements(text, lambda line: f"{file}:{line}")


def parse_binding(text: str) -> Assignment:
    """Returns `NAME=VALUE` of the command line as an assignment.

    Raises:
      ConfigError: if it is not one binding, with the usual reason: a text without quotes.
    """
    place = f"--gin.{text}".replace("\n", "\\n")  # a problem is one line
    try:
        statements = list(_statements(text, lambda line: place))
    except ConfigError as error:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{place}: expected --gin.NAME=VALUE") from None
        hint = f"; if it is a text, quote it twice: --gin.{name.strip()}='\"{value.strip()}\"'"
        raise ConfigError(f"{error}{hint}") from None
    if len(statements) != 1 or not isinstance(statements[0], Assignment):
        raise ConfigError(f"{place}: expected one binding, --gin.NAME=VALUE")
    return statements[0]


def _statements(text: str, place: Callable[[int], str]) -> Iterator[Statement]:
    parser = None
    try:
        parser = config_parser.ConfigParser(text, _Nodes())
        for statement in parser:
            at = place(statement.location.line_num)
            if isinstance(statement, config_parser.BindingStatement):
                yield _assignment(statement, at)
            elif isinstance(statement, config_parser.ImportStatement):
                whole = statement.is_from or bool(statement.alias)
                yield Import(statement.module, statement.bound_name(), whole, at)
            elif isinstance(statement, config_parser.IncludeStatement):
                yield Include(statement.filename, at)
    except SyntaxError as error:
        raise ConfigError(f"{place(error.args[1][1])}: {_reason(*_at(error))}") from None
    except tokenize.TokenError as error:
        reason, (line, _) = error.args
        raise ConfigError(
            f"{place(line)}: {reason} (a bracket or quote is opened and not closed)"
        ) from None
    except TypeError as error:  # a dict whose key is a list
        line = parser.current_token.start[0] if parser else 1
        raise ConfigError(f"{place(line)}: not valid gin: {error}") from None


def _assignment(statement: config_parser.BindingStatement, place: str) -> Assignment:
    scope, selector, name, value, _ = statement
    if not name:
        return Assignment((), "", f"{scope}/{selector}" if scope else selector, value, place)
    return Assignment(tuple(scope.split("/")) if scope else (), selector, name, value, place)


def _at(error: SyntaxError) -> tuple[str, str]:
    """Returns gin's reason and the line that it is about."""
    reason, (_, _, _, line) = error.args
    return reason, line.strip()


def _reason(gin_reason: str, line: str) -> str:
    """Returns gin's reason without the innards of Python's parser."""
    several = re.fullmatch(r"((?:from\s+\S+\s+)?import)\s+(.+,.+)", line)
    if several:
        lines = [f"'{several[1]} {name.strip()}'" for name in several[2].split(",")]
        return f"one name for each import: {' and '.join(lines)}, each on a line of its own"
    word = re.search(r"Failed to parse token '(.*)'", gin_reason, re.DOTALL)
    if word is None:
        return f"not valid gin: {gin_reason}"
    if word[1].lstrip("-") in ("inf", "nan"):
        return f"{word[1]!r} is not a value in gin (write 1e999 for infinity)"
    for python_word in _PYTHON_WORDS:
        if word[1].casefold() == python_word.casefold():
            return f"{word[1]!r} is not a value{nearest(word[1], [python_word])}"
    return f"{word[1]!r} is not a value (a text needs quotes, a macro %, a class @)"


class _Nodes(config_parser.ParserDelegate):
    """Leaves references and macros as they are written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        # Gin finds its constant by the last part of its name too.
        return Macro(REQUIRED if macro_name == "REQUIRED" else macro_name)
