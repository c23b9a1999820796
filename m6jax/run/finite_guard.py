"""Stops a run whose numbers are not finite; what a step does with them is in `training.finite`."""

import dataclasses
from typing import Any

import jax

from m6jax.experiment import Experiment
from m6jax.foundation.failures import NotFiniteError
from m6jax.training.finite import Skipped, first_bad_leaf, place_name
from m6jax.training.train_state import TrainState

_AS_IT_WAS = "The newest checkpoint is as it was"


def check_state(state: TrainState, where: str) -> None:
    """Makes sure that a state may be saved; all processes must call it.

    Args:
      state: of the run.
      where: it stands, for the message.

    Raises:
      NotFiniteError: it holds a number that is not finite; names the leaf.
    """
    bad = first_bad_leaf(state)
    if bad is not None:
        raise NotFiniteError(f"{where}: {bad} is not finite, so nothing was saved. {_AS_IT_WAS}")


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is known of a step, not yet waited for."""

    number: int
    stage: int
    params: Any  # ShapeDtypeStructs
    metrics: dict[str, jax.Array]


class FiniteGuard:
    """Counts skipped updates, one step late, so that the host never waits for the devices."""

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._pending: _Step | None = None
        self._in_a_row = 0

    def see(self, number: int, stage: int, params: Any, metrics: dict[str, Any]) -> None:
        """Takes a step that is under way, and looks at the one before.

        Args:
          number: of the step.
          stage: number of the stage.
          params: ShapeDtypeStructs of the stage's parameters.
          metrics: of the step.

        Raises:
          NotFiniteError: more updates in a row were skipped than `Experiment.most_skipped`.
        """
        self.settle()
        names = {"skipped", "bad_place", "loss"} & metrics.keys()
        kept = {str(name): metrics[name] for name in names}
        self._pending = _Step(number, stage, params, kept)

    def settle(self) -> None:
        """Looks at the newest step too; raises as `see`."""
        step, self._pending = self._pending, None
        if step is None:
            return
        if int(step.metrics["skipped"]) == Skipped.NOTHING:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row > self._experiment.most_skipped:
            raise NotFiniteError(self._message(step))

    def _message(self, step: _Step) -> str:
        stage = self._experiment.stages[step.stage].name
        where = "nothing more is known of where"
        place = int(step.metrics.get("bad_place", -1))
        if place >= 0:
            found = place_name(step.params, place)
            where = f"first seen, going back from the loss, {found}"
        return (
            f"step {step.number:,}, stage {stage!r}: loss, gradient or update is not finite (loss"
            f" {float(step.metrics['loss'])}), {where}; {self._in_a_row} updates in a row were"
            f" skipped and Experiment.most_skipped allows {self._experiment.most_skipped}."
            f" {_AS_IT_WAS} (--mode=replay looks at the step; try a smaller learning rate, or"
            " clipping)"
        )
