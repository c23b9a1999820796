"""The checkpoint that is read, held against what a configuration expects of it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.checkpointing import Checkpoints, WholeReader
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import ModelDir
from m6jax.experiment.programs import state_shapes
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.modeling.routing import is_kernel
from m6jax.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint of a run.

    Attributes:
      where: what to call it.
      step: updates made.
      layout: how its layers lie.
      stage: name of its stage.
      data_state: place in the data.
      reader: of its leaves.
      checkpoints: those of the run.
    """

    where: str
    step: int
    layout: Layout
    stage: str
    data_state: dict[str, Any]
    reader: WholeReader
    checkpoints: Checkpoints


@contextlib.contextmanager
def open_source(setting: str, model_dir: str, step: int | None) -> Iterator[SourceCheckpoint]:
    """Opens a checkpoint to be read.

    Args:
      setting: where the user named it, for messages.
      model_dir: of the run.
      step: of the checkpoint; None: the newest.

    Raises:
      ConfigError: the checkpoint is not there, or not one of a run.
      CheckpointError: the checkpoint is damaged.
    """
    with Checkpoints(ModelDir(model_dir).checkpoints) as checkpoints:
        step = checkpoints.latest() if step is None else step
        if step is None:
            raise ConfigError(
                f"{setting}: {model_dir} holds no checkpoint (name the MODEL_DIR of a run that has"
                " saved one)"
            )
        there = checkpoints.steps()
        if step not in there:
            raise ConfigError(
                f"{setting.split('.')[0]}.step: {model_dir} holds no checkpoint of step {step} (it"
                f" has {', '.join(map(str, there)) or 'none'})"
            )
        description = checkpoints.description(step)
        where = f"checkpoint {step} of {model_dir}"
        if "layout" not in description:
            raise ConfigError(
                f"{setting}: {where} does not say how its layers lie: it is of no run (name the"
                " MODEL_DIR of one)"
            )
        yield SourceCheckpoint(
            where=where,
            step=step,
            layout=Layout.from_json(description["layout"]).whole,
            stage=description["stage_name"],
            data_state=checkpoints.restore_data_state(step),
            reader=WholeReader(checkpoints.pieces(step)),
            checkpoints=checkpoints,
        )


def expected_state(experiment: Experiment, layout: Layout) -> TrainState:
    """Returns shapes and types of a run's state in any layout, whatever devices it needs."""
    partitioning = Partitioning()
    mesh = partitioning.make_mesh(jax.devices()[:1])
    return state_shapes(experiment, layout, partitioning, mesh)


def check_model(
    source: SourceCheckpoint, experiment: Experiment, parameters_only: bool = False
) -> None:
    """Makes sure that a checkpoint is of a configuration's model and optimizer.

    Args:
      source: the checkpoint.
      experiment: the configuration.
      parameters_only: do not ask for more than parameters, in any floating-point type.

    Raises:
      ConfigError: it is not; says which leaf is the first to differ, with both shapes.
    """
    model = experiment.model
    if source.layout.depth != model.num_layers:
        raise ConfigError(
            f"ModelConfig.num_layers: {source.where} is of a model of {source.layout.depth} layers,"
            f" not of {model.num_layers}"
        )
    expected = dict(pytrees.flatten_named(expected_state(experiment, source.layout)))
    saved: dict[str, Any] = dict(source.reader.leaves())
    saved = {
        n: _as_asked(leaf, expected.get(n)) if is_kernel(n) else leaf for n, leaf in saved.items()
    }
    if parameters_only:
        both = saved.keys() & expected.keys()
        expected = {n: leaf for n, leaf in expected.items() if _is_parameter(n) or n in both}
        saved = {
            n: _as_asked(leaf, expected.get(n))
            for n, leaf in saved.items()
            if not n.startswith("opt_state/") and (_is_parameter(n) or n in both)
        }
        expected = {n: leaf for n, leaf in expected.items() if not n.startswith("opt_state/")}
    lines = pytrees.differences(saved, expected)
    if not lines:
        return
    other = next((line for line in lines if not line.startswith("opt_state/")), None)
    what = "another model" if other else "another optimizer"
    raise ConfigError(
        f"{source.where} is of {what}; the first of {len(lines)} leaves that differ, there against"
        f" in the configuration: {other or lines[0]}"
    )


def check_position(settings: str, experiment: Experiment, stage: int, step: int) -> None:
    """Makes sure that there is something to train where a run would begin.

    Args:
      settings: which name the source, for messages: `Initial` or `Conversion`.
      experiment: the run.
      stage: number of the stage in which it begins.
      step: updates made before.

    Raises:
      ConfigError: the stage is over at that step.
    """
    end, name = experiment.end_of(stage).at_most, experiment.stages[stage].name
    if step >= end:
        ends = "Experiment.steps" if stage == len(experiment.stages) - 1 else "Stage.until"
        raise ConfigError(
            f"{ends}: there would be nothing to train: the checkpoint is of step {step} and stage"
            f" {name!r} ends at step {end} (set {ends} to more than {step}, or {settings}.restart ="
            " True to begin at step 0)"
        )


def _is_parameter(name: str) -> bool:
    return name.startswith("params/")


def _as_asked(leaf: Any, asked: Any) -> Any:
    if asked is None or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (leaf, asked)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, asked.dtype)
