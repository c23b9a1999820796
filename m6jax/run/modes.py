"""What the command line does besides training: evaluate, infer, export, replay, report, plan."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax

from m6jax import processes
from m6jax.converting.conversion import convert as convert_checkpoint
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.data import inspection
from m6jax.experiment import Experiment, summary
from m6jax.experiment.identity import Identity
from m6jax.experiment.model_dir import ModelDir
from m6jax.formats import Export, exporting
from m6jax.foundation.validated import ConfigError
from m6jax.planning.planner import plan as plan_run
from m6jax.planning.settings import PlanSettings
from m6jax.reporting import report as reports
from m6jax.reporting.writers import write_lines, write_record
from m6jax.run import inferring, same_everywhere
from m6jax.run import replay as replaying
from m6jax.run.answers import answer_sets, write_captions
from m6jax.run.choosing import NEWEST, choose_steps
from m6jax.run.evaluation import evaluate_sets, evaluate_tasks
from m6jax.run.inferring import Asked, infer
from m6jax.run.position import Position, Prepared, open_checkpoint

__all__ = ["Asked", "convert", "evaluate", "export", "infer", "plan", "report"]


def evaluate(
    experiment: Experiment, steps: Sequence[str] = (NEWEST,), out: str | None = None
) -> int:
    """Evaluates checkpoints; prints a line for each held-out set and each that is asked.

    The metrics of a set are kept in a file of the set and the step, in the place of older ones, so
    that a training may go on meanwhile.

    Args:
      experiment: the run.
      steps: of checkpoints, see `choose_steps`; of several a table comes last.
      out: gets one JSON object for each set and step.
    """
    if out is not None:
        inferring.check_writable(out)
    records: list[dict[str, Any]] = []
    chosen = choose_steps(experiment.model_dir, steps)
    for step in chosen:
        with open_checkpoint(experiment, step) as (prepared, position):
            if len(chosen) > 1:
                _say(f"step     {step:,}")
            records += _evaluate(experiment, prepared, position)
    if len(chosen) > 1:
        _say(summary.table_of_evaluations(records))
    if out is not None and jax.process_index() == 0:
        write_lines(out, records)
    return 0


def _evaluate(
    experiment: Experiment, prepared: Prepared, position: Position
) -> list[dict[str, Any]]:
    """Returns the records of one checkpoint, after showing and keeping them."""
    Identity(experiment.model_dir).check_held_out(prepared.experiment.data)
    same_everywhere.check_data(processes.current(), prepared.experiment.data)
    params, program = position.state.served(), position.program
    records = []
    for name, metrics in evaluate_sets(prepared.experiment, program, params):
        _say(summary.describe_evaluation(name, metrics))
        records.append(_keep(experiment, position, f"eval/{name}", name, metrics))
    for name, metrics in evaluate_tasks(prepared.experiment, program, params):
        _say(summary.describe_metrics(name, metrics))
        records.append(_keep(experiment, position, f"task/{name}", f"task-{name}", metrics))
    data, sets = prepared.experiment.data, []
    for found in answer_sets(data, program, params, prepared.vocabulary):
        sets.append(found)
        _say(str(found))
        file = found.name.replace("/", "-")
        records.append(_keep(experiment, position, found.name, file, found.metrics()))
    if jax.process_index() == 0:
        write_captions(ModelDir(experiment.model_dir).report, sets, data.pictures)
    return records


def export(experiment: Experiment, settings: Export, steps: Sequence[str] = (NEWEST,)) -> int:
    """Writes a checkpoint's model for other programs; prints where it is.

    Args:
      experiment: the run.
      settings: as what.
      steps: one checkpoint; see `choose_steps`.
    """
    if (count := processes.current().count) > 1:
        raise ConfigError(
            f"--mode=export: {count} processes would write the same files (start it once)"
        )
    if len(steps) > 1:
        raise ConfigError(f"--step {' '.join(steps)}: --mode=export writes one checkpoint")
    exporting.check(experiment.model, settings)
    (step,) = choose_steps(experiment.model_dir, steps)
    name = settings.format.value
    directory = settings.directory or f"{experiment.model_dir}/export/{name}"
    if "://" in directory:
        raise ConfigError(
            f"Export.directory: {directory} is no local folder (export to one, and copy it there)"
        )
    settings = dataclasses.replace(settings, length=settings.length or experiment.data.length)
    with open_checkpoint(experiment, step) as (prepared, position):
        exported = exporting.export(
            position.state.served(),
            prepared.experiment.model,
            position.program.layout,
            prepared.vocabulary,
            settings,
            pathlib.Path(directory),
            {"step": step, "stage": experiment.stages[position.stage].name},
        )
    _say(f"export   {exported}")
    return 0


def data(experiment: Experiment) -> int:
    """Prints what the run's rows are made of, with some rows in full; no device is needed."""
    setting = Identity(experiment.model_dir).data(experiment)
    for line in inspection.inspect(setting, experiment.all_rows()):
        print(line)
    return 0


def report(experiment: Experiment) -> int:
    """Draws the plots again; prints their paths."""
    for path in reports.write_report(ModelDir(experiment.model_dir).path):
        print(path)
    return 0


def replay(experiment: Experiment) -> int:
    """Makes steps of a run again, up to the one that is not finite; prints what is wrong there."""
    for line in replaying.replay(experiment).lines:
        _say(line)
    return 0


def plan(experiment: Experiment, settings: PlanSettings) -> bool:
    """Prints what the run's stages need; returns whether all was answered and everything fits."""
    return plan_run(experiment, settings, say=print)


def convert(experiment: Experiment, conversion: Conversion, change: LayoutChange) -> int:
    """Makes the first checkpoint of a run of another run's; prints what became of every leaf."""
    begin = time.perf_counter()
    report = convert_checkpoint(experiment, conversion, change)
    print(report)
    print(
        f"{change.value:8} {conversion.source}, step {report.step:,}, to {experiment.model_dir}:"
        f" {report.nbytes:,} bytes in {time.perf_counter() - begin:.1f} s; the same configuration"
        " with --mode=train goes on from there"
    )
    return 0


def _keep(
    experiment: Experiment, position: Position, split: str, file: str, metrics: dict[str, Any]
) -> dict[str, Any]:
    """Writes what was measured at a checkpoint to a file of its own, once for all processes."""
    about = {"step": position.step, "stage": experiment.stages[position.stage].name}
    record = about | {"split": split} | metrics
    if jax.process_index() == 0:
        path = ModelDir(experiment.model_dir).evaluations / f"{file}-{position.step}.json"
        write_record(path, record)
    return record


def _say(line: str) -> None:
    """Prints a line, once for all processes."""
    if jax.process_index() == 0:
        print(line, flush=True)
