"""What is bound but never used, and used but never bound.

References are counted without making anything: from the class of every mode, through the bindings
that its fields have, to the classes and macros in their values, and on. A binding that a later one
replaces still counts, so that `--gin.Experiment.optimizer=@Adafactor()` does not turn the file's
settings of Adam into errors.
"""

import typing
from collections.abc import Iterable
from typing import Any

from m6jax.configuration.bindings import (
    Binding,
    Call,
    Problems,
    Scopes,
    Settings,
    macro_scopes,
    parts,
)
from m6jax.configuration.syntax import REQUIRED, Macro
from m6jax.foundation.validated import field_types, is_validated, nearest


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
