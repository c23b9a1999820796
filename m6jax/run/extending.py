"""A run whose length changes: from which of its checkpoints it goes on.

A checkpoint may be gone on from where all updates before it had the learning rates that they have
now. A longer run of a schedule that is stable before it decays thus leaves its decay out:

    total_steps = 1000     ... 900 | decay                   checkpoints at 500, 900, 1000
    total_steps = 2000     ... 900 -> 1000, stable ... 1800 | decay            goes on from 900

So does a shorter one, from a checkpoint before the decay that now begins earlier.
"""

import ast
import dataclasses
from typing import Any

from m6jax import configuration
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers import schedules

_TOTAL = "Experiment.schedule.total_steps"


def go_on_from(
    experiment: Experiment, checkpoints: Checkpoints, newest: int | None
) -> tuple[int | None, str]:
    """Returns the step that a run goes on from, and what to tell if it is not the newest.

    Args:
      experiment: the run as it is now.
      checkpoints: its own; those after the step are replaced.
      newest: step of its newest checkpoint; None: there is none.

    Raises:
      ConfigError: see `step_to_go_on_from`.
    """
    if newest is None:
        return None, ""
    step = step_to_go_on_from(experiment, checkpoints, newest)
    if step == newest:
        return step, ""
    checkpoints.go_back(step)
    return step, (
        f"length   other learning rates than before from here on: {newest - step:,} of {newest:,}"
        " steps are made again; later checkpoints are replaced"
    )


def step_to_go_on_from(experiment: Experiment, checkpoints: Checkpoints, newest: int) -> int:
    """Returns the newest step before which all learning rates were those of `experiment`.

    Args:
      experiment: the run as it is now, of the same settings but for its length.
      checkpoints: its own.
      newest: step of its newest checkpoint.

    Raises:
      ConfigError: there is no such step.
    """
    now = configuration.to_gin(experiment, macros=MACROS)
    there = [step for step in checkpoints.steps() if step <= newest]
    for step in reversed(there):
        old = _schedule_of(checkpoints.description(step), now, experiment)
        if old == experiment.schedule:
            return step
        if schedules.same_until(old, experiment.schedule, step) == step:
            return step
    first = _schedule_of(checkpoints.description(newest), now, experiment)
    begins = schedules.same_until(first, experiment.schedule, newest)
    schedule: Any = experiment.schedule
    raise ConfigError(
        f"{type(schedule).__name__}.total_steps: with {first.total_steps} the run in"
        f" {experiment.model_dir} had other learning rates from step {begins:,} on than with"
        f" {schedule.total_steps}, and it holds no checkpoint from before (its steps:"
        f" {', '.join(map(str, there))}). Leave it at {first.total_steps} (--gin.STEPS where the"
        " configuration has it), or begin another run in this one's state: Experiment.initial with"
        " Initial.restart = True"
    )


def _schedule_of(description: dict[str, Any], now: str, experiment: Experiment) -> Any:
    """Returns the schedule with which a checkpoint was trained."""
    then = description.get("config")
    found = {} if then is None else configuration.differences(then, now)
    if _TOTAL not in found:
        return experiment.schedule
    total = ast.literal_eval(found[_TOTAL][0])
    return dataclasses.replace(experiment.schedule, total_steps=total)
