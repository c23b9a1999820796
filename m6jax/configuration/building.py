"""From bindings to objects, as gin evaluates them, but with every problem reported at its line.

A reference without a scope keeps the scope that it is evaluated in, one with a scope replaces it,
and a macro's value is evaluated in the scope of the macro's own name. Each class is made once a
scope; a field that cannot be is reported, and everything else is still looked at.

Before that, `check_use` looks for what is bound but never used, and used but never bound.
References are counted without making anything: from the class of every mode, through the bindings
that its fields have, to the classes and macros in their values, and on. A binding that a later one
replaces still counts, so that `--gin.Experiment.optimizer=@Adafactor()` does not turn the file's
settings of Adam into errors.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable
from typing import Any

from m6jax.configuration.names import UNUSABLE, Call, Scopes
from m6jax.configuration.reading import Binding, Problems, Settings, macro_scopes, parts
from m6jax.configuration.syntax import REQUIRED, Macro
from m6jax.foundation.validated import (
    ConfigError,
    PathName,
    check_field,
    field_types,
    is_validated,
    nearest,
    type_name,
)

SPEAKING_LENGTH = 4  # a field's name has short words, as in `num_experts`, that fit every message
_SETTING = re.compile(r"\b([A-Z]\w*)\.([a-z]\w*)")  # as messages name one: `TextData.length`


def build(root: type, settings: Settings, problems: Problems) -> Any:
    """Returns an object of class `root` made from `settings`.

    Raises:
      ConfigError: if there are problems, those known before and those found here, a line for each.
    """
    value = _Builder(settings, problems).make(Call(root), asked_by="")
    problems.stop_if_any()
    return value


class _Builder:
    def __init__(self, settings: Settings, problems: Problems) -> None:
        self._settings = settings
        self._problems = problems
        self._made: dict[Call, Any] = {}
        self._in_progress: list[Call | Macro] = []

    def make(self, call: Call, asked_by: str) -> Any:
        """Returns the object of `call`, UNUSABLE if that has a problem."""
        if call not in self._made:
            self._made[call] = self._make(call, asked_by)
        return self._made[call]

    def _make(self, call: Call, asked_by: str) -> Any:
        bound = self._settings.fields(call.cls, call.scopes)
        arguments = {}
        self._in_progress.append(call)
        for field in dataclasses.fields(call.cls):
            if field.name in bound:
                arguments[field.name] = self._argument(call, bound[field.name])
            elif field.default is field.default_factory is dataclasses.MISSING:
                scopes = max((binding.scopes for binding in bound.values()), key=len, default=())
                label = f"{'/'.join((*scopes, call.cls.__name__))}.{field.name}"
                way = _way_to_give(label, field_types(call.cls)[field.name])
                self._problems.add(f"{label} has no value{asked_by}: {way}")
                arguments[field.name] = UNUSABLE
        self._in_progress.pop()
        if any(value is UNUSABLE for value in arguments.values()):
            return UNUSABLE
        try:
            return call.cls(**arguments)
        except ConfigError as error:  # from its `check`, or a default that its own field refuses
            self._problems.add(f"{error}{self._places(call, str(error))}")
            return UNUSABLE

    def _places(self, call: Call, message: str) -> str:
        """Returns where the settings that `message` speaks of were set; of all, if of none."""
        own = self._settings.fields(call.cls, call.scopes)
        named = _SETTING.findall(message)
        words = set(re.findall(r"\w+", message))
        found = {
            name: binding
            for name, binding in own.items()
            if (call.cls.__name__, name) in named or words & _speaking_words(name)
        }
        for other in self._made:
            for name, binding in self._settings.fields(other.cls, other.scopes).items():
                if other.cls is not call.cls and (other.cls.__name__, name) in named:
                    found[binding.label] = binding
        if not found and not named:
            found = own
        said = [f"{name} from {self._settings.supplier(b).place}" for name, b in found.items()]
        return f" [{'; '.join(said)}]" if said else "" if own else " [all defaults]"

    def _argument(self, call: Call, binding: Binding) -> Any:
        value = self._evaluate(binding.value, call.scopes, binding, binding)
        if value is UNUSABLE:
            return UNUSABLE
        try:
            return check_field(call.cls, binding.name, value)
        except ConfigError as error:
            place = self._settings.supplier(binding).place
            self._problems.add(f"{place}: {error}{self._macros(binding)}")
            return UNUSABLE

    def _evaluate(self, value: Any, scopes: Scopes, binding: Binding, user: Binding) -> Any:
        """Returns what `value` stands for.

        Args:
          value: as bound.
          scopes: in which to evaluate.
          binding: where `value` is written.
          user: the field's binding, for which it is evaluated.
        """
        if isinstance(value, Macro | Call):
            return self._evaluate_name(value, scopes, binding, user)
        if isinstance(value, dict):
            keys = self._evaluate(tuple(value.keys()), scopes, binding, user)
            values = self._evaluate(tuple(value.values()), scopes, binding, user)
            if keys is UNUSABLE or values is UNUSABLE:
                return UNUSABLE
            return dict(zip(keys, values, strict=True))
        if isinstance(value, tuple | list):
            evaluated = [self._evaluate(part, scopes, binding, user) for part in value]
            if any(part is UNUSABLE for part in evaluated):
                return UNUSABLE
            return type(value)(evaluated)
        return value

    def _evaluate_name(
        self, value: Macro | Call, scopes: Scopes, binding: Binding, user: Binding
    ) -> Any:
        if isinstance(value, Call):
            value = Call(value.cls, value.scopes or scopes)
        if value == Macro(REQUIRED):
            self._report_required(binding, user)
            return UNUSABLE
        if value in self._in_progress:
            self._problems.add(f"{binding.place}: {binding.label} = {value!r} leads back to itself")
            return UNUSABLE
        if isinstance(value, Call):
            return self.make(value, f" (needed for {binding.label} at {binding.place})")
        definition = self._settings.macro(value.name)
        if definition is None:  # check_use has reported it
            return UNUSABLE
        self._in_progress.append(value)
        result = self._evaluate(definition.value, macro_scopes(value.name), definition, user)
        self._in_progress.pop()
        return result

    def _report_required(self, binding: Binding, user: Binding) -> None:
        used = "" if binding is user else f" (used by {user.label})"
        hint = field_types(user.cls)[user.name] if user.cls else Any
        way = _way_to_give(binding.label, hint)
        self._problems.add(f"{binding.place}: {binding.label}{used} must be given: {way}")

    def _macros(self, binding: Binding) -> str:
        """Returns which macros a wrong value came through."""
        if isinstance(binding.value, Macro):
            return f" (as {binding.value!r} at {binding.place})"
        macros = {part.name for part in parts(binding.value) if isinstance(part, Macro)}
        places = [(name, self._settings.macro(name)) for name in sorted(macros)]
        said = ", ".join(f"%{name} from {found.place}" for name, found in places if found)
        return f" ({said})" if said else ""


def _speaking_words(name: str) -> set[str]:
    """Returns the words of a field's name by which a message may speak of it, and the name."""
    return {name, *(word for word in name.split("_") if len(word) >= SPEAKING_LENGTH)}


def _way_to_give(label: str, hint: Any) -> str:
    if is_validated(hint):
        value = f"@{hint.__name__}()"
    elif hint in (str, PathName):
        value = "'\"TEXT\"'"
    else:
        value = "VALUE"
    return f"set it in a file or with --gin.{label}={value} ({type_name(hint)})"


def check_use(settings: Settings, roots: Iterable[type], problems: Problems) -> None:
    """Adds a problem for every binding that no mode uses and every macro that is not defined.

    Args:
      settings: all bindings.
      roots: the classes that modes make.
      problems: where to add.
    """
    reach = _Reach(settings, roots)
    unused = [binding for binding in settings if id(binding) not in reach.used]
    for binding in unused:
        problems.add(f"{binding.place}: {_why_unused(binding, reach, settings, unused)}")
    for name, binding in reach.undefined.items():
        choices = nearest(name, settings.macro_names)
        problems.add(
            f"{binding.place}: {binding.label} uses %{name}, which is not defined{choices};"
            f" define {name} = ... (or {name} = %{REQUIRED}, to be given on the command line)"
        )


class _Reach:
    """What can be reached from the roots.

    Attributes:
      used: ids of the bindings reached.
      calls: the classes reached, with the scopes in which.
      macros: names of the macros referred to.
      undefined: those that no binding defines, with a binding that refers to each.
    """

    def __init__(self, settings: Settings, roots: Iterable[type]) -> None:
        self.used: set[int] = set()
        self.calls: dict[Call, None] = {}
        self.macros: set[str] = set()
        self.undefined: dict[str, Binding] = {}
        self._settings = settings
        for root in roots:
            self._visit_call(Call(root))
        for value in settings.stray:
            self._visit_value(value, (), None)

    def _visit_call(self, call: Call) -> None:
        if call in self.calls:
            return
        self.calls[call] = None
        for binding in self._settings.applying(call.cls, call.scopes):
            self._visit_binding(binding, call.scopes)

    def _visit_binding(self, binding: Binding, scopes: Scopes) -> None:
        self.used.add(id(binding))
        self._visit_value(binding.value, scopes, binding)

    def _visit_value(self, value: Any, scopes: Scopes, binding: Binding | None) -> None:
        for part in parts(value):
            if isinstance(part, Call):
                self._visit_call(Call(part.cls, part.scopes or scopes))
            elif isinstance(part, Macro) and part.name != REQUIRED:
                self._visit_macro(part.name, binding)

    def _visit_macro(self, name: str, binding: Binding | None) -> None:
        definitions = self._settings.definitions(name)
        if not definitions and binding and not self._settings.is_overridden(binding):
            self.undefined.setdefault(name, binding)
        if name not in self.macros:
            self.macros.add(name)
            for definition in definitions:
                self._visit_binding(definition, macro_scopes(name))


def _why_unused(binding: Binding, reach: _Reach, settings: Settings, unused: list[Binding]) -> str:
    said = f"{binding.label} = {binding.value!r} is never used"
    for other in unused:
        if other is not binding and _refers(other, binding):
            return f"{said}: only {other.label} at {other.place} refers to it, itself never used"
    if binding.cls is None:
        wanted = [name for name in reach.macros if name not in settings.macro_names]
        return f"macro {said}{nearest(binding.name, wanted or reach.macros)}"
    reference = repr(Call(binding.cls, binding.scopes))
    reached = {repr(call) for call in reach.calls if call.cls is binding.cls}
    if reached:
        return f"{said}: nothing refers to {reference}{nearest(reference, reached)}"
    places = [
        f"{call.cls.__name__}.{name}"
        for call in reach.calls
        for name, hint in field_types(call.cls).items()
        if _takes(hint, binding.cls)
    ]
    hint = f" (it would be by {places[0]} = {reference})" if places else ""
    return f"{said}: nothing refers to {reference}{hint}"


def _takes(hint: Any, cls: type) -> bool:
    if is_validated(hint):
        return issubclass(cls, hint)
    return any(_takes(arg, cls) for arg in typing.get_args(hint))


def _refers(binding: Binding, target: Binding) -> bool:
    if target.cls is None:
        return Macro(target.name) in list(parts(binding.value))
    return any(isinstance(part, Call) and part.cls is target.cls for part in parts(binding.value))
