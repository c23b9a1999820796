"""A run that begins in the state of another run's checkpoint.

Every shard is read, delinked and put where it rests, one after the other: with a Pseudo Giant's
checkpoint and a Real Giant's shardings no host ever holds more of the state than its own devices
and memory shall have, and one shard.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from m6jax.checkpointing import Index
from m6jax.converting import values, weights_alone
from m6jax.converting.recipes import Recipe, recipes
from m6jax.converting.source_checkpoint import (
    SourceCheckpoint,
    check_model,
    check_position,
    expected_state,
    open_source,
)
from m6jax.experiment import Experiment
from m6jax.experiment.programs import StageProgram
from m6jax.experiment.stage_switch import policy_of_copies
from m6jax.foundation import pytrees
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, LayoutError, LeafName
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training.train_state import TrainState, new_loss_scale

# Leaves of a state that begin as copies of the parameters.
_LIKE_PARAMETERS = ("extra/averaged/", "extra/master/")


@dataclasses.dataclass(frozen=True)
class StartReport:
    """What became of every leaf of the run or of its source, by name.

    Attributes:
      taken: made of the source, the converted ones too.
      cast: made of another type, as `name: float32 to bfloat16`.
      missing: of the run, and made of nothing; they begin anew.
      skipped: of the source, and of no use to the run.
    """

    taken: tuple[str, ...]
    cast: tuple[str, ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        line = f"{len(self.taken)} leaves taken"
        for kind in ("cast", "missing", "skipped"):
            names = Counter(name.split("/")[0] for name in getattr(self, kind))
            if names:
                line += f", {kind}: " + ", ".join(f"{n} of {what}" for what, n in names.items())
        return line


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
      stage: number of the stage.
      step: updates made before.
      program: of the stage.
      state: the state.
      layout: how the layers of the source lay.
      to_measure: whether second moments are still to be measured (`stage_switch.measure`).
      where: the checkpoint that was read.
      report: what was taken of it.
    """

    stage: int
    step: int
    program: StageProgram
    state: TrainState
    layout: Layout
    to_measure: bool
    where: str
    report: StartReport

    def __str__(self) -> str:
        return f"{self.where}; {self.report}"


def begins_at(experiment: Experiment) -> tuple[int, int]:
    """Returns the number of the stage and the step at which `experiment.initial` lets a run begin.

    Raises:
      ConfigError: there is no such checkpoint, or nothing to train after it.
    """
    initial = experiment.initial
    assert initial is not None  # who calls has looked
    stage = experiment.stage_number(initial.stage, "Initial.stage")
    step = 0
    if not weights_alone.is_folder(initial.model_dir):
        with open_source("Initial.model_dir", initial.model_dir, initial.step) as source:
            step = 0 if initial.restart else source.step
    check_position("Initial", experiment, stage, step)
    return stage, step


def begin(experiment: Experiment, go_to: Callable[[dict[str, Any]], None]) -> Start:
    """Returns the state in which `experiment.initial` lets a run begin.

    Must be called by all processes; each reads what its devices have.

    Args:
      experiment: the run.
      go_to: goes to a place in the run's data, empty for the beginning; called before anything
        large is read, and raises ConfigError for a place in other data.

    Raises:
      ConfigError: there is no such checkpoint, it is of another model or optimizer, its layers do
        not become those of the stage, or the optimizer's state has no policy.
      CheckpointError: the checkpoint is damaged.
    """
    initial = experiment.initial
    assert initial is not None  # who calls has looked
    stage, step = begins_at(experiment)
    if initial.upcycle or weights_alone.is_folder(initial.model_dir):
        return _begin_with_weights(experiment, go_to, stage, step)
    with open_source("Initial.model_dir", initial.model_dir, initial.step) as source:
        check_model(source, experiment, initial.parameters_only)
        _go_to(go_to, {} if initial.restart else source.data_state)
        program = StageProgram(experiment, stage, step)
        made = _recipes(experiment, source, program, stage)
        if initial.parameters_only:
            made = _without_optimizer(made, source)
        abstract = dict(pytrees.flatten_named(program.abstract))
        leaves = source.checkpoints.build(
            source.step,
            {name: leaf for name, leaf in abstract.items() if LeafName.of(name).whole in made},
            functools.partial(_values, made, source),
        )
        report = _report(source, made, abstract)
    state = _assemble(program, leaves, initial.parameters_only)
    if initial.restart:
        state = _restarted(state, experiment.seed)
    return Start(
        stage=stage,
        step=step,
        program=program,
        state=state,
        layout=source.layout,
        to_measure=(
            experiment.stages[stage].optimizer_state is Policy.MEASURED
            and source.layout != program.layout.whole
            and not initial.parameters_only
        ),
        where=source.where,
        report=report,
    )


def _begin_with_weights(
    experiment: Experiment, go_to: Callable[[dict[str, Any]], None], stage: int, step: int
) -> Start:
    """Returns a new state but for its parameters, and for what begins as these."""
    initial = experiment.initial
    assert initial is not None  # as in `begin`
    place: dict[str, Any] = {}
    if step:
        with open_source("Initial.model_dir", initial.model_dir, initial.step) as source:
            place = source.data_state
    _go_to(go_to, place)
    program = StageProgram(experiment, stage, step)
    taken = weights_alone.take(experiment, program)
    params = dict(pytrees.flatten_named(taken.params))
    key = np.asarray(jax.random.key_data(jax.random.key(experiment.seed)))

    def make(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        like = next((p for p in ("params/", *_LIKE_PARAMETERS) if name.startswith(p)), None)
        if like == "params/":
            return params[name.removeprefix(like)]
        if like is not None:
            values = params[name.removeprefix(like)].astype(leaf.dtype)
            return jax.device_put(values, leaf.sharding)
        given = {"step": np.int32(step), "rng": key}
        return jax.device_put(given.get(name, np.zeros(leaf.shape, leaf.dtype)), leaf.sharding)

    abstract = dict(pytrees.flatten_named(program.abstract))
    leaves = {n: make(n, leaf) for n, leaf in abstract.items() if not n.startswith("opt_state/")}
    began = tuple(n for n in abstract if n.startswith(("params/", *_LIKE_PARAMETERS)))
    return Start(
        stage=stage,
        step=step,
        program=program,
        state=_assemble(program, leaves, parameters_only=True),
        layout=taken.layout,
        to_measure=False,
        where=taken.where + (", upcycled" if initial.upcycle else ""),
        report=StartReport(began, (), tuple(n for n in abstract if n not in began), ()),
    )


def _go_to(go_to: Callable[[dict[str, Any]], None], place: dict[str, Any]) -> None:
    try:
        go_to(place)
    except ConfigError as error:
        raise ConfigError(
            f"Experiment.initial: {error}; to begin the data anew set Initial.restart = True"
        ) from error


def _recipes(
    experiment: Experiment, source: SourceCheckpoint, program: StageProgram, stage: int
) -> dict[str, Recipe]:
    settings = experiment.stages[stage]
    initial = experiment.initial
    assert initial is not None  # as in `begin`
    policy = policy_of_copies(settings.optimizer_state, experiment.update)
    if initial.parameters_only:
        policy = Policy.COPY  # of what is thrown away
    try:
        return recipes(
            expected_state(experiment, source.layout),
            source.layout,
            expected_state(experiment, program.layout.whole),
            program.layout.whole,
            policy,
        )
    except LayoutError as error:
        raise ConfigError(
            f"Experiment.initial: {source.where} cannot become stage {settings.name!r}: {error}"
            f" (see Stage.optimizer_state, and Initial.stage)"
        ) from error


def _values(
    made: dict[str, Recipe], source: SourceCheckpoint, name: str, index: Index
) -> np.ndarray:
    """Returns the values of a leaf at an index, also of a run of a stack."""
    leaf = LeafName.of(name)
    if leaf.run:
        layers = slice(leaf.first + index[0].start, leaf.first + index[0].stop)
        index = (layers, *index[1:])
    return values.make(made[leaf.whole], source.reader, index)


def _without_optimizer(made: dict[str, Recipe], source: SourceCheckpoint) -> dict[str, Recipe]:
    """Returns the recipes of all but the optimizer's state.

    Averages and masters that the source has not begin as the parameters, biases of routers at 0,
    the scale of the loss anew.
    """
    saved = source.reader.leaves()
    recipes = {}
    for name, recipe in made.items():
        if name.startswith(("opt_state/", "extra/loss_scale/")):
            continue
        if not all(origin in saved for origin in recipe.sources()):
            like = next((p for p in _LIKE_PARAMETERS if name.startswith(p)), None)
            if like is None:
                recipe = dataclasses.replace(recipe, factor=0)
            else:
                copies = made[f"params/{name.removeprefix(like)}"].copies
                recipe = dataclasses.replace(recipe, copies=copies)
        recipes[name] = recipe
    return recipes


def _assemble(
    program: StageProgram, leaves: dict[str, jax.Array], parameters_only: bool
) -> TrainState:
    if parameters_only:
        new = program.initialize_optimizer()
        leaves = leaves | {f"opt_state/{name}": leaf for name, leaf in pytrees.flatten_named(new)}
        if program.abstract.extra.loss_scale is not None:
            place = program.abstract.step.sharding
            scale = jax.device_put(new_loss_scale(), place)
            leaves |= {f"extra/loss_scale/{n}": leaf for n, leaf in pytrees.flatten_named(scale)}
    return pytrees.map_named(lambda name, _: leaves[name], program.abstract)


def _restarted(state: TrainState, seed: int) -> TrainState:
    """Returns the state before the first step, with random numbers of the run's own."""
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return state.replace(  # type: ignore[attr-defined]
        step=jax.device_put(np.int32(0), state.step.sharding),
        rng=jax.device_put(key, state.rng.sharding),
    )


def _report(
    source: SourceCheckpoint, made: dict[str, Recipe], abstract: dict[str, Any]
) -> StartReport:
    saved = source.reader.leaves()
    taken = {
        name: [origin for origin in recipe.sources() if origin in saved]
        for name, recipe in made.items()
        if recipe.factor != 0
    }
    used = {origin for origins in taken.values() for origin in origins}
    return StartReport(
        taken=tuple(taken),
        cast=tuple(
            f"{name}: {saved[origins[0]].dtype} to {made[name].dtype}"
            for name, origins in taken.items()
            if saved[origins[0]].dtype != made[name].dtype
        ),
        missing=tuple(name for name in abstract if LeafName.of(name).whole not in taken),
        skipped=tuple(name for name in saved if name not in used),
    )
