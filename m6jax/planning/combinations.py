"""The combinations of mesh, unit, offload plan and microbatches that a stage could have.

Meshes are all ways to cut the devices in data x expert x model, with model up to 8, with weights
fully sharded and not; units the stage's own, all layers, and one round of the pattern; plans those
of PLANS, the stage's own, and as few of the last layers on the host as fit. What the model, the
update or the rows do not allow is left out.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from m6jax.experiment import Experiment
from m6jax.experiment.rules import check_offload
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate_shapes
from m6jax.planning.budget import least_number
from m6jax.planning.hardware import Hardware
from m6jax.planning.settings import PlanSettings
from m6jax.planning.stages import StageShapes, stage_shapes

_ALL = OffloadPlan(weights=("",), optimizer_state=True)
# From the least that moves to the most.
PLANS = (
    OffloadPlan(),
    OffloadPlan(streamed=True),
    OffloadPlan(optimizer_state=True),
    _ALL,
    dataclasses.replace(_ALL, activations=True),
    dataclasses.replace(_ALL, streamed=True),
    dataclasses.replace(_ALL, activations=True, streamed=True),
)
_MODEL_PARALLEL = (1, 2, 4, 8)


def combinations(
    experiment: Experiment, stage: int, devices: int, hardware: Hardware, settings: PlanSettings
) -> Iterator[tuple[StageShapes, int]]:
    """Goes through units, meshes, plans and microbatches that a run could have.

    Args:
      experiment: the run; its rows, model and optimizer stay.
      stage: number of the stage.
      devices: number of devices.
      hardware: of every device; for plans of as few layers on the host as fit.
      settings: microbatches to try, usable memory.

    Yields:
      Described combinations, whether they fit or not, and the number of their distinct layers.
    """
    plans = dict.fromkeys((*PLANS, experiment.offload_of(stage)))
    for unit in _units(experiment, stage):
        for sharded in (False, True):
            base = _on_one_device(experiment, stage, unit, sharded, settings)
            for where in _meshes(devices, sharded, base.partitioning.rules):
                try:
                    bare = base.on_mesh(where, devices)
                except ConfigError:
                    continue  # rows, experts or heads do not divide over it
                yield from ((shapes, unit) for shapes in _with_plans(bare, plans, settings))
                yield from ((shapes, unit) for shapes in _with_some(bare, hardware, settings))


def _units(experiment: Experiment, stage: int) -> list[int]:
    """Returns the numbers of distinct layers to try, the stage's own first."""
    depth = experiment.model.num_layers
    own = experiment.stages[stage]
    if own.parts:  # what shares what is then said part by part
        return [own.unit or depth]
    round_ = len(experiment.model.pattern)
    return list(dict.fromkeys((own.unit or depth, depth, round_)))


def _on_one_device(
    experiment: Experiment, stage: int, unit: int, sharded: bool, settings: PlanSettings
) -> StageShapes:
    """Describes the stage on one device, to be put on every mesh."""
    where = experiment.mesh_of(stage)
    one = dataclasses.replace(where, data=1, expert=1, model=1, fully_sharded=sharded)
    own = experiment.stages[stage]
    # The other stages neither matter nor need to fit the unit.
    alone = dataclasses.replace(
        own,
        partitioning=one,
        offload=None,
        unit=unit,
        form=own.form if unit == experiment.model.num_layers else Form.STACKED,
        until=None,
    )
    run = dataclasses.replace(
        experiment,
        stages=(alone,),
        batch_size=experiment.rows(stage),
        update=dataclasses.replace(experiment.update, microbatches=1),
    )
    return stage_shapes(run, 0, 1, patches=settings.patches)


def _meshes(
    devices: int, sharded: bool, rules: dict[str, tuple[str, ...]] | None
) -> Iterator[Partitioning]:
    """Goes through the meshes of so many devices."""
    for model in _MODEL_PARALLEL:
        if devices % model:
            continue
        rest = devices // model
        for expert in (e for e in range(1, rest + 1) if rest % e == 0):
            data = rest // expert
            if sharded and data == 1:
                continue
            yield Partitioning(
                data=data, expert=expert, model=model, fully_sharded=sharded, rules=rules
            )


def _with_plans(
    bare: StageShapes, plans: Iterable[OffloadPlan], settings: PlanSettings
) -> Iterator[StageShapes]:
    """Goes through the plans and microbatches that can be on a mesh."""
    for plan in plans:
        for microbatches in settings.search_microbatches:
            try:
                yield _combined(bare, plan, microbatches)
            except ConfigError:
                break  # nor can it be in more parts


def _with_some(
    bare: StageShapes, hardware: Hardware, settings: PlanSettings
) -> Iterator[StageShapes]:
    """Goes through plans with as few of the last layers on the host as fit."""
    depth, room = bare.layout.depth, hardware.hbm_bytes.value * settings.usable_memory
    if any(bare.layout.repeats_of(name) > 1 for name in _names(bare)):
        return
    for plan in (_ALL, dataclasses.replace(_ALL, streamed=True)):

        def some(layers: int, plan: OffloadPlan = plan) -> StageShapes:
            return _combined(bare, dataclasses.replace(plan, layers=layers), 1)

        def fits(layers: int, some: Callable[[int], StageShapes] = some) -> bool:
            return estimate_shapes(some(layers)).hbm_bytes_per_device <= room

        try:
            if depth > 1 and fits(depth - 1):
                yield some(least_number(fits, depth - 1))
        except ConfigError:
            continue  # nothing is large enough to be moved, or model or update refuse


def _names(bare: StageShapes) -> list[str]:
    return pytrees.names(bare.plain.params)


def _combined(bare: StageShapes, plan: OffloadPlan, microbatches: int) -> StageShapes:
    """Returns a combination; raises ConfigError where it cannot be."""
    update = dataclasses.replace(bare.experiment.update, microbatches=microbatches)
    check_offload(plan, bare.model, update)
    return bare.with_plan(plan).with_microbatches(microbatches)
