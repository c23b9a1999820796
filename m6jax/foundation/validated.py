"""Configuration values that check themselves.

Every setting of m6jax is a field of a frozen dataclass made with `@validated`. A wrong value stops
where the object is made, from gin, from a notebook or from a test alike:

>>> @validated
... class Schedule:
...   peak: float
...   warmup_steps: int = 0
>>> Schedule(peak="8")
Traceback (most recent call last):
ConfigError: Schedule.peak: expected float, got '8' (str) (did you mean 8.0?)

Fields may be annotated with numbers, strings, booleans, enums (also given by the name of a member),
`Literal`, `PathName`, other classes, protocols marked `runtime_checkable`, `tuple[X, ...]`,
`tuple[X, Y]`, `dict[X, Y]`, `Callable` and unions of these. An `int` serves where a `float` is
wanted, a list where a tuple is; a subclass of float (numpy's) becomes a float, and so for int and
str.
"""

import ast
import collections.abc
import dataclasses
import difflib
import enum
import functools
import os
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, dataclass_transform

T = TypeVar("T")

# Annotation of a field that holds a path or a pattern of paths: `~` in front becomes the user's
# home when the object is made, so that no two uses of the setting can differ.
PathName = Annotated[str, "a path"]

MAX_CHOICES = 12  # a longer list hides the message that it follows
NEAREST_CHOICES = 10  # that are listed where there are more

_ADJUSTABLE = "may change when a run is resumed"

_PLAIN: dict[type, Callable[[Any], Any]] = {int: int, float: float, str: str.__str__}


class ConfigError(ValueError):
    """A setting that cannot work: the message names it, what was given and the way out."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the choice nearest to `name`, else the list of choices."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1)
    if not close:
        folded = {choice.casefold(): choice for choice in choices}
        matches = difflib.get_close_matches(name.casefold(), folded, n=1)
        close = [folded[match] for match in matches]
    if close:
        return f" (did you mean {close[0]!r}?)"
    if not choices:
        return ""
    if len(choices) <= MAX_CHOICES:
        return f" (choices: {', '.join(choices)})"
    close = difflib.get_close_matches(name, choices, n=NEAREST_CHOICES, cutoff=0.0)
    return f" (the nearest of {len(choices)} choices: {', '.join(close)})"


def adjustable(*, default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that may change when a run is resumed: where and how it goes on.

    All other fields are what the run is, and may not change.

    >>> @validated
    ... class Run:
    ...   seed: int = 0
    ...   log_every: int = adjustable(default=10)

    Args:
      default: of the field; without one, it must be given.
    """
    return dataclasses.field(default=default, metadata={_ADJUSTABLE: True})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, adjustable)
)
def validated(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass whose fields are checked when one is made.

    A class may define `check(self) -> None` for what a single field cannot say; it runs after the
    fields are checked and raises `ConfigError`.

    Raises:
      TypeError: if `cls` has a `__post_init__` of its own, which would never run.
    """
    if "__post_init__" in cls.__dict__:
        raise TypeError(f"{cls.__name__}: define check(self) in place of __post_init__")

    def check_all(self: Any) -> None:
        for field in dataclasses.fields(self):
            value = check_field(cls, field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if hasattr(self, "check"):
            self.check()

    cls.__post_init__ = check_all  # type: ignore[attr-defined]
    cls.__validated__ = True  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def is_validated(cls: Any) -> bool:
    """Whether `cls` is a class made with `@validated` (not merely derived from one)."""
    return isinstance(cls, type) and "__validated__" in cls.__dict__


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the annotation of each field of a `@validated` class, in their order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def adjustable_fields(cls: type) -> list[str]:
    """Returns the names of a `@validated` class's fields that were declared `adjustable`."""
    return [field.name for field in dataclasses.fields(cls) if _ADJUSTABLE in field.metadata]


def field_defaults(cls: type) -> dict[str, Any]:
    """Returns the value of each field of a `@validated` class that need not be given."""
    found = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is not dataclasses.MISSING:
            found[field.name] = check_field(cls, field.name, value)
    return found


def check_field(cls: type, name: str, value: Any) -> Any:
    """Returns `value` as field `name` of `cls` keeps it: a tuple for a list, an enum for its name.

    Raises:
      ConfigError: if the field cannot hold it.
      TypeError: if the annotation is none of those in this module's description.
    """
    return _coerce(value, field_types(cls)[name], f"{cls.__name__}.{name}")


def type_name(hint: Any) -> str:
    """Returns an annotation as a reader would write it: `float | None`, `tuple[Stage, ...]`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Ellipsis:
        return "..."
    if origin is Annotated:
        return type_name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin is typing.Literal:
        return " | ".join(repr(arg) for arg in args)
    if origin is collections.abc.Callable or hint is typing.Callable:
        return "Callable"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_name(arg) for arg in args)}]"
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as `hint` wants it; raises `ConfigError` naming `where` if it cannot be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if hint == PathName:
        return os.path.expanduser(_coerce(value, str, where))
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, hint, where)
    if origin is tuple:
        return _coerce_tuple(value, args, hint, where)
    if origin is dict:
        return _coerce_dict(value, args, hint, where)
    if origin is typing.Literal:
        return _coerce_literal(value, args, hint, where)
    if hint is typing.Callable or hint is collections.abc.Callable:
        origin = collections.abc.Callable
    if origin is collections.abc.Callable:
        if not callable(value):
            raise _mismatch(value, hint, where)
        return value
    if origin is type or (origin is None and isinstance(hint, type)):
        return _coerce_class(value, origin or hint, where)
    raise TypeError(f"{where}: a field cannot be annotated {hint}; see m6jax/validated.py")


def _coerce_union(value: Any, args: tuple[Any, ...], hint: Any, where: str) -> Any:
    if type(value) in args:  # `float | int` leaves an int an int
        return value
    errors = []
    for arg in args:
        try:
            return _coerce(value, arg, where)
        except ConfigError as error:
            errors.append(error)
    enums = [isinstance(arg, type) and issubclass(arg, enum.Enum) for arg in args]
    if isinstance(value, str) and sum(enums) == 1:  # only it knows the nearest member
        raise errors[enums.index(True)]
    raise _mismatch(value, hint, where)


def _coerce_tuple(value: Any, args: tuple[Any, ...], hint: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise _mismatch(value, hint, where)
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise _mismatch(value, hint, where)
    pairs = enumerate(zip(value, args, strict=True))
    return tuple(_coerce(v, a, f"{where}[{i}]") for i, (v, a) in pairs)


def _coerce_dict(value: Any, args: tuple[Any, ...], hint: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _mismatch(value, hint, where)
    key_hint, value_hint = args
    return {
        _coerce(k, key_hint, f"{where} key"): _coerce(v, value_hint, f"{where}[{k!r}]")
        for k, v in value.items()
    }


def _coerce_literal(value: Any, args: tuple[Any, ...], hint: Any, where: str) -> Any:
    if any(type(value) is type(arg) and value == arg for arg in args):  # 1 == True to Python
        return value
    if isinstance(value, str):
        names = [arg for arg in args if isinstance(arg, str)]
        raise ConfigError(f"{where}: {value!r} is not allowed{nearest(value, names)}")
    raise _mismatch(value, hint, where)


def _coerce_class(value: Any, cls: type, where: str) -> Any:
    if issubclass(cls, enum.Enum) and isinstance(value, str) and not isinstance(value, cls):
        if value in cls.__members__:
            return cls[value]
        names = [member.name for member in cls if member.value == value]
        choices = nearest(names[0] if names else value, cls.__members__)
        raise ConfigError(f"{where}: {value!r} is not a {cls.__name__}{choices}")
    if isinstance(value, bool) and cls in (int, float):  # True is an int to Python, not to a user
        raise _mismatch(value, cls, where)
    if cls is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, cls):
        raise _mismatch(value, cls, where)
    plain = _PLAIN.get(cls)
    return plain(value) if plain else value


def _mismatch(value: Any, hint: Any, where: str) -> ConfigError:
    got = type(value).__name__
    if is_validated(type(value)):
        got = f"{got}(...)"
    elif not is_validated(value):
        got = f"{value!r} ({got})"
    expected = type_name(hint)
    return ConfigError(f"{where}: expected {expected}, got {got}{_meant(value, hint, where)}")


def _meant(value: Any, hint: Any, where: str) -> str:
    """Returns what the user may have meant to write, nothing if that is not known."""
    return _alone(value, hint, where) or _unquoted(value, hint, where)


def _alone(value: Any, hint: Any, where: str) -> str:
    """Returns ` (write ('hello',))` for 'hello' where a tuple of texts is wanted, else nothing."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(filter(None, (_alone(value, h, where) for h in typing.get_args(hint))), "")
    args = typing.get_args(hint)
    if typing.get_origin(hint) is not tuple or args[1:] != (Ellipsis,):
        return ""
    try:
        _coerce(value, args[0], where)
    except ConfigError:
        return ""
    shown = f"@{type(value).__name__}()" if is_validated(type(value)) else repr(value)
    return f" (write ({shown},))"


def _unquoted(value: Any, hint: Any, where: str) -> str:
    """Returns ` (did you mean 8?)` for '8' where a number is wanted, else nothing."""
    if not isinstance(value, str):
        return ""
    try:
        meant = _coerce(ast.literal_eval(value), hint, where)
    except (ValueError, SyntaxError):  # not a literal, or one that does not serve (ConfigError)
        return ""
    return f" (did you mean {meant!r}?)"
