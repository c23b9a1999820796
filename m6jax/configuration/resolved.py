"""Resolved configurations: an object back to a gin file that alone repeats it, and two compared.

Every field of every object is written, defaults included, under the object's class; objects of one
class that differ are told apart by a scope, the path of fields that leads to them:

    from __gin__ import dynamic_registration
    from m6jax import experiment

    experiment.Experiment.stages = (@stages_0/experiment.Stage(), @stages_1/experiment.Stage())

    stages_0/experiment.Stage.unit = 1

    stages_1/experiment.Stage.unit = 48

Two such texts are compared without importing anything, so that one written by an older m6jax can be
read:

>>> compare("run.Run.batch_size = 8", "run.Run.batch_size = 16")
['Run.batch_size: 8 became 16']
"""

import collections
import dataclasses
import enum
import importlib
import math
import operator
import types
from collections.abc import Collection, Mapping
from typing import Any

from m6jax.configuration.moves import SAVED, current
from m6jax.configuration.names import home
from m6jax.configuration.syntax import (
    DYNAMIC_REGISTRATION,
    Assignment,
    Import,
    Macro,
    Reference,
    parse,
)
from m6jax.foundation.validated import ConfigError, field_types, is_validated

LINE_LENGTH = 100

_LITERALS = (types.NoneType, bool, int, float, str, bytes)


def to_gin(value: Any, macros: Mapping[str, str] | None = None) -> str:
    """Returns the text of a gin file that makes an equal object.

    Args:
      value: an object of a `@validated` class.
      macros: what is to stay a macro, so that a command line may replace it: the macro's name to a
        field of `value` as `Class.field`, such as `{"MODEL_DIR": "Experiment.model_dir"}`.

    Raises:
      ConfigError: if something in `value` cannot be written: NaN, a lambda, an object that is not
        of a `@validated` class; or if `macros` names a field that `value` does not have.
      TypeError: if `value` is not of a `@validated` class.
    """
    if not is_validated(type(value)):
        raise TypeError(f"{value!r} is not an object of a settings class")
    writer = _Writer(value)
    definitions = []
    blocks = []
    names = {field: name for name, field in (macros or {}).items()}
    for obj in writer.objects:
        lines = []
        for field in _fields(obj):
            key = f"{type(obj).__name__}.{field}"
            text = writer.text(getattr(obj, field), key)
            if obj is value and key in names:
                name = names.pop(key)
                definitions.append(_line(name, text))
                text = [f"%{name}"]
            lines.append(_line(f"{writer.selector(obj)}.{field}", text))
        blocks.append(lines)
    if names:
        raise ConfigError(f"{type(value).__name__} has no field for the macro(s) {names}")
    groups = [[SAVED], writer.imports(), definitions, *blocks]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _line(name: str, text: list[str]) -> str:
    """Returns `name = text`; a container too long for a line gets one for each part."""
    joined = f"{name} = {''.join(text)}"
    if len(joined) <= LINE_LENGTH or len(text) == 1:
        return joined
    opening, *inside, closing = text
    parts = "".join(f"    {part.strip()}\n" for part in inside)
    return f"{name} = {opening}\n{parts}{closing}"


class _Writer:
    """Knows the modules, and the scope of every object, within one value.

    Attributes:
      objects: the different objects of `@validated` classes, outermost first.
    """

    def __init__(self, root: Any) -> None:
        self._found: dict[Any, tuple[Any, tuple[str, ...]]] = {}
        self._modules: set[str] = set()
        self._collect(root)
        self.objects = [obj for obj, _ in self._found.values()]
        per_class = collections.Counter(type(obj) for obj in self.objects)
        self._scopes = {
            key: "/".join((*path, "")) if per_class[type(obj)] > 1 else ""
            for key, (obj, path) in self._found.items()
        }
        last_parts = collections.Counter(_last_part(module) for module in self._modules)
        self._aliases = {
            module: module.replace(".", "_") if last_parts[_last_part(module)] > 1 else ""
            for module in self._modules
        }

    def imports(self) -> list[str]:
        """Returns the lines that make the classes known."""
        lines = [f"from {DYNAMIC_REGISTRATION.replace('.', ' import ')}"]
        for module in sorted(self._modules):
            package, _, name = module.rpartition(".")
            line = f"from {package} import {name}" if package else f"import {name}"
            lines.append(f"{line} as {self._aliases[module]}" if self._aliases[module] else line)
        return lines

    def selector(self, obj: Any) -> str:
        """Returns `scope/module.Class` for an object."""
        return f"{self._scopes[_key(obj)]}{self._target(type(obj))}"

    def text(self, value: Any, where: str) -> list[str]:
        """Returns `value` in gin; a container as its brackets and one string for each part."""
        if is_validated(type(value)):
            return [f"@{self.selector(value)}()"]
        if isinstance(value, enum.Enum):
            return [repr(value.name)]
        if type(value) is float:
            return [_float(value, where)]
        if type(value) in _LITERALS:
            return [repr(value)]
        if type(value) in (tuple, list):
            parts = ["".join(self.text(part, where)) for part in value]
            return _container("()" if type(value) is tuple else "[]", parts)
        if type(value) is dict:
            items = [[self.text(part, where) for part in item] for item in value.items()]
            return _container("{}", [f"{''.join(k)}: {''.join(v)}" for k, v in items])
        return [f"@{self._target(value)}"]

    def _target(self, target: Any) -> str:
        module = home(target)
        return f"{self._aliases[module] or _last_part(module)}.{target.__qualname__}"

    def _collect(self, root: Any) -> None:
        """Finds all objects and modules, the shallowest first: they give the shortest scopes."""
        name = type(root).__name__
        waiting: collections.deque[tuple[Any, tuple[str, ...], str]]
        waiting = collections.deque([(root, (name,), name)])
        while waiting:
            value, path, where = waiting.popleft()
            if is_validated(type(value)):
                if _key(value) not in self._found:
                    self._found[_key(value)] = (value, path[1:])
                    self._modules.add(_module(type(value), where))
                    for name in _fields(value):
                        inner = f"{type(value).__name__}.{name}"
                        waiting.append((getattr(value, name), (*path, name), inner))
            elif type(value) in (tuple, list):
                for index, part in enumerate(value):
                    waiting.append((part, (*path[:-1], f"{path[-1]}_{index}"), where))
            elif type(value) is dict:
                waiting.append((tuple(value.keys()), (*path, "key"), where))
                waiting.append((tuple(value.values()), path, where))
            elif type(value) not in _LITERALS and not isinstance(value, enum.Enum):
                self._modules.add(_module(value, where))


def _fields(value: object) -> list[str]:
    cls: type = type(value)
    return list(field_types(cls))


def _key(value: Any) -> Any:
    """Returns something hashable that is equal for what gin text cannot tell apart."""
    if is_validated(type(value)):
        return type(value), tuple(_key(getattr(value, field)) for field in _fields(value))
    if isinstance(value, dict):
        return dict, tuple((_key(k), _key(v)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(_key(part) for part in value)
    return type(value), repr(value)  # 1, 1.0 and True differ, and so do 0.0 and -0.0


def _container(brackets: str, parts: list[str]) -> list[str]:
    """Returns the brackets and the parts with their commas."""
    ends = [", "] * len(parts)
    if parts:
        ends[-1] = "," if brackets == "()" and len(parts) == 1 else ""
    return [brackets[0], *(part + end for part, end in zip(parts, ends, strict=True)), brackets[1]]


def _float(value: float, where: str) -> str:
    if math.isnan(value):
        raise ConfigError(f"{where}: NaN cannot be written in gin")
    if math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return repr(value)


def _last_part(module: str) -> str:
    return module.rpartition(".")[2]


def _module(target: Any, where: str) -> str:
    """Returns the module in which `target` is found by its name."""
    module = str(getattr(target, "__module__", None))
    name = str(getattr(target, "__qualname__", None))
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        found = None
    if found is not target:
        raise ConfigError(
            f"{where}: {target!r} cannot be written to a file; give a literal, an object of a"
            " settings class, or a function that its module has by name"
        )
    return home(target)


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


def compare(
    text_a: str,
    text_b: str,
    ignore: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[str]:
    """Returns a line with both values for every setting in which two resolved texts differ.

    Args:
      text_a: the earlier configuration, as `to_gin` wrote it.
      text_b: the later one.
      ignore: fields that may differ, each as `Class.field`, with all that is below them.
      defaults: value of a field that the earlier text lacks, each as `Class.field`. A text that was
        written before a setting was added lacks it, and its run did what the default says.

    Raises:
      ConfigError: if a text is not gin.
    """
    found = differences(text_a, text_b, ignore, defaults)
    return [f"{path}: {a} became {b}" for path, (a, b) in found.items()]


def differences(
    text_a: str,
    text_b: str,
    ignore: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> dict[str, tuple[str, str]]:
    """Returns what `compare` says, by setting: how each of the two texts has it."""
    found: dict[str, tuple[str, str]] = {}

    def visit(a: Any, b: Any, path: str) -> None:
        if isinstance(a, _Node) and isinstance(b, _Node) and a.name == b.name:
            for name in dict.fromkeys([*a.fields, *b.fields]):
                field = f"{a.name}.{name}"
                if field not in ignore:
                    before = _as_read(defaults[field]) if field in defaults else _ABSENT
                    value_a, value_b = a.fields.get(name, before), b.fields.get(name, _ABSENT)
                    visit(value_a, value_b, f"{path}.{name}")
        elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and _partwise(a, b):
            for index, (part_a, part_b) in enumerate(zip(a, b, strict=True)):
                visit(part_a, part_b, f"{path}[{index}]")
        elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            for key in a:
                visit(a[key], b[key], f"{path}[{key!r}]")
        elif a != b:
            found[path] = repr(a), repr(b)

    a, b = _tree(text_a, "the earlier configuration"), _tree(text_b, "the later configuration")
    visit(a, b, b.name)
    return found


def _partwise(a: Any, b: Any) -> bool:
    """Whether two tuples are compared part by part: objects, as many here as there."""
    return len(a) == len(b) and any(isinstance(part, _Node) for part in (*a, *b))


def _tree(text: str, name: str) -> _Node:
    """Returns the first object of `text` with all that it refers to."""
    macros: dict[str, Any] = {}
    modules: dict[str, str] = {}
    objects: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for statement in parse(text, name):
        if isinstance(statement, Assignment) and statement.selector:
            fields = objects.setdefault((statement.scopes, statement.selector), {})
            fields[statement.name] = statement.value
        elif isinstance(statement, Assignment):
            macros[statement.name] = statement.value
        elif isinstance(statement, Import) and statement.whole:
            modules[statement.name] = statement.module
    if not objects:
        raise ConfigError(f"{name} sets nothing")

    def expand(value: Any) -> Any:
        if isinstance(value, Macro):
            return expand(macros[value.name]) if value.name in macros else value
        if isinstance(value, Reference) and value.call:
            return node(value.scopes, value.selector)
        if isinstance(value, Reference):
            return dataclasses.replace(value, selector=full_name(value.selector))
        if isinstance(value, dict):
            return {key: expand(part) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(expand(part) for part in value)
        return value

    def full_name(selector: str) -> str:
        """Returns today's name: the earlier text may have the one of then."""
        module, _, name = selector.rpartition(".")
        return current(f"{modules.get(module, module)}.{name}")

    def node(scopes: tuple[str, ...], selector: str) -> _Node:
        fields = objects.get((scopes, selector), {})
        name = full_name(selector).rpartition(".")[2]
        return _Node(name, {field: expand(value) for field, value in fields.items()})

    return node(*next(iter(objects)))


def _as_read(value: Any) -> Any:
    """Returns a value as `_tree` returns it from the text that `to_gin` writes for it."""
    if is_validated(type(value)):
        fields = {name: _as_read(getattr(value, name)) for name in _fields(value)}
        return _Node(type(value).__name__, fields)
    if isinstance(value, enum.Enum):
        return value.name
    if type(value) in _LITERALS:
        return value
    if isinstance(value, dict):
        return {_as_read(key): _as_read(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_as_read, value))
    return Reference((), f"{home(value)}.{value.__qualname__}", call=False)
