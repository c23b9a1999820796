"""The step whose numbers are not finite, made again with checks on.

A resumed run repeats its steps exactly. So nothing is kept of a bad step while a run goes on: here
the newest checkpoint with finite numbers is restored, the steps after it are made again until one
is not finite, and that one is looked at layer by layer. Nothing is written.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from m6jax import processes
from m6jax.checkpointing import Checkpoints
from m6jax.data.pipeline import TrainRows
from m6jax.experiment import Experiment
from m6jax.experiment.identity import Identity
from m6jax.experiment.model_dir import ModelDir
from m6jax.experiment.programs import HostBatch
from m6jax.foundation.failures import NotFiniteError
from m6jax.foundation.validated import ConfigError
from m6jax.modeling import balancing
from m6jax.processes import Group
from m6jax.reporting.progress import Pace
from m6jax.run import same_everywhere
from m6jax.run.between_steps import Probe
from m6jax.run.position import Position, begin, enter_next_stage, newest_step, prepare, restore
from m6jax.training import inspection, losses
from m6jax.training.finite import Skipped, place_name
from m6jax.training.train_step import cut_rows


@dataclasses.dataclass
class Replayed:
    """What a replay has found.

    Attributes:
      step: number of the step that is not finite; None: all were, to the end of the run.
      lines: what to tell.
    """

    step: int | None
    lines: list[str]


def replay(experiment: Experiment) -> Replayed:
    """Makes a run's steps again, from its newest finite checkpoint to the one that is not finite.

    Args:
      experiment: the run.

    Raises:
      ConfigError: the directory holds another run, or the configuration cannot work.
      CheckpointError: a checkpoint is damaged.
    """
    group = processes.current()
    same_everywhere.check_settings(group, experiment)
    directory = ModelDir(experiment.model_dir)
    directory.check_same(experiment)
    with Checkpoints(directory.checkpoints) as checkpoints:
        Identity(experiment.model_dir).require()
        prepared = prepare(experiment, group)
        with _Replay(prepared.experiment, checkpoints, group) as run:
            return run.find()


class _Replay:
    """A run that is made again; `find` does it."""

    def __init__(self, experiment: Experiment, checkpoints: Checkpoints, group: Group):
        self._experiment, self._checkpoints, self._group = experiment, checkpoints, group
        self._rows: TrainRows = experiment.data.train_rows(group.index, group.count)
        self._first_row = self._rows.state()
        self._probe = Probe(experiment, group)
        self._lines: list[str] = []

    def __enter__(self) -> "_Replay":
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def find(self) -> Replayed:
        position = self._begin()
        self._lines.append(f"replay   from step {position.step:,}, which is finite")
        for batch, metrics in self._steps(position):
            if int(metrics["skipped"]) != Skipped.NOTHING:
                self._say_what_was_bad(position, metrics)
                number = position.step
                self._look(self._before(position, metrics), batch)
                return Replayed(number, self._lines)
        self._lines.append(f"replay   all steps up to {position.step:,} are finite")
        return Replayed(None, self._lines)

    def _begin(self) -> Position:
        """Returns the newest position with finite numbers, with its place in the data."""
        newest = newest_step(self._group, self._checkpoints, self._experiment.model_dir)
        there = [] if newest is None else [s for s in self._checkpoints.steps() if s <= newest]
        for step in reversed(there):
            try:
                position = restore(self._experiment, self._checkpoints, step)
            except NotFiniteError as error:
                self._lines.append(f"passed   {error}")
                continue
            self._rows.restore(self._checkpoints.restore_data_state(step) or self._first_row)
            return position
        if self._experiment.initial is not None:
            raise ConfigError(
                f"MODEL_DIR: {self._experiment.model_dir} holds no finite checkpoint to go on from"
                " (train first)"
            )
        self._rows.restore(self._first_row)
        return begin(self._experiment)

    def _steps(self, position: Position) -> Iterator[tuple[HostBatch, Mapping[str, Any]]]:
        """Makes the steps of the run, and yields batch and metrics after each."""
        last, pace = len(self._experiment.stages) - 1, Pace()
        while True:
            step_fn = None
            while not position.watch.over(position.step):
                batch = self._rows.take(position.program.rows)
                step_fn = step_fn or position.program.compile(batch)
                put = position.program.put(batch)
                position.state, metrics = step_fn(position.state, put)
                position.step += 1
                yield batch, metrics
                if self._probe.look(position, metrics["loss"], pace):
                    position.watch.decide(self._group.first(position.watch.decided))
            if position.stage == last:
                return
            enter_next_stage(self._experiment, position, self._rows.state())

    def _before(self, position: Position, metrics: Mapping[str, Any]) -> Position:
        """Returns where the run stood before its newest step, which was bad."""
        bad = position.step
        if int(metrics["skipped"]) == Skipped.EVERYTHING:  # all but the count is as it was
            step = jax.device_put(np.int32(bad - 1), position.state.step.sharding)
            state = position.state.replace(step=step)  # type: ignore[attr-defined]
            return dataclasses.replace(position, step=bad - 1, state=state)
        again = self._begin()
        if again.step < bad - 1:
            for _ in self._steps(again):
                if again.step == bad - 1:
                    break
        if again.watch.over(again.step):
            enter_next_stage(self._experiment, again, self._rows.state())
        return again

    def _say_what_was_bad(self, position: Position, metrics: Mapping[str, Any]) -> None:
        stage = self._experiment.stages[position.stage].name
        skipped = Skipped(int(metrics["skipped"])).name.lower()
        self._lines.append(
            f"bad      step {position.step:,}, stage {stage!r}: loss {float(metrics['loss'])},"
            f" gradient's norm {float(metrics['grad_norm'])}, skipped: {skipped}"
        )
        place = int(metrics["bad_place"])
        if place >= 0:
            found = place_name(position.program.abstract.params, place)
            self._lines.append(f"backward first seen, going back from the loss, {found}")

    def _look(self, position: Position, batch: HostBatch) -> None:
        """Says where the forward pass of a step is not finite."""
        program, parts = position.program, self._experiment.update.microbatches
        model, layout, loss = program.model, program.layout, self._experiment.loss

        @jax.jit
        def look(state: Any, batch: Any, number: jax.Array) -> inspection.Look:
            params = balancing.join(state.params, state.extra.router_bias)
            key = state.step_key()
            part = batch
            if parts > 1:
                key = jax.random.fold_in(key, number)
                part = {name: cut_rows(x, parts)[number] for name, x in batch.items()}
            weight = losses.batch_weight(batch)
            return inspection.look(model, layout, loss, params, part, weight, key)

        with program.activate():
            for number in range(parts):
                seen = program.settled(look(position.state, program.put(batch), np.int32(number)))
                found = inspection.first_bad(jax.tree.map(np.asarray, seen))
                where = f", microbatch {number}" if parts > 1 else ""
                self._lines.append(f"forward{where}  {found or 'all is finite'}")
                if found:
                    return
