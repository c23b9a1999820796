"""The training loop: one call runs all stages of an experiment, from wherever it stood.

    result = run(experiment)            in a notebook or from the command line alike

A run that finds checkpoints in its directory goes on from the newest, in whichever stage it is. A
checkpoint is written at least at the end of every stage, in the layout of that stage; what comes
after it, the delink, is then done again from there.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from m6jax import configuration, processes, trackers
from m6jax.checkpointing import Checkpoints
from m6jax.converting import starting
from m6jax.data import overview
from m6jax.data.config import TextData
from m6jax.experiment import Experiment, stage_switch, summary
from m6jax.experiment.identity import Identity
from m6jax.experiment.lock import Lock
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.experiment.sampling import continue_prompts
from m6jax.foundation.validated import ConfigError
from m6jax.processes import Group
from m6jax.reporting import report
from m6jax.reporting.progress import Pace, Progress
from m6jax.reporting.writers import MetricWriter
from m6jax.run import same_everywhere
from m6jax.run.answers import answer_sets, write_captions
from m6jax.run.between_steps import Probe
from m6jax.run.extending import go_on_from
from m6jax.run.finite_guard import FiniteGuard, check_state
from m6jax.run.held_out import HeldOut, retention
from m6jax.run.position import (
    Position,
    Prepared,
    begin,
    coming_batches,
    enter_next_stage,
    newest_step,
    prepare,
    restore,
)
from m6jax.run.preemption import Preemption

Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      step: updates made.
      finished: False if it was asked to stop; the same call goes on from there.
      evaluation: name of a held-out set to its last metrics; empty if not finished.
      samples: generated texts.
      report: paths of the plots.
    """

    step: int
    finished: bool
    evaluation: dict[str, Metrics]
    samples: list[str]
    report: list[str]


def run(experiment: Experiment, *, quiet: bool = False) -> Result:
    """Trains to the end, or until the process is asked to stop.

    Args:
      experiment: what to do; everything is written under its model_dir.
      quiet: show results alone.

    Raises:
      ConfigError: something cannot work, or another run writes there; nothing was compiled.
      CheckpointError: a checkpoint cannot be read or written.
      NotFiniteError: too many updates in a row were skipped, or a state to be saved is not finite.
    """
    same_everywhere.check_settings(processes.current(), experiment)
    directory = ModelDir(experiment.model_dir)
    directory.check(experiment)
    with directory.lock() as lock, open_trainer(experiment, lock, quiet=quiet) as trainer:
        position = trainer.start()
        if jax.process_index() == 0:
            Identity(experiment.model_dir).claim(trainer.data)
            directory.claim(experiment)
        trainer.train(position)
        return trainer.finish(position)


@contextlib.contextmanager
def open_trainer(experiment: Experiment, lock: Lock, *, quiet: bool = False) -> Iterator["Trainer"]:
    """Opens what a run needs, and closes it; see `run`."""
    directory = ModelDir(experiment.model_dir)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        kept = retention(experiment)
        checkpoints = stack.enter_context(Checkpoints(directory.checkpoints, **kept))
        group = processes.current()
        newest = newest_step(group, checkpoints, experiment.model_dir)
        newest, change = go_on_from(experiment, checkpoints, newest)
        config = configuration.to_gin(experiment, macros=MACROS)
        tracked = trackers.start(experiment.trackers, experiment.model_dir, config) if first else []
        writer = stack.enter_context(
            MetricWriter(directory.path, newest, enabled=first, trackers=tracked)
        )
        progress = stack.enter_context(Progress(experiment.steps, enabled=first, quiet=quiet))
        stack.enter_context(Preemption(group))
        if change:
            progress.say(change)
        prepared = prepare(experiment, group)
        trainer = Trainer(prepared, checkpoints, newest, writer, progress, group, lock)
        stack.callback(trainer.close)
        yield trainer


class Trainer:
    """The loop: its steps, and the parts that they work with."""

    def __init__(
        self,
        prepared: Prepared,
        checkpoints: Checkpoints,
        newest: int | None,
        writer: MetricWriter,
        progress: Progress,
        group: Group,
        lock: Lock,
    ):
        self._prepared = prepared
        self._experiment = prepared.experiment
        self._checkpoints = checkpoints
        self._newest = newest
        self._writer = writer
        self._progress = progress
        self._group = group
        self._lock = lock
        self._stopped: str | None = None  # why
        self._processes = group.index, group.count
        self._guard = FiniteGuard(self._experiment)
        self._probe = Probe(self._experiment, group)
        self._held_out = HeldOut(self._experiment, group, self._write, progress.say)
        self._rows = self._experiment.data.train_rows(*self._processes)
        same_everywhere.check_data(group, self.data, self._rows.fingerprint)

    @property
    def data(self) -> TextData:
        """The data of the experiment, with the run's own vocabulary."""
        return self._experiment.data

    def close(self) -> None:
        """Ends the reading of data."""
        self._rows.close()

    def start(self) -> Position:
        """Returns where the run begins, or where its newest checkpoint lets it go on."""
        experiment, newest = self._experiment, self._newest
        self._say_what_comes(newest)
        if newest is None:
            return self._begin()
        position = restore(experiment, self._checkpoints, newest)
        self._go_to(self._checkpoints.restore_data_state(newest))
        name = experiment.stages[position.stage].name
        self._progress.say(f"resume   step {position.step:,}, stage {name}")
        if position.step >= experiment.steps:
            self._progress.say(
                f"         nothing left to train: Experiment.steps = {experiment.steps:,}"
            )
        return position

    def _say_what_comes(self, newest: int | None) -> None:
        """Shows what will be trained, from where the run stands."""
        prepared, experiment = self._prepared, self._experiment
        begins = 0, 0
        if newest is not None:
            description = self._checkpoints.description(newest)
            # A run that stands behind its end has no steps to show.
            behind = newest > experiment.steps
            begins = description["stage"], newest if behind else description["stage_start"]
        elif experiment.initial is not None:
            begins = starting.begins_at(experiment)
        size = prepared.vocabulary.size
        self._progress.say(summary.describe_run(experiment, prepared.mesh, size, *begins))
        for line in overview.describe(experiment.data, self._rows, experiment.all_rows()):
            self._progress.say(f"data     {line}")

    def train(self, position: Position) -> None:
        """Goes through the stages until the run is over or asked to stop."""
        last = len(self._experiment.stages) - 1
        self._train_stage(position)
        while position.stage < last and not self._stops(position):
            self._next_stage(position)
            self._train_stage(position)

    def finish(self, position: Position) -> Result:
        """Evaluates, generates, draws the report, and says how the run ended."""
        say = self._progress.say
        if position.step < self._experiment.steps:
            say(
                f"stopped  by {self._stopped} after step {position.step:,}; saved."
                " The same command goes on from there.",
                result=True,
            )
            return Result(position.step, False, {}, [], [])
        evaluation = self._held_out.measure(position)
        self._held_out.compare_with_gzip(evaluation)
        directory = ModelDir(self._experiment.model_dir)
        self._answer(position, directory)
        self._writer.flush()
        paths = report.write_report(directory.path) if self._processes[0] == 0 else []
        try:
            samples = self._generate(position)
        except ConfigError as error:  # the run is done; a sample is for reading only
            say(f"sample   none: {error}", result=True)
            samples = []
        say(f"report   {directory.report}", result=True)
        return Result(position.step, True, evaluation, samples, [str(path) for path in paths])

    def _begin(self) -> Position:
        """Returns where the run begins: anew, or in the state of another run's checkpoint."""
        experiment = self._experiment
        if experiment.initial is None:
            return begin(experiment)
        start = starting.begin(experiment, self._go_to)
        state, stage, step = start.state, experiment.stages[start.stage], start.step
        if start.to_measure:
            coming = coming_batches(
                experiment, self._rows.state(), start.program.rows, stage.measured_batches
            )
            state = stage_switch.measure(experiment, start.program, state, start.layout, coming)
        self._progress.say(f"begin    step {step:,}, stage {stage.name}, from {start}")
        watch = experiment.end_of(start.stage).watch(step, {})
        position = Position(start.stage, step, step, start.program, state, watch, saved=step)
        self._save(position)  # so that the other run is not read again
        return position

    def _train_stage(self, position: Position) -> None:
        """Makes updates until the stage is over or the process is asked to stop."""
        if position.stage in self._prepared.tables:
            self._progress.say(self._prepared.tables[position.stage])
        pace, step_fn = Pace(), None
        while not position.watch.over(position.step) and not self._stops(position):
            with pace.waiting():
                batch = self._rows.take(position.program.rows)
            if step_fn is None:
                self._group.patient()
                step_fn = position.program.compile(batch)
                pace.restart()
            else:
                self._group.joins()
            position.state, metrics = step_fn(position.state, position.program.put(batch))
            position.step += 1
            pace.add(metrics["real_tokens"], position.program.rows * self.data.length)
            params = position.program.abstract.params
            self._guard.see(position.step, position.stage, params, metrics)
            self._look(position, metrics, pace)
            over = position.watch.over(position.step)
            self._log_if_due(position, metrics, pace, over)
            if not over:
                self._evaluate_and_save_if_due(position, pace)
        if position.saved != position.step:
            if self._experiment.keep_best and self._stopped is None:
                self._held_out.measure(position)
            self._save(position)

    def _stops(self, position: Position) -> bool:
        """Whether all processes stop here; each asks before each step."""
        self._lock.require()
        self._stopped = self._group.reached(position.step)
        return self._stopped is not None

    def _look(self, position: Position, metrics: Metrics, pace: Pace) -> None:
        found = self._probe.look(position, metrics["loss"], pace)
        if found:
            position.watch.decide(self._group.first(position.watch.decided))
            self._write(position, "probe", found)

    def _log_if_due(self, position: Position, metrics: Metrics, pace: Pace, over: bool) -> None:
        if position.step % self._experiment.log_every and not over:
            return
        metrics = jax.tree.map(np.asarray, metrics)
        metrics = {"fraction_dropped": 0.0, "load_balance_loss": 0.0} | metrics | pace.read()
        self._write(position, "train", metrics)
        self._progress.update(
            position.step,
            stage=self._experiment.stages[position.stage].name,
            loss=float(metrics["loss"]),
            tokens_per_second=metrics["tokens_per_second"],
        )
        if metrics["skipped"]:
            self._progress.say(
                f"step {position.step}: an update was skipped, the loss is {metrics['loss']}"
            )

    def _evaluate_and_save_if_due(self, position: Position, pace: Pace) -> None:
        """Does within a stage what is done at its end in any case."""
        experiment, step = self._experiment, position.step
        saves = step % experiment.save_every == 0
        if step % experiment.eval_every == 0 or (saves and experiment.keep_best):
            self._held_out.measure(position)
            pace.restart()
        if saves:
            self._save(position)
            pace.restart()

    def _next_stage(self, position: Position) -> None:
        """Takes the state to the next stage's layout, and shows that the loss stays."""
        experiment = self._experiment
        self._group.patient()
        self._held_out.measure(position)
        before = self._probe.loss(position)
        enter_next_stage(experiment, position, self._rows.state())
        self._check_state(position)
        after = self._probe.loss(position)
        change = " -> ".join(
            summary.describe_units(experiment.stages[i], experiment.model)
            for i in (position.stage - 1, position.stage)
        )
        self._progress.say(
            f"delink   step {position.step:,}, stage {experiment.stages[position.stage].name}:"
            f" {change} distinct layers; loss before {before:.5f}, loss after {after:.5f}"
        )
        self._write(position, "delink", {"loss_before": before, "loss_after": after})

    def _answer(self, position: Position, directory: ModelDir) -> None:
        """Asks about pictures, and shows what is right of it."""
        asked = (position.program, position.state.served(), self._prepared.vocabulary)
        sets = []
        for found in answer_sets(self.data, *asked):
            sets.append(found)
            self._write(position, found.name, found.metrics())
            self._progress.say(str(found), result=True)
        if self._processes[0] == 0:
            write_captions(directory.report, sets, self.data.pictures)

    def _generate(self, position: Position) -> list[str]:
        """Returns the prompts of the experiment continued, after showing them."""
        experiment, vocabulary = self._experiment, self._prepared.vocabulary
        params = position.state.served()
        texts = continue_prompts(
            position.program, params, experiment.sample, vocabulary, experiment.seed
        )
        for text in texts:
            self._progress.say(f"sample   {text}", result=True)
        return texts

    def _save(self, position: Position) -> None:
        self._guard.settle()
        self._lock.require()
        self._group.patient()
        self._check_state(position)
        stage = self._experiment.stages[position.stage]
        self._checkpoints.save(
            position.step,
            position.state,
            self._rows.state(),
            {
                "stage": position.stage,
                "stage_name": stage.name,
                "stage_start": position.start,
                "trigger": position.watch.seen(),
                "layout": position.program.layout.to_json(),
                "config": self._prepared.config_text,
            },
            self._held_out.numbers(position),
        )
        position.saved = position.step

    def _check_state(self, position: Position) -> None:
        stage = self._experiment.stages[position.stage].name
        check_state(position.state, f"step {position.step:,}, stage {stage!r}")

    def _go_to(self, data_state: dict[str, Any]) -> None:
        """Goes to a place in the data; an empty one is before all of it."""
        if data_state:
            self._rows.restore(data_state)

    def _write(self, position: Position, split: str, metrics: Metrics) -> None:
        stage = self._experiment.stages[position.stage].name
        self._writer.write({"step": position.step, "stage": stage, "split": split} | metrics)
