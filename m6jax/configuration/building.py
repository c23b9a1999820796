"""From bindings to objects, as gin evaluates them, but with every problem reported at its line.

A reference without a scope keeps the scope that it is evaluated in, one with a scope replaces it,
and a macro's value is evaluated in the scope of the macro's own name. Each class is made once a
scope; a field that cannot be is reported, and everything else is still looked at.
"""

import dataclasses
from typing import Any

from m6jax.configuration.bindings import (
    UNUSABLE,
    Binding,
    Call,
    Problems,
    Scopes,
    Settings,
    macro_scopes,
    parts,
)
from m6jax.configuration.syntax import REQUIRED, Macro
from m6jax.foundation.validated import (
    ConfigError,
    check_field,
    field_types,
    is_validated,
    type_name,
)

SPEAKING_LENGTH = 4  # a field's name has short words, as in `num_experts`, that fit every message


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
            self._problems.add(f"{error} [{self._places(bound, str(error))}]")
            return UNUSABLE

    def _places(self, bound: dict[str, Binding], message: str) -> str:
        """Returns where the fields that `message` speaks of were set; of all, if it names none."""
        spoken_of = {
            name: binding
            for name, binding in bound.items()
            if any(word in message for word in name.split("_") if len(word) >= SPEAKING_LENGTH)
        }
        suppliers = {
            name: self._settings.supplier(binding).place
            for name, binding in (spoken_of or bound).items()
        }
        said = "; ".join(f"{name} from {place}" for name, place in suppliers.items())
        return said or "all defaults"

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


def _way_to_give(label: str, hint: Any) -> str:
    if is_validated(hint):
        value = f"@{hint.__name__}()"
    elif hint is str:
        value = "'\"TEXT\"'"
    else:
        value = "VALUE"
    return f"set it in a file or with --gin.{label}={value} ({type_name(hint)})"
