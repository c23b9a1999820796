"""What a layout is: how many distinct layers a stack has, and how they lie in a tree."""

import dataclasses
import enum
import itertools
import re
from collections.abc import Iterable
from typing import Any

from m6jax.foundation.validated import ConfigError, validated
from m6jax.layouts.leaf_name import STACK, LeafName, Run, layer_names


class Form(enum.Enum):
    """Whether layers share one stacked leaf or have leaves of their own."""

    STACKED = "stacked"
    UNROLLED = "unrolled"


class LayoutError(ValueError):
    """A tree that does not have the layout it was said to have."""


@validated
class Part:
    """Leaves of every layer that have a unit of their own.

    Attributes:
      pattern: for re.search in a leaf's path inside of its layer, as 'norm' or 'moe/(up|down)'.
      unit: U of these leaves; None: every layer has its own.
    """

    pattern: str
    unit: int | None = None

    def check(self) -> None:
        """Raises ConfigError for what is no pattern, or no number of layers."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"Part.pattern: {self.pattern!r} is no pattern: {error}") from error
        if self.unit is not None and self.unit < 1:
            raise ConfigError(f"Part.unit: {self.unit} distinct layers; at least 1 is needed")


@validated
class Layout:
    """Depth, units and form of a stack.

    Attributes:
      depth: L, the number of layers that a token passes.
      unit: U, the number of distinct layers; divides depth.
      form: STACKED for every unit, UNROLLED for U = L alone.
      parts: leaves with other units than `unit`; of several that fit a leaf the first counts.
      borders: numbers of the layers with which runs begin that rest apart from those before; for
        STACKED where all layers are distinct. See `offload`.
    """

    depth: int
    unit: int
    form: Form = Form.STACKED
    parts: tuple[Part, ...] = ()
    borders: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for units or a form that cannot be."""
        if self.depth < 1:
            raise ConfigError(f"Layout.depth: {self.depth} layers; at least 1 is needed")
        if self.unit < 1 or self.depth % self.unit:
            divisors = [u for u in range(1, self.depth + 1) if self.depth % u == 0]
            raise ConfigError(
                f"Layout.unit: {self.unit} does not divide the depth of {self.depth} layers"
                f" (choices: {', '.join(map(str, divisors))})"
            )
        units = self.units
        for small, large in itertools.pairwise([*units, self.depth]):
            if large % small:
                raise ConfigError(
                    f"Part.unit: {small} does not divide {large}; the units of a stack's parts"
                    f" ({', '.join(map(str, units))}) must divide one another, and the depth of"
                    f" {self.depth} layers"
                )
        if self.form is Form.UNROLLED and not self.all_distinct:
            raise ConfigError(
                f"Layout.form: UNROLLED needs a unit of all {self.depth} layers, not {units[0]}"
                " (use STACKED, or unit = depth)"
            )
        starts = (0, *self.borders, self.depth)
        if self.borders and (
            self.form is Form.UNROLLED
            or not self.all_distinct
            or any(start >= end for start, end in itertools.pairwise(starts))
        ):
            raise ConfigError(
                f"Layout.borders: {self.borders} do not cut a stack of {self.depth} distinct layers"
                f" in runs ({units[0]} distinct, {self.form.name})"
            )

    @property
    def units(self) -> list[int]:
        """The units among the leaves, smallest first; each divides the next."""
        return sorted({self.unit, *(part.unit or self.depth for part in self.parts)})

    @property
    def all_distinct(self) -> bool:
        """Whether no parameters are shared by layers."""
        return self.units == [self.depth]

    @property
    def runs(self) -> tuple[Run, ...]:
        """Runs of a stack; one of all layers where there are no borders."""
        starts = itertools.pairwise((0, *self.borders, self.depth))
        return tuple(Run(start, end - start) for start, end in starts)

    @property
    def whole(self) -> "Layout":
        """The same layout without borders."""
        return dataclasses.replace(self, borders=())

    @property
    def repeats(self) -> int:
        """R, how often the unit is applied."""
        return self.depth // self.unit

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` makes the same layout of."""
        parts = [{"pattern": part.pattern, "unit": part.unit} for part in self.parts]
        return {
            "depth": self.depth,
            "unit": self.unit,
            "form": self.form.name,
            "parts": parts,
            "borders": list(self.borders),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Layout":
        """Returns a layout from `to_json`, or from before there were parts."""
        parts = tuple(Part(**part) for part in document.get("parts", ()))
        return cls(**(document | {"parts": parts}))

    def unit_of(self, name: str) -> int:
        """Returns U of a leaf of the stack.

        Args:
          name: its path, from anywhere above the layers: 'opt_state/mu/layers/moe/up'.
        """
        inside = LeafName.of(name).inside
        for part in self.parts:
            if re.search(part.pattern, inside):
                return part.unit or self.depth
        return self.unit

    def repeats_of(self, name: str) -> int:
        """Returns R of a leaf, how often it is used; 1 for leaves outside of the stack."""
        return self.depth // self.unit_of(name) if LeafName.of(name).in_stack else 1

    def layers_of(self, name: str) -> range:
        """Returns the numbers of the layers whose parameters a leaf holds; none outside of it."""
        leaf = LeafName.of(name)
        return leaf.layers([leaf.run.length if leaf.run else self.unit_of(name)])

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a part that none of the parameters belongs to.

        Args:
          names: of the parameters of a layer.
        """
        inside = sorted(LeafName.of(name).inside for name in names)
        for part in self.parts:
            if not any(re.search(part.pattern, name) for name in inside):
                raise ConfigError(
                    f"Part.pattern: {part.pattern!r} is found in no name of a layer's parameter"
                    f" ({', '.join(inside)})"
                )


def split_stack(params: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], Any]:
    """Separates the stack from the other parameters.

    Returns:
      The other top-level entries, and the stack: for STACKED the tree with leading axes U (or a
      dictionary of such trees, one for each run), for UNROLLED the list of L per-layer trees.
    """
    rest = {key: value for key, value in params.items() if not LeafName.of(key).in_stack}
    if layout.form is Form.STACKED:
        return rest, params[STACK]
    return rest, [params[name] for name in layer_names(layout.depth)]


def join_stack(rest: dict[str, Any], stacked: Any, layout: Layout) -> dict[str, Any]:
    """The inverse of `split_stack`."""
    if layout.form is Form.STACKED:
        return rest | {STACK: stacked}
    return rest | dict(zip(layer_names(layout.depth), stacked, strict=True))
