"""The training loop: one call runs all stages of an experiment, from wherever it stood.

    result = run(experiment)            in a notebook or from the command line alike

A run that finds checkpoints in its directory goes on from the newest, in whichever stage it is. A
checkpoint is written at least at the end of every stage, in the layout of that stage; what comes
after it, the delink, is then done again from there.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from m6jax import configuration
from m6jax.checkpointing import Checkpoints
from m6jax.converting import starting
from m6jax.experiment import Experiment, summary
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.experiment.programs import HostBatch, StageProgram
from m6jax.foundation.validated import ConfigError
from m6jax.planning import budget
from m6jax.pseudo_to_real.triggers import Watch
from m6jax.reporting import report
from m6jax.reporting.progress import Pace, Progress
from m6jax.reporting.writers import MetricWriter
from m6jax.run.evaluation import evaluate, gzip_bits_per_byte
from m6jax.run.preemption import Preemption
from m6jax.training.train_state import TrainState

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


def run(experiment: Experiment) -> Result:
    """Trains to the end, or until the process is asked to stop.

    Args:
      experiment: what to do; everything is written under its model_dir.

    Raises:
      ConfigError: something cannot work; nothing was compiled.
      CheckpointError: a checkpoint cannot be read or written.
    """
    ModelDir(experiment.model_dir).check(experiment)
    with open_trainer(experiment) as trainer:
        trainer.train()
        return trainer.finish()


@contextlib.contextmanager
def open_trainer(experiment: Experiment, writes: bool = True) -> Iterator["Trainer"]:
    """Opens what a run needs, and closes it.

    Args:
      experiment: the run.
      writes: whether metrics go to the directory.
    """
    directory = ModelDir(experiment.model_dir)
    first = jax.process_index() == 0
    with Checkpoints(directory.checkpoints, keep=experiment.keep) as checkpoints:
        latest = checkpoints.latest()
        with (
            MetricWriter(directory.path, latest, enabled=first and writes) as writer,
            Progress(experiment.steps, enabled=first) as progress,
            Preemption() as preemption,
        ):
            yield Trainer(experiment, checkpoints, latest, writer, progress, preemption)


@dataclasses.dataclass
class Position:
    """Where a run stands: the stage, the updates made before it and so far, and the state.

    `watch` says when the stage is over.
    """

    stage: int
    start: int
    step: int
    program: StageProgram
    state: TrainState
    watch: Watch


class Trainer:
    """The parts that the loop works with."""

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        latest: int | None,
        writer: MetricWriter,
        progress: Progress,
        preemption: Preemption,
    ):
        self._experiment = experiment
        self._checkpoints = checkpoints
        self._latest = latest
        self._writer = writer
        self._progress = progress
        self._preemption = preemption
        self._probes: dict[int, HostBatch] = {}  # by their number of rows
        self._processes = jax.process_index(), jax.process_count()
        self._config_text = configuration.describe(experiment, macros=MACROS)
        self._vocabulary = experiment.data.vocab()
        if self._vocabulary.size > experiment.model.vocab_size:
            raise ConfigError(
                f"ModelConfig.vocab_size: {experiment.model.vocab_size} is less than the"
                f" {self._vocabulary.size} tokens of the vocabulary"
            )
        self._planned, self._tables = budget.resolve(experiment, jax.device_count())
        # Every stage's mesh and shapes are checked before anything compiles.
        programs = [StageProgram(self._planned, i, 0) for i in range(len(experiment.stages))]
        self._mesh = programs[0].mesh

    def train(self) -> None:
        """Goes through the stages, from the newest checkpoint or from the beginning."""
        experiment = self._experiment
        self._progress.say(summary.describe_run(experiment, self._mesh, self._vocabulary.size))
        self._rows = experiment.data.train_rows(*self._processes)
        if self._latest is None:
            position = self._begin()
        else:
            position = self.restore_newest()
            self._go_to(self._checkpoints.restore_data_state(position.step))
            name = experiment.stages[position.stage].name
            self._progress.say(f"resume   step {position.step:,}, stage {name}")
        if self._processes[0] == 0:
            ModelDir(experiment.model_dir).claim(experiment)
        while True:
            self._train_stage(position)
            last = position.stage == len(experiment.stages) - 1
            if last or self._preemption.requested:
                break
            self._next_stage(position)
        self._rows.close()
        self._position = position

    def _begin(self) -> Position:
        """Returns where the run begins: anew, or in the state of another run's checkpoint."""
        experiment = self._planned
        if experiment.initial is None:
            program = StageProgram(experiment, 0, start_step=0)
            watch = experiment.end_of(0).watch(0, {})
            return Position(0, 0, 0, program, program.initialize(), watch)
        start = starting.begin(experiment, self._go_to)
        state, stage = start.state, experiment.stages[start.stage]
        if start.to_measure:
            coming = self._coming_batches(start.program.rows, stage.measured_batches)
            state = start.program.measured(state, start.layout, coming)
        self._progress.say(f"begin    step {start.step:,}, stage {stage.name}, from {start}")
        watch = experiment.end_of(start.stage).watch(start.step, {})
        position = Position(start.stage, start.step, start.step, start.program, state, watch)
        self._save(position)  # so that the other run is not read again
        return position

    def _go_to(self, data_state: dict[str, Any]) -> None:
        """Goes to a place in the data; an empty one is before all of it."""
        if data_state:
            self._rows.restore(data_state)

    def finish(self) -> Result:
        """Evaluates, generates, draws the report, and says how the run ended."""
        position, say = self._position, self._progress.say
        if position.step < self._experiment.steps:
            say(
                f"stopped  by {self._preemption.requested} after step {position.step:,}; saved."
                " The same command goes on from there."
            )
            return Result(position.step, False, {}, [], [])
        evaluation = self.evaluate(position)
        self._compare_with_gzip(evaluation)
        samples = self.generate(position)
        directory = ModelDir(self._experiment.model_dir)
        self._writer.flush()
        paths = report.write_report(directory.path) if self._processes[0] == 0 else []
        say(f"report   {directory.report}")
        return Result(position.step, True, evaluation, samples, [str(path) for path in paths])

    def restore_newest(self) -> Position:
        """Returns the state of the newest checkpoint.

        Raises:
          ConfigError: there is none.
          CheckpointError: it is damaged or of another model.
        """
        if self._latest is None:
            raise ConfigError(
                f"MODEL_DIR: {self._experiment.model_dir} holds no checkpoint (train first)"
            )
        description = self._checkpoints.description(self._latest)
        stage, start = description["stage"], description["stage_start"]
        program = StageProgram(self._planned, stage, start)
        state = self._checkpoints.restore(self._latest, program.abstract)
        # Older checkpoints are of stages that end at a step, for which nothing is kept.
        watch = self._experiment.end_of(stage).watch(start, description.get("trigger", {}))
        return Position(stage, start, self._latest, program, state, watch)

    def _train_stage(self, position: Position) -> None:
        """Makes updates until the stage is over or the process is asked to stop."""
        experiment = self._experiment
        if position.stage in self._tables:
            self._progress.say(self._tables[position.stage])
        step_fn = None
        pace = Pace()
        saved = position.step
        while not position.watch.over(position.step) and not self._preemption.requested:
            batch = self._rows.take(position.program.rows)
            if step_fn is None:
                step_fn = position.program.compile(batch)
                pace.restart()
            position.state, metrics = step_fn(position.state, position.program.put(batch))
            position.step += 1
            pace.add(batch)
            self._look(position, metrics["loss"], pace)
            over = position.watch.over(position.step)
            if position.step % experiment.log_every == 0 or over:
                self._log(position, jax.tree.map(np.asarray, metrics), pace)
            if position.step % experiment.eval_every == 0 and not over:
                self.evaluate(position)
                pace.restart()
            if position.step % experiment.save_every == 0 and not over:
                self._save(position)
                saved = position.step
                pace.restart()
        if saved != position.step:
            self._save(position)

    def _next_stage(self, position: Position) -> None:
        """Takes the state to the next stage's layout, and shows that the loss stays."""
        experiment = self._experiment
        self.evaluate(position)
        before = self._probe(position)
        old = position.program.layout
        stage = position.stage + 1
        settings = experiment.stages[stage]
        program = StageProgram(self._planned, stage, position.step)
        coming = self._coming_batches(program.rows, settings.measured_batches)
        position.state = program.delink(position.state, old, settings.optimizer_state, coming)
        position.stage, position.start, position.program = stage, position.step, program
        position.watch = experiment.end_of(stage).watch(position.step, {})
        after = self._probe(position)
        change = " -> ".join(
            summary.describe_units(experiment.stages[i], experiment.model)
            for i in (stage - 1, stage)
        )
        self._progress.say(
            f"delink   step {position.step:,}, stage {settings.name}: {change} distinct layers;"
            f" loss before {before:.5f}, loss after {after:.5f}"
        )
        self._write(position, "delink", {"loss_before": before, "loss_after": after})

    def _look(self, position: Position, loss: jax.Array, pace: Pace) -> None:
        """Shows the stage's trigger, and the metrics, what there is to see after a step."""
        experiment, watch, step = self._experiment, position.watch, position.step
        found = dict(watch.see_loss(step, loss))
        every = experiment.agreement_every
        wanted = watch.wants_agreement(step)
        if wanted or (
            every and step % every == 0 and experiment.compares_gradients(position.stage)
        ):
            jax.block_until_ready(loss)
            began = time.perf_counter()
            batch = self._probe_batch(position)
            agreement = jax.device_get(position.program.agreement(position.state, batch))
            found |= agreement.metrics()
            if wanted:
                found |= watch.see_agreement(step, agreement.by_layer)
            pace.leave_out(time.perf_counter() - began)
        if found:
            self._write(position, "probe", found)

    def _probe(self, position: Position) -> float:
        """Returns the loss of a batch that is the same before and after a delink."""
        sums = position.program.evaluate(position.state.served(), self._probe_batch(position))
        return float(sums.tokens.cross_entropy / sums.tokens.targets)

    def _probe_batch(self, position: Position) -> HostBatch:
        """Returns a batch that is the same at every step: held out, if anything is."""
        data = self._experiment.data
        names = data.eval_names()
        rows = position.program.eval_rows if names else position.program.rows
        if rows not in self._probes:
            if names:
                batch = next(iter(data.eval_batches(names[0], rows, *self._processes)))
            else:
                stream = data.train_rows(*self._processes)
                batch = stream.take(rows)
                stream.close()
            self._probes[rows] = batch
        return self._probes[rows]

    def _coming_batches(self, num_rows: int, number: int) -> Iterator[HostBatch]:
        """Yields the batches that training takes next, and leaves them there."""
        stream = self._experiment.data.train_rows(*self._processes)
        stream.restore(self._rows.state())
        for _ in range(number):
            yield stream.take(num_rows)
        stream.close()

    def _log(self, position: Position, metrics: Metrics, pace: Pace) -> None:
        metrics = {"fraction_dropped": 0.0, "load_balance_loss": 0.0} | metrics | pace.read()
        self._write(position, "train", metrics)
        self._progress.update(
            position.step,
            stage=self._experiment.stages[position.stage].name,
            loss=float(metrics["loss"]),
            tokens_per_second=metrics["tokens_per_second"],
        )
        if not np.isfinite(metrics["loss"]):
            self._progress.say(f"step {position.step}: the loss is {metrics['loss']}")

    def evaluate(self, position: Position) -> dict[str, Metrics]:
        """Returns the metrics of every held-out set, after writing and showing them."""
        data, program = self._experiment.data, position.program
        params = position.state.served()
        results = {}
        for name in data.eval_names():
            batches = data.eval_batches(name, program.eval_rows, *self._processes)
            results[name] = evaluate(program.evaluate, params, batches, data.num_bytes(name))
            self._write(position, f"eval/{name}", results[name])
            self._progress.say(summary.describe_evaluation(name, results[name]))
        return results

    def _save(self, position: Position) -> None:
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
                "config": self._config_text,
            },
        )

    def _write(self, position: Position, split: str, metrics: Metrics) -> None:
        stage = self._experiment.stages[position.stage].name
        self._writer.write({"step": position.step, "stage": stage, "split": split} | metrics)

    def _compare_with_gzip(self, evaluation: dict[str, Metrics]) -> None:
        for name, metrics in evaluation.items():
            if "bits_per_byte" in metrics:
                gzip = gzip_bits_per_byte(self._experiment.data.held_out_text(name))
                self._progress.say(
                    f"result   {name}: {metrics['bits_per_byte']:.3f} bits per byte on held-out"
                    f" documents; gzip -9 needs {gzip:.3f}"
                )

    def generate(self, position: Position) -> list[str]:
        """Returns the prompts of the experiment, each with what the model makes of it."""
        sample = self._experiment.sample
        if sample is None or not sample.prompts:
            return []
        vocabulary = self._vocabulary
        generated = position.program.generate(
            position.state.served(),
            [vocabulary.encode(prompt) for prompt in sample.prompts],
            method=sample.method,
            max_new_tokens=sample.max_new_tokens,
            eos_id=vocabulary.eos_id,
            pad_id=vocabulary.pad_id,
            start_id=vocabulary.start_id,
        )
        texts = [
            prompt + vocabulary.decode(tokens)
            for prompt, tokens in zip(sample.prompts, generated, strict=True)
        ]
        for text in texts:
            self._progress.say(f"sample   {text}")
        return texts
