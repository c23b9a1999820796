"""One checkpoint turned into another, part by part.

What is in memory at a time is a few pieces of the source, each at most a sixteenth of the
largest layer's part of a leaf. The result is written under a temporary name (or, where there are no
renames, without the mark of what is complete) until all of it is there; the source is only read.

>>> print(convert(experiment, Conversion(source="runs/pseudo"), LayoutChange.DELINK))
params/layers/mlp/up: float32[1,16,32] -> params/layers_*/mlp/up: 2 x float32[16,32], copied
...
"""

import math
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from m6jax import configuration, processes
from m6jax.checkpointing import CheckpointError, Checkpoints, Index, Streamed, piece_bytes
from m6jax.converting import values
from m6jax.converting.recipes import Direction, Recipe, recipes
from m6jax.converting.report import Report, summarize
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.converting.source_checkpoint import (
    SourceCheckpoint,
    check_model,
    check_position,
    expected_state,
    open_source,
)
from m6jax.experiment import Experiment
from m6jax.experiment.identity import Identity
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, LayoutError
from m6jax.modeling.transformer import Transformer
from m6jax.pseudo_to_real.delinking import Policy

# Besides the arrays: documents and the trees of names. Found 60 kB with 400 leaves.
_SPARE_BYTES = 2**20


def convert(experiment: Experiment, conversion: Conversion, change: LayoutChange) -> Report:
    """Writes the first checkpoint of a run from one of another run.

    Args:
      experiment: the run that gets it.
      conversion: where from.
      change: what is done to the layers; a stage that needs another one is refused.

    Raises:
      ConfigError: the source is missing or of another model, the layers do not become so, the
        optimizer's state has no policy, there is a checkpoint already or no room for one, or
        another run writes there.
      CheckpointError: the source is damaged, or the result cannot be written.
    """
    if conversion.source is None:
        raise ConfigError(
            f"Conversion.source: --mode={change.value} needs the MODEL_DIR of the run to read"
            " (--gin.Conversion.source=\"'runs/pseudo'\")"
        )
    if (count := processes.current().count) > 1:
        raise ConfigError(
            f"--mode={change.value}: one process does it piece by piece, {count} would write the"
            " same files (start it once)"
        )
    stage = experiment.stage_number(conversion.stage, "Conversion.stage")
    directory = ModelDir(experiment.model_dir)
    with open_source("Conversion.source", conversion.source, conversion.step) as source:
        check_model(source, experiment)
        step = 0 if conversion.restart else source.step
        check_position("Conversion", experiment, stage, step)
        identity = Identity(conversion.source)
        identity.check_vocabulary(experiment.data)
        made = _recipes(experiment, stage, source, change)
        given = _anew(experiment) if conversion.restart else {}
        leaves = _streamed(made, source, conversion.average, given)
        description = {
            "stage": stage,
            "stage_name": experiment.stages[stage].name,
            "stage_start": step,
            "layout": experiment.layout(stage).to_json(),
            "config": configuration.to_gin(experiment, macros=MACROS),
            "source": {"model_dir": conversion.source, "step": source.step},
        }
        data_state = {} if conversion.restart else source.data_state
        with directory.lock():
            with Checkpoints(directory.checkpoints, keep=experiment.keep) as checkpoints:
                _check_target(directory, checkpoints, made)
                directory.check(experiment)
                _save(checkpoints, step, leaves, data_state, description)
            identity.copy_to(Identity(experiment.model_dir), conversion.restart)
            directory.claim(experiment)
    policy = experiment.stages[stage].optimizer_state
    return summarize(made, source.reader.leaves(), source.step, policy, conversion.average)


def _recipes(
    experiment: Experiment, stage: int, source: SourceCheckpoint, change: LayoutChange
) -> dict[str, Recipe]:
    """Returns the recipe of every leaf, once it is sure that it is what the user wants."""
    old, new = source.layout, experiment.layout(stage)
    settings = experiment.stages[stage]
    _check_change(
        change, old, new, Transformer(experiment.model).layer_names(), source, settings.name
    )
    if settings.optimizer_state is Policy.MEASURED and change in (
        LayoutChange.DELINK,
        LayoutChange.LINK,
    ):
        raise ConfigError(
            f"Stage.optimizer_state: stage {settings.name!r}: MEASURED needs batches and a step,"
            f" which --mode={change.value} does not make (choose COPY, RESCALE or RESET; or let the"
            " run itself delink: Experiment.initial, or both stages in one run)"
        )
    try:
        return recipes(
            expected_state(experiment, old),
            old,
            expected_state(experiment, new),
            new,
            settings.optimizer_state,
            Direction.FEWER if change is LayoutChange.LINK else Direction.MORE,
        )
    except LayoutError as error:
        raise ConfigError(
            f"--mode={change.value}: {source.where} cannot become stage {settings.name!r}: {error}"
        ) from error


def _check_change(
    change: LayoutChange,
    old: Layout,
    new: Layout,
    names: list[str],
    source: SourceCheckpoint,
    stage: str,
) -> None:
    """Refuses layers that the change does not lead to."""
    more = any(new.unit_of(name) > old.unit_of(name) for name in names)
    fewer = any(new.unit_of(name) < old.unit_of(name) for name in names)
    forms = None if more or fewer else (old.form, new.form)
    done = [
        name
        for name, fits in (
            (LayoutChange.DELINK, more and not fewer),
            (LayoutChange.LINK, fewer and not more),
            (LayoutChange.STACK, forms == (Form.UNROLLED, Form.STACKED)),
            (LayoutChange.UNSTACK, forms == (Form.STACKED, Form.UNROLLED)),
        )
        if fits
    ]
    if change in done:
        return
    instead = f"use --mode={done[0].value}" if done else "name another stage: Conversion.stage"
    raise ConfigError(
        f"--mode={change.value}: {source.where} has {_units(old)} and stage {stage!r} of the"
        f" configuration {_units(new)}: there is nothing to {change.value} ({instead})"
    )


def _units(layout: Layout) -> str:
    parts = ", parts of their own" if layout.parts else ""
    return f"{layout.unit} distinct of {layout.depth} layers ({layout.form.name}{parts})"


def _check_target(
    directory: ModelDir, checkpoints: Checkpoints, made: Mapping[str, Recipe]
) -> None:
    """Refuses to write over checkpoints, and where there is no room."""
    steps = checkpoints.steps()
    if steps:
        raise ConfigError(
            f"MODEL_DIR: {directory.path} holds checkpoints already (steps"
            f" {', '.join(map(str, steps))}); choose another directory"
        )
    if "://" in str(directory.path):
        return  # a bucket does not say how much it takes
    needed = _SPARE_BYTES + sum(math.prod(r.shape) * r.dtype.itemsize for r in made.values())
    there = epath.Path(directory.path).expanduser().resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"MODEL_DIR: the checkpoint needs {needed:,} bytes and {directory.path} has"
            f" {free:,} free (make room, or choose another directory)"
        )


def _anew(experiment: Experiment) -> dict[str, np.ndarray]:
    """Returns what a run that begins does not take from another one, by name."""
    key = jax.random.key_data(jax.random.key(experiment.seed))
    return {"step": np.zeros((), np.int32), "rng": np.asarray(key)}


def _streamed(
    made: Mapping[str, Recipe],
    source: SourceCheckpoint,
    average: bool,
    given: Mapping[str, np.ndarray],
) -> dict[str, Streamed]:
    """Returns the leaves to be saved; each is made when it is written."""
    reader = source.reader
    size = piece_bytes(reader.leaves())

    def leaf(recipe: Recipe) -> Streamed:
        def read(index: Index) -> np.ndarray:
            if recipe.name in given:
                return given[recipe.name][index]
            return values.make(recipe, reader, index, average)

        return Streamed(recipe.shape, recipe.dtype, _piece(recipe, source, size), read)

    return {name: leaf(recipe) for name, recipe in made.items()}


def _piece(recipe: Recipe, source: SourceCheckpoint, size: int) -> tuple[int, ...]:
    """Returns the shape of the target's pieces: those of the source, of one layer each."""
    origin = recipe.copies[0][0]
    piece = source.reader.leaf(origin.name).piece
    inside = piece if origin.layer is None else piece[1:]
    if not recipe.stacked:
        return inside
    whole = math.prod(recipe.shape) * recipe.dtype.itemsize
    return recipe.shape if whole <= size else (1, *inside)


def _save(
    checkpoints: Checkpoints,
    step: int,
    leaves: dict[str, Streamed],
    data_state: dict[str, Any],
    description: dict[str, Any],
) -> None:
    """Writes all or nothing."""
    try:
        checkpoints.save(step, leaves, data_state, description, wait=True)
    except CheckpointError as error:
        checkpoints.remove_unfinished()
        if isinstance(error.__cause__, LayoutError):
            raise ConfigError(f"Conversion.average: {error.__cause__}") from error
        if isinstance(error.__cause__, CheckpointError):
            raise error.__cause__ from error
        raise
