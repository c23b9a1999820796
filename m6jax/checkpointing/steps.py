"""The step directories of a run: which are complete, which is newest, which are to be removed.

    checkpoints/100/                            complete
                150.1/                          complete: step 150, saved again; 150 is removed
                200/                            empty: the machine died here; passed over
                300.orbax-checkpoint-tmp/       unfinished; removed before the next save

>>> StepDirectories(directory, is_final).latest()    # with one warning that names 200
100

This file knows names, JSON documents and the order of removal; what is in the arrays, and how they
are written, is known to `checkpointing` alone. Paths may be network paths (`gs://`): nothing here
relies on renames or on permissions.
"""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from etils import epath

from m6jax.checkpointing import checksums
from m6jax.foundation.failures import RunError
from m6jax.foundation.validated import ConfigError

logger = logging.getLogger(__name__)

DOCUMENTS = ("data_state", "description", "metrics")

_NEEDED = (
    "state/_METADATA",
    "state/manifest.ocdbt",
    *(f"{document}/metadata" for document in DOCUMENTS),
)
_STEP = re.compile(r"(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
_UNFINISHED = ".orbax-checkpoint-tmp"


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read: the message names the step and the file."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which steps are kept: the newest `keep`, and the `keep_best` best ones.

    Attributes:
      keep: how many of the newest steps.
      keep_best: how many with the lowest `best_metric`, whether they are among the newest or not.
      best_metric: name of a number that is saved with a step.
      highest: whether the highest are the best.
      keep_before: the newest that is not after this step is kept too; None: no such one.
    """

    keep: int = 3
    keep_best: int = 0
    best_metric: str = "loss"
    highest: bool = False
    keep_before: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("keep", self.keep, 1), ("keep_best", self.keep_best, 0)):
            if value < least:
                raise ConfigError(f"Checkpoints.{name}: expected at least {least}, got {value}")

    def kept(self, metrics: dict[int, dict[str, float]]) -> set[int]:
        """Returns the steps to keep, of the complete ones with their metrics.

        Of two steps with equal metrics the newer is better; one without a finite number under
        `best_metric` is never among the best.
        """
        newest, sign = sorted(metrics)[-self.keep :], -1 if self.highest else 1
        scored = [
            (sign * float(found[self.best_metric]), -step)
            for step, found in metrics.items()
            if math.isfinite(found.get(self.best_metric, math.nan))
        ]
        before = [s for s in metrics if self.keep_before is not None and s <= self.keep_before]
        best = (-step for _, step in sorted(scored)[: self.keep_best])
        return {*newest, *best, *sorted(before)[-1:]}


class StepDirectories:
    """The directories of one run that are named after steps."""

    def __init__(self, directory: epath.PathLike, is_final: Callable[[epath.Path], bool]):
        """Opens `directory`, which need not exist.

        Args:
          directory: A local or a network path.
          is_final: Whether the directory of a step was left by a save that ended; where there are
            no renames an unfinished one has the same name.
        """
        path = epath.Path(directory)
        self.directory = path if "://" in str(path) else path.expanduser().resolve()
        self._is_final = is_final
        self._named: set[epath.Path] = set()

    def path(self, step: int) -> epath.Path:
        """Returns the directory of `step`, there or not: the newest one that is complete."""
        paths = self._numbered().get(step, [])
        complete = [path for path in paths if self._problem_at(path) is None]
        return (complete or paths or [self.directory / str(step)])[-1]

    def path_to_write(self, step: int) -> epath.Path:
        """Returns where to save `step`: beside what is complete, which stays until this is."""
        path = self.path(step)
        if self._problem_at(path) is not None:
            return path
        found = _STEP.fullmatch(path.name)
        assert found
        return self.directory / f"{step}.{int(found[2] or 0) + 1}"

    def steps(self) -> list[int]:
        """Returns the complete steps in ascending order."""
        return [step for step in self._numbered() if self._problem(step) is None]

    def latest(self) -> int | None:
        """Returns the newest complete step, None if there is none.

        Newer directories that are not complete are passed over, with one warning that names them
        all the first time that they are met.
        """
        latest, passed_over = None, {}
        for step in reversed(self._numbered()):
            problem = self._problem(step)
            if problem is None:
                latest = step
                break
            passed_over[self.path(step)] = problem
        if not passed_over.keys() <= self._named:
            self._named |= passed_over.keys()
            named = "; ".join(f"{path} ({problem})" for path, problem in passed_over.items())
            logger.warning("passing over what is not a complete checkpoint: %s", named)
        return latest

    def require(self, step: int) -> epath.Path:
        """Returns the directory of a complete step; raises CheckpointError if it is not one."""
        problem = self._problem(step)
        if problem is not None:
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"checkpoint {self.path(step)}: {problem} (complete steps here: {there})"
            )
        return self.path(step)

    def document(self, step: int, name: str) -> dict[str, Any]:
        """Returns one of the JSON documents of `step`; raises CheckpointError naming its file."""
        path = self.require(step)
        file = path / name / "metadata"
        problem = checksums.find_in(path, f"{name}/metadata")
        if problem is not None:
            raise CheckpointError(f"checkpoint {step}: {problem}")
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {step}: {file} is damaged: {error}") from error

    def remove_unfinished(self) -> None:
        """Makes the directory and removes what saves that never ended have left in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if _UNFINISHED in path.name:
                path.rmtree(missing_ok=True)

    def remove_old(self, newest: int, retention: Retention, since: int | None = None) -> None:
        """Removes what is not kept, once `newest` is complete.

        Steps after `newest` belong to a future that the run has left, by going back to an older
        step: they are removed too, or the next start would take one of them for the latest.

        Args:
          newest: step that was just saved.
          retention: what is kept.
          since: step that the run went back to; what lies between it and `newest` is of the future
            that it has left, too.
        """
        left = [
            step
            for step in self._numbered()
            if step > newest or (since is not None and since < step < newest)
        ]
        if left:
            logger.warning("removing checkpoints after step %d, left behind: %s", newest, left)
        complete = [step for step in self.steps() if step not in left]
        kept = retention.kept({step: self._metrics(step) for step in complete})
        stay = {self.path(step) for step in kept}
        paths = [path for own in self._numbered().values() for path in own]
        self._remove(path for path in paths if path not in stay)

    def _metrics(self, step: int) -> dict[str, float]:
        try:
            return self.document(step, "metrics")
        except CheckpointError as error:
            logger.warning("not among the best: %s", error)
            return {}

    def _remove(self, paths: Iterable[epath.Path]) -> None:
        for path in paths:
            # Without this file a directory that is only half removed is never taken for complete.
            (path / _NEEDED[0]).unlink(missing_ok=True)
            path.rmtree(missing_ok=True)

    def _numbered(self) -> dict[int, list[epath.Path]]:
        """Returns the directories by step, ascending, each step's in the order of its saves."""
        if not self.directory.is_dir():
            return {}
        there = [path for path in self.directory.iterdir() if path.is_dir()]
        found = [(match, path) for path in there if (match := _STEP.fullmatch(path.name))]
        steps: dict[int, list[epath.Path]] = {}
        for match, path in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0))):
            steps.setdefault(int(match[1]), []).append(path)
        return steps

    def _problem(self, step: int) -> str | None:
        """Returns what keeps `step` from having a complete checkpoint."""
        return self._problem_at(self.path(step))

    def _problem_at(self, path: epath.Path) -> str | None:
        if not path.is_dir():
            return "not there"
        if not any(path.iterdir()):
            return "empty"
        if not self._is_final(path):
            return "unfinished"
        missing = [name for name in _NEEDED if not (path / name).exists()]
        return f"no {missing[0]}" if missing else None
