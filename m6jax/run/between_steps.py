"""What is looked at between steps: the loss of one batch, and the agreement of gradients."""

import time

import jax

from m6jax.experiment import Experiment
from m6jax.experiment.gradient_comparison import GradientComparison
from m6jax.experiment.programs import HostBatch, StageProgram
from m6jax.processes import Group
from m6jax.reporting.progress import Pace
from m6jax.run.position import Position


class Probe:
    """Looks at states with a batch that is the same at every step."""

    def __init__(self, experiment: Experiment, group: Group):
        """Takes nothing from the data yet.

        Args:
          experiment: the run.
          group: the processes.
        """
        self._experiment, self._group = experiment, group
        self._processes = group.index, group.count
        self._batches: dict[int, HostBatch] = {}  # by their number of rows
        self._comparisons: dict[int, GradientComparison] = {}  # by stage

    def loss(self, position: Position) -> float:
        """Returns the loss of a batch that is the same before and after a delink."""
        program = position.program
        sums = program.evaluate(position.state.served(), self._batch(program))
        return float(sums.tokens.cross_entropy / sums.tokens.targets)

    def look(self, position: Position, loss: jax.Array, pace: Pace) -> dict[str, float]:
        """Shows the stage's trigger what there is to see after a step, and returns it.

        Args:
          position: after the step.
          loss: of the step, float32[]; it is not waited for unless gradients are compared.
          pace: leaves out the time of a comparison.
        """
        watch, step = position.watch, position.step
        found = dict(watch.see_loss(step, loss))
        wanted = watch.wants_agreement(step)
        if wanted or self._is_logged(position):
            self._group.patient()
            jax.block_until_ready(loss)
            began = time.perf_counter()
            comparison = self._comparison(position)
            batch = self._batch(position.program)
            agreement = jax.device_get(comparison(position.state, batch))
            found |= agreement.metrics()
            if wanted:
                found |= watch.see_agreement(step, agreement.by_layer)
            pace.leave_out(time.perf_counter() - began)
        return found

    def _is_logged(self, position: Position) -> bool:
        every = self._experiment.agreement_every
        return (
            every is not None
            and position.step % every == 0
            and self._experiment.compares_gradients(position.stage)
        )

    def _comparison(self, position: Position) -> GradientComparison:
        if position.stage not in self._comparisons:
            comparison = GradientComparison(position.program, self._experiment.loss)
            self._comparisons[position.stage] = comparison
        return self._comparisons[position.stage]

    def _batch(self, program: StageProgram) -> HostBatch:
        """Returns a batch that is held out, if anything is."""
        data = self._experiment.data
        names = data.eval_names()
        rows = program.eval_rows if names else program.rows
        if rows not in self._batches:
            if names:
                batch = next(iter(data.eval_batches(names[0], rows, *self._processes)))
            else:
                stream = data.train_rows(*self._processes)
                batch = stream.take(rows)
                stream.close()
            self._batches[rows] = batch
        return self._batches[rows]
