"""Where a run stands, and what it needs before it can stand anywhere."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from m6jax import configuration, processes
from m6jax.checkpointing import Checkpoints
from m6jax.data.vocab import Vocabulary
from m6jax.experiment import Experiment, stage_switch
from m6jax.experiment.identity import Identity, vocabulary_for
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.experiment.programs import HostBatch, StageProgram
from m6jax.foundation.failures import NotFiniteError
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.routing import is_kernel
from m6jax.planning import budget
from m6jax.processes import Group
from m6jax.pseudo_to_real.triggers import Watch
from m6jax.run import same_everywhere
from m6jax.training.finite import first_bad_leaf
from m6jax.training.train_state import TrainState


@dataclasses.dataclass
class Position:
    """Where a run stands.

    Attributes:
      stage: number of the stage.
      start: updates made before the stage.
      step: updates made.
      program: of the stage.
      state: in the stage's layout.
      watch: says when the stage is over.
      saved: step of the newest checkpoint, or the step at which the run began.
    """

    stage: int
    start: int
    step: int
    program: StageProgram
    state: TrainState
    watch: Watch
    saved: int


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An experiment that was held against data and devices.

    Attributes:
      experiment: with every budget turned into layers on the host, and the run's own vocabulary.
      config_text: the experiment as the user gave it, as gin.
      vocabulary: of its data.
      mesh: of the first stage.
      tables: what became of the budgets, by number of the stage.
    """

    experiment: Experiment
    config_text: str
    vocabulary: Vocabulary
    mesh: Mesh
    tables: dict[int, str]


def prepare(experiment: Experiment, group: Group) -> Prepared:
    """Checks vocabulary, budgets, and every stage's mesh and shapes, before anything compiles.

    Args:
      experiment: the run.
      group: the processes; all must call it.

    Raises:
      ConfigError: something does not fit.
    """
    text = configuration.to_gin(experiment, macros=MACROS)
    data = Identity(experiment.model_dir).data(experiment)
    vocabulary, model = vocabulary_for(experiment.model, data)
    experiment = dataclasses.replace(experiment, data=data, model=model)
    planned, tables = budget.resolve(experiment, jax.device_count())
    same_everywhere.check_planned(group, planned)
    programs = [StageProgram(planned, i, 0) for i in range(len(planned.stages))]
    return Prepared(planned, text, vocabulary, programs[0].mesh, tables)


def newest_step(group: Group, checkpoints: Checkpoints, model_dir: str) -> int | None:
    """Returns the newest complete step as the first process sees it, None if there is none.

    Raises:
      ConfigError: another process does not see it.
    """
    newest = group.first(checkpoints.latest())
    there = checkpoints.steps()
    sees = group.gather(newest in there if newest is not None else not there)
    if not all(sees):
        other = sees.index(False)
        what = "no checkpoint" if newest is None else f"checkpoint {newest}"
        raise ConfigError(
            f"MODEL_DIR: process 0 sees {what} in {model_dir} and process {other} sees something"
            " else (choose a directory that all hosts share)"
        )
    return None if newest is None else int(newest)


def restore(experiment: Experiment, checkpoints: Checkpoints, step: int) -> Position:
    """Returns where a run stood when a checkpoint was saved.

    Args:
      experiment: the run, prepared.
      checkpoints: its own.
      step: of the checkpoint.

    Raises:
      CheckpointError: it is damaged or of another model.
      NotFiniteError: it holds numbers that are not finite.
    """
    description = checkpoints.description(step)
    stage, start = description["stage"], description["stage_start"]
    program = StageProgram(experiment, stage, start)
    # Routers had the type of all weights once.
    state = checkpoints.restore(step, program.abstract, widen=is_kernel)
    bad = first_bad_leaf(state)
    if bad is not None:
        raise NotFiniteError(
            f"checkpoint {step} of {experiment.model_dir} is not finite, the first such leaf is"
            f" {bad} (remove its directory to go on from the one before)"
        )
    # Older checkpoints are of stages that end at a step, for which nothing is kept.
    watch = experiment.end_of(stage).watch(start, description.get("trigger", {}))
    return Position(stage, start, step, program, state, watch, saved=step)


def begin(experiment: Experiment) -> Position:
    """Returns where a run begins that begins anew."""
    program = StageProgram(experiment, 0, start_step=0)
    watch = experiment.end_of(0).watch(0, {})
    return Position(0, 0, 0, program, program.initialize(), watch, saved=0)


def enter_next_stage(
    experiment: Experiment, position: Position, data_state: dict[str, Any]
) -> None:
    """Takes a run that is at the end of a stage into the next one.

    Args:
      experiment: the run, prepared.
      position: where it stands; is changed.
      data_state: place in the data, for what is measured on the coming batches.
    """
    old, stage = position.program.layout, position.stage + 1
    settings = experiment.stages[stage]
    program = StageProgram(experiment, stage, position.step)
    coming = coming_batches(experiment, data_state, program.rows, settings.measured_batches)
    position.state = stage_switch.delink(
        experiment, program, position.state, old, settings.optimizer_state, coming
    )
    position.stage, position.start, position.program = stage, position.step, program
    position.watch = experiment.end_of(stage).watch(position.step, {})


def coming_batches(
    experiment: Experiment, data_state: dict[str, Any], num_rows: int, number: int
) -> Iterator[HostBatch]:
    """Yields the batches that training takes next, and leaves them there.

    Args:
      experiment: the run.
      data_state: place in the data.
      num_rows: of a batch.
      number: of batches.
    """
    stream = experiment.data.train_rows(jax.process_index(), jax.process_count())
    stream.restore(data_state)
    for _ in range(number):
        yield stream.take(num_rows)
    stream.close()


@contextlib.contextmanager
def open_checkpoint(
    experiment: Experiment, step: int | None = None
) -> Iterator[tuple[Prepared, Position]]:
    """Opens a run to look at one of its checkpoints; nothing is written.

    Args:
      experiment: the run.
      step: of the checkpoint; None: the newest.

    Raises:
      ConfigError: there is no such checkpoint, it is of another configuration or vocabulary, or the
        configuration cannot work.
      CheckpointError: it is damaged or of another model.
      NotFiniteError: it holds numbers that are not finite.
    """
    group = processes.current()
    same_everywhere.check_settings(group, experiment)
    directory = ModelDir(experiment.model_dir)
    directory.check_same(experiment)
    with Checkpoints(directory.checkpoints) as checkpoints:
        newest = newest_step(group, checkpoints, experiment.model_dir)
        if newest is None:
            raise ConfigError(
                f"MODEL_DIR: {experiment.model_dir} holds no checkpoint (train first)"
            )
        steps = checkpoints.steps()
        if step is not None and step not in steps:
            raise ConfigError(
                f"step {step}: {experiment.model_dir} has no checkpoint of it (there are"
                f" {', '.join(map(str, steps))})"
            )
        Identity(experiment.model_dir).require()
        prepared = prepare(experiment, group)
        at = newest if step is None else step
        yield prepared, restore(prepared.experiment, checkpoints, at)
