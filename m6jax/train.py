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

from m6jax import configuration, report, summary
from m6jax.checkpointing import Checkpoints
from m6jax.evaluation import evaluate, gzip_bits_per_byte
from m6jax.experiment import Experiment
from m6jax.model_dir import MACROS, ModelDir
from m6jax.preemption import Preemption
from m6jax.programs import HostBatch, StageProgram
from m6jax.progress import Progress
from m6jax.train_state import TrainState
from m6jax.validated import ConfigError
from m6jax.writers import MetricWriter

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
    """Where a run stands: the stage, the updates made before it and so far, and the state."""

    stage: int
    start: int
    step: int
    program: StageProgram
    state: TrainState


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
        self._processes = jax.process_index(), jax.process_count()
        self._config_text = configuration.describe(experiment, macros=MACROS)
        self._vocabulary = experiment.data.vocab()
        if self._vocabulary.size > experiment.model.vocab_size:
            raise ConfigError(
                f"ModelConfig.vocab_size: {experiment.model.vocab_size} is less than the"
                f" {self._vocabulary.size} tokens of the vocabulary"
            )
        # Every stage's mesh and shapes are checked before anything compiles.
        programs = [StageProgram(experiment, i, 0) for i in range(len(experiment.stages))]
        self._mesh = programs[0].mesh

    def train(self) -> None:
        """Goes through the stages, from the newest checkpoint or from the beginning."""
        experiment = self._experiment
        self._progress.say(summary.describe_run(experiment, self._mesh, self._vocabulary.size))
        self._rows = experiment.data.train_rows(*self._processes)
        if self._processes[0] == 0:
            ModelDir(experiment.model_dir).claim(experiment)
        if self._latest is None:
            program = StageProgram(experiment, 0, start_step=0)
            position = Position(0, 0, 0, program, program.initialize())
        else:
            position = self.restore_newest()
            self._rows.restore(self._checkpoints.restore_data_state(position.step))
            name = experiment.stages[position.stage].name
            self._progress.say(f"resume   step {position.step:,}, stage {name}")
        while True:
            self._train_stage(position)
            last = position.stage == len(experiment.stages) - 1
            if last or self._preemption.requested:
                break
            self._next_stage(position)
        self._rows.close()
        self._position = position

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
        program = StageProgram(self._experiment, stage, start)
        state = self._checkpoints.restore(self._latest, program.abstract)
        return Position(stage, start, self._latest, program, state)

    def _train_stage(self, position: Position) -> None:
        """Makes updates until the stage is over or the process is asked to stop."""
        experiment = self._experiment
        end = experiment.end_of(position.stage)
        step_fn = None
        pace = _Pace()
        saved = position.step
        while not end.due(position.step) and not self._preemption.requested:
            batch = self._rows.take(position.program.rows)
            if step_fn is None:
                step_fn = position.program.compile(batch)
                pace.restart()
            position.state, metrics = step_fn(position.state, position.program.put(batch))
            position.step += 1
            pace.add(batch)
            over = end.due(position.step)
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
        program = StageProgram(experiment, stage, position.step)
        position.state = program.delink(position.state, old, settings.optimizer_state)
        position.stage, position.start, position.program = stage, position.step, program
        after = self._probe(position)
        change = f"{old.unit} -> {program.layout.unit} distinct layers"
        self._progress.say(
            f"delink   step {position.step:,}, stage {settings.name}: {change}; loss before"
            f" {before:.5f}, loss after {after:.5f}"
        )
        self._write(position, "delink", {"loss_before": before, "loss_after": after})

    def _probe(self, position: Position) -> float:
        """Returns the loss of a batch that is the same before and after a delink."""
        data = self._experiment.data
        names = data.eval_names()
        if names:
            rows = position.program.eval_rows
            batch = next(iter(data.eval_batches(names[0], rows, *self._processes)))
        else:
            stream = data.train_rows(*self._processes)
            batch = stream.take(position.program.rows)
            stream.close()
        sums = position.program.evaluate(position.state.served(), batch)
        return float(sums.tokens.cross_entropy / sums.tokens.targets)

    def _log(self, position: Position, metrics: Metrics, pace: "_Pace") -> None:
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
        layout = position.program.layout
        self._checkpoints.save(
            position.step,
            position.state,
            self._rows.state(),
            {
                "stage": position.stage,
                "stage_name": stage.name,
                "stage_start": position.start,
                "layout": {
                    "depth": layout.depth,
                    "unit": layout.unit,
                    "form": layout.form.name,
                },
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


class _Pace:
    """Seconds a step and tokens a second since it was last read, pauses left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins anew, after a pause."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, 0

    def add(self, batch: HostBatch) -> None:
        """Counts a step with this process's rows of a batch."""
        self._steps += 1
        self._tokens += int((batch["segment_ids"] > 0).sum()) * jax.process_count()

    def read(self) -> Metrics:
        """Returns the averages since the last reading, once the steps are done."""
        seconds = time.perf_counter() - self._since
        metrics = {
            "step_seconds": seconds / max(self._steps, 1),
            "tokens_per_second": self._tokens / seconds,
        }
        self.restart()
        return metrics
