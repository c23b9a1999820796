"""What a checkpoint and a tree that asks for something else have in common.

>>> saved = {"params/head": f32[8], "opt_state/mu/head": f32[8]}
>>> wanted, report = select(100, saved, {"params": {"head": bf16[8], "gate": bf16[4]}}, take=every)
>>> print(report)
checkpoint 100: 1 leaves taken
  cast: params/head: float32 to bfloat16
  missing: params/gate
  skipped: opt_state/mu/head
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from m6jax.checkpointing.steps import CheckpointError
from m6jax.foundation import pytrees


@dataclasses.dataclass(frozen=True)
class PartialReport:
    """What became of every leaf that was asked for or is in the checkpoint, by name.

    Attributes:
      step: The step that was read.
      taken: Read from the checkpoint, the converted ones too.
      cast: Read and converted, as `name: float32 to bfloat16`.
      missing: Asked for and not in the checkpoint; still as the caller gave them.
      skipped: In the checkpoint and not taken.
    """

    step: int
    taken: tuple[str, ...]
    cast: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"checkpoint {self.step}: {len(self.taken)} leaves taken"]
        for kind in ("cast", "missing", "skipped"):
            lines += [f"  {kind}: {entry}" for entry in getattr(self, kind)]
        return "\n".join(lines)


def select(
    step: int, saved: dict[str, Any], abstract: Any, take: Callable[[str], bool]
) -> tuple[dict[str, Any], PartialReport]:
    """Returns the leaves of `abstract` to be read, by name, and the report.

    Args:
      step: The step, for messages.
      saved: What is there by name, with shapes and types.
      abstract: A tree of what is asked for, with shapes and types.
      take: Whether to take a leaf, by name.

    Raises:
      CheckpointError: If a leaf to be taken has another shape, or another type and not both are
        floating-point types.
    """
    asked = dict(pytrees.flatten_named(abstract))
    wanted = {name: leaf for name, leaf in asked.items() if name in saved and take(name)}
    cast, wrong = [], []
    for name, leaf in wanted.items():
        old = saved[name]
        if old.shape != leaf.shape or not _converts(old.dtype, leaf.dtype):
            wrong += pytrees.differences({name: old}, {name: leaf})
        elif old.dtype != leaf.dtype:
            cast.append(f"{name}: {old.dtype} to {leaf.dtype}")
    if wrong:
        raise CheckpointError(
            f"checkpoint {step} has leaves that cannot be taken; saved against asked for:\n  "
            + "\n  ".join(wrong)
            + "\nLeave them out with `take`."
        )
    report = PartialReport(
        step=step,
        taken=tuple(wanted),
        cast=tuple(cast),
        missing=tuple(name for name in asked if name not in saved),
        skipped=tuple(name for name in saved if name not in wanted),
    )
    return wanted, report


def _converts(old: Any, new: Any) -> bool:
    return old == new or all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
