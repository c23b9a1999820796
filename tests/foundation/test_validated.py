"""Fields hold what they are annotated with, or the object is not made."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import pytest

from m6jax.foundation.validated import (
    ConfigError,
    PathName,
    check_field,
    field_types,
    is_validated,
    nearest,
    type_name,
    validated,
)


class Form(enum.Enum):
    STACKED = "stacked"
    UNROLLED = "unrolled"


class Digit(enum.Enum):
    ONE = "1x"
    MANY = [1, 2]  # noqa: RUF012


class Mode(enum.StrEnum):
    FAST = "quick"


@runtime_checkable
class Sized(Protocol):
    def __len__(self) -> int: ...


@validated
class Inner:
    size: int = 1


@validated
class Derived(Inner):
    more: float = 0.5


def make(hint: Any, value: Any) -> Any:
    """Returns `value` as a field `x` annotated with `hint` keeps it."""
    cls = validated(type("Settings", (), {"__annotations__": {"x": hint}}))
    return cls(x=value).x


@pytest.mark.parametrize(
    ("hint", "value", "kept"),
    [
        (int, 3, 3),
        (int, True, None),
        (int, 3.0, None),
        (int, "3", None),
        (float, 3, 3.0),
        (float, np.float64(0.1), 0.1),
        (float, True, None),
        (float, math.inf, math.inf),
        (bool, True, True),
        (bool, 1, None),
        (str, "text", "text"),
        (str, Mode.FAST, "quick"),
        (str, b"text", None),
        (Form, Form.STACKED, Form.STACKED),
        (Form, "UNROLLED", Form.UNROLLED),
        (Form, "unrolled", None),
        (Mode, Mode.FAST, Mode.FAST),
        (Mode, "FAST", Mode.FAST),
        (Inner, Inner(), Inner()),
        (Inner, Derived(), Derived()),
        (Derived, Inner(), None),
        (Inner, Inner, None),
        (type[Inner], Inner, Inner),
        (int | None, None, None),
        (int | None, 3, 3),
        (float | int, 3, 3),
        (Inner | Form, "STACKED", Form.STACKED),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, ...], (), ()),
        (tuple[int, ...], (1, 2.5), None),
        (tuple[int, ...], 3, None),
        (tuple[int, float], (1, 2), (1, 2.0)),
        (tuple[int, float], (1,), None),
        (tuple[()], (), ()),
        (dict[str, tuple[int, ...]], {"a": [1]}, {"a": (1,)}),
        (dict[str, int], {1: 1}, None),
        (dict[str, int], {"a": "b"}, None),
        (dict[str, int], [("a", 1)], None),
        (Literal["sum", 1], "sum", "sum"),
        (Literal["sum", 1], 1, 1),
        (Literal["sum", 1], True, None),
        (Literal["sum", 1], "mean", None),
        (Callable[[int], int], abs, abs),
        (Callable, abs, abs),
        (Callable[[int], int], 3, None),
        (Sized, "abc", "abc"),
        (Sized, 3, None),
        (Any, [1], [1]),
        (TypeVar("T"), [1], [1]),
    ],
)
def test_what_a_field_keeps(hint, value, kept):
    if kept is None and value is not None:
        with pytest.raises(ConfigError, match=r"^Settings\.x"):
            make(hint, value)
    else:
        result = make(hint, value)
        assert result == kept
        assert type(result) is type(kept)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, "8", "Settings.x: expected int, got '8' (str) (did you mean 8?)"),
        (float, "1e-3", "Settings.x: expected float, got '1e-3' (str) (did you mean 0.001?)"),
        (int, "eight", "Settings.x: expected int, got 'eight' (str)"),
        (int, "8.5", "Settings.x: expected int, got '8.5' (str)"),
        (
            int | None,
            "None",
            "Settings.x: expected int | None, got 'None' (str) (did you mean None?)",
        ),
        (Form, "STAKED", "Settings.x: 'STAKED' is not a Form (did you mean 'STACKED'?)"),
        (Form, "stacked", "Settings.x: 'stacked' is not a Form (did you mean 'STACKED'?)"),
        (Digit, "1x", "Settings.x: '1x' is not a Digit (did you mean 'ONE'?)"),
        (Form | None, "STAKED", "Settings.x: 'STAKED' is not a Form (did you mean 'STACKED'?)"),
        (Form, 3, "Settings.x: expected Form, got 3 (int)"),
        (
            Inner | None,
            Form.STACKED,
            "Settings.x: expected Inner | None, got <Form.STACKED: 'stacked'> (Form)",
        ),
        (Form, Inner(), "Settings.x: expected Form, got Inner(...)"),
        (Literal["sum", "mean"], "men", "Settings.x: 'men' is not allowed (did you mean 'mean'?)"),
        (Literal["sum", 1], 2, "Settings.x: expected 'sum' | 1, got 2 (int)"),
        (
            tuple[Form, ...],
            ["STACKED", "X"],
            "Settings.x[1]: 'X' is not a Form (choices: STACKED, UNROLLED)",
        ),
        (dict[str, int], {"a": None}, "Settings.x['a']: expected int, got None (NoneType)"),
        (dict[str, int], {3: 1}, "Settings.x key: expected str, got 3 (int)"),
        (Callable[[int], int], 3, "Settings.x: expected Callable, got 3 (int)"),
    ],
)
def test_messages(hint, value, message):
    with pytest.raises(ConfigError) as error:
        make(hint, value)
    assert str(error.value) == message


@pytest.mark.parametrize("hint", [list[int], set[int], 3])
def test_annotations_that_cannot_be_checked(hint):
    with pytest.raises(TypeError, match=r"Settings\.x: a field cannot be annotated"):
        check_field(dataclasses.make_dataclass("Settings", [("x", hint)]), "x", [1])


def test_objects_are_frozen_equal_by_value_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().size = 2
    with pytest.raises(TypeError):
        Inner(2)
    assert Inner(size=2) == dataclasses.replace(Inner(), size=2)
    assert hash(Inner(size=2)) == hash(Inner(size=2))
    with pytest.raises(ConfigError, match=r"Inner\.size"):
        dataclasses.replace(Inner(), size="2")


def test_check_runs_last_and_in_derived_classes():
    @validated
    class Ordered:
        low: float
        high: float = 1.0

        def check(self) -> None:
            if not self.low < self.high:
                raise ConfigError(f"Ordered.low: {self.low} is not below {self.high}")

    @validated
    class Longer(Ordered):
        name: str = ""

    assert Ordered(low=0).low == 0.0
    with pytest.raises(ConfigError, match=r"^Ordered\.low: 2\.0 is not below 1\.0$"):
        Ordered(low=2)
    with pytest.raises(ConfigError, match="is not below"):
        Longer(low=2, name="x")
    with pytest.raises(ConfigError, match=r"^Longer\.low: expected float"):
        Longer(low="x")


def test_defaults_may_be_objects():
    @validated
    class Outer:
        inner: Inner = Inner(size=3)
        parts: dict[str, Inner] = dataclasses.field(default_factory=dict)

    assert Outer().inner.size == 3
    assert Outer(parts={"a": Inner()}).parts == {"a": Inner()}
    assert Outer().parts is not Outer().parts


def test_post_init_of_its_own_is_refused():
    with pytest.raises(TypeError, match=r"Late: define check\(self\) in place of __post_init__"):

        @validated
        class Late:
            def __post_init__(self) -> None: ...


def test_is_validated():
    class Undecorated(Inner):
        pass

    assert is_validated(Inner)
    assert is_validated(Derived)
    assert not is_validated(Undecorated)
    assert not is_validated(Inner())
    assert not is_validated(Form)


def test_paths_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")

    @validated
    class Place:
        path: PathName
        other: PathName | None = None

    place = Place(path="~/a", other="~")
    assert (place.path, place.other) == ("/home/me/a", "/home/me")
    assert Place(path="gs://b/~").path == "gs://b/~"
    with pytest.raises(ConfigError, match=r"Place\.path: expected str, got 8"):
        Place(path=8)


def test_field_types():
    assert field_types(Derived) == {"size": int, "more": float}


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (float | None, "float | None"),
        (tuple[Inner, ...], "tuple[Inner, ...]"),
        (dict[str, Literal["a", 1]], "dict[str, 'a' | 1]"),
        (Callable[[int], int] | int, "Callable | int"),
        (Any, "Any"),
        (PathName | None, "str | None"),
    ],
)
def test_type_name(hint, name):
    assert type_name(hint) == name


def test_nearest():
    assert nearest("unti", ["unit", "depth"]) == " (did you mean 'unit'?)"
    assert nearest("stacked", ["STACKED"]) == " (did you mean 'STACKED'?)"
    assert nearest("zzz", ["unit", "depth"]) == " (choices: depth, unit)"
    assert nearest("zzz", []) == ""


def test_one_value_where_a_tuple_is_wanted():
    @validated
    class Prompts:
        texts: tuple[str, ...] | None = ()

    with pytest.raises(ConfigError, match=r"got 'hello' \(str\) \(write \('hello',\)\)$"):
        Prompts(texts="hello")


def test_of_many_choices_the_nearest_ten_are_listed():
    choices = [f"{letter}_setting" for letter in "abcdefghijklmnopqrst"]
    said = nearest("zzz", [*choices, "zoo"])
    assert said.startswith(" (the nearest of 21 choices: zoo, ")
    assert said.count(",") == 9
