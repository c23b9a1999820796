"""What became of every leaf, for a person to read."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from m6jax.checkpointing import SavedLeaf
from m6jax.converting.recipes import Recipe
from m6jax.layouts import LeafName
from m6jax.pseudo_to_real.delinking import Policy


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of leaves that differ in the number of their layer alone.

    Attributes:
      before: name in the source; `layers_*` where there is one for each layer.
      shapes_before: type and shape, with the number of leaves if there are several.
      after: name in the target.
      shapes_after: as `shapes_before`.
      done: what happened to the values.
    """

    before: str
    shapes_before: str
    after: str
    shapes_after: str
    done: str

    def __str__(self) -> str:
        after = "" if self.after == self.before else f"{self.after}: "
        return f"{self.before}: {self.shapes_before} -> {after}{self.shapes_after}, {self.done}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Every leaf of a conversion.

    Attributes:
      changes: in the order of the target's names.
      step: of the source.
      nbytes: of the arrays written.
    """

    changes: tuple[Change, ...]
    step: int
    nbytes: int

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes))


def summarize(
    made: Mapping[str, Recipe],
    saved: Mapping[str, SavedLeaf],
    step: int,
    policy: Policy | None,
    average: bool,
) -> Report:
    """Returns the report of a conversion.

    Args:
      made: recipes by name.
      saved: the leaves of the source.
      step: of the source.
      policy: for the optimizer's state.
      average: whether layers that differ were averaged.
    """
    groups: dict[str, list[Recipe]] = {}
    for recipe in made.values():
        groups.setdefault(LeafName.of(recipe.name).of_any_layer, []).append(recipe)
    changes = []
    nbytes = 0
    for after, group in groups.items():
        sources = list(dict.fromkeys(name for recipe in group for name in recipe.sources()))
        first = saved[sources[0]]
        nbytes += sum(int(np.prod(r.shape)) * r.dtype.itemsize for r in group)
        changes.append(
            Change(
                before=LeafName.of(sources[0]).of_any_layer,
                shapes_before=_shapes(len(sources), first.dtype, first.shape),
                after=after,
                shapes_after=_shapes(len(group), group[0].dtype, group[0].shape),
                done=_done(group, policy, average),
            )
        )
    return Report(tuple(changes), step, nbytes)


def _shapes(number: int, dtype: np.dtype, shape: tuple[int, ...]) -> str:
    one = f"{dtype}[{','.join(map(str, shape))}]"
    return one if number == 1 else f"{number} x {one}"


def _done(group: list[Recipe], policy: Policy | None, average: bool) -> str:
    recipe = group[0]
    before = {origin for r in group for copy in r.copies for origin in copy}
    after = sum(len(r.copies[0]) for r in group)
    number = len(recipe.copies)
    if recipe.factor == 0:
        done = "begins anew"
    elif number > 1:
        done = f"mean of {number}" if average else f"{number} equal layers are one"
    elif after > len(before):
        done = f"{after // len(before)} copies"
    else:
        return "as it was"
    if recipe.factor not in (0, 1):
        done = f"{done}, times {float(recipe.factor):g}"
    if policy is None or not recipe.name.startswith("opt_state/"):
        return done
    return f"{done} ({policy.name})"
