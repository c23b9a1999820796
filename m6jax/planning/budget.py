"""From a budget of device memory to an offload plan: the fewest layers on the host that fit.

    OffloadPlan.device_bytes = 14_000_000_000        # of one device, all that the step needs

`resolve` is called before anything is compiled. It asks the analytic engine, first without offload;
if that does not fit, for the least number of layers (the last ones) whose weights and optimizer
state go to the host. Nothing and all are the two ends:

>>> experiment, tables = resolve(experiment, devices=8)
>>> experiment.offload_of(1).layers
3
>>> print(tables[1])
offload  stage real: the last 3 of 4 distinct layers on the host, for 14.00 GB a device
...

`weights` and `optimizer_state` of the plan say what of a layer goes; if neither is given, both do.
`activations` and `streamed` stay as they are given.
"""

import dataclasses
from collections.abc import Callable

from m6jax.experiment import Experiment
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate_shapes
from m6jax.planning.estimate import Estimate, Memory
from m6jax.planning.fit import GB
from m6jax.planning.stages import StageShapes, stage_shapes

EVERY_WEIGHT = ("",)
MB = 1e6


def resolve(
    experiment: Experiment, devices: int, *, patches: int | None = None
) -> tuple[Experiment, dict[int, str]]:
    """Returns the experiment with every budget turned into layers, and a table for each such stage.

    Args:
      experiment: the run.
      devices: number of devices.
      patches: image patches of a row; None: see `patches_of`.

    Raises:
      ConfigError: a budget that nothing fits (names the least that would), or a plan that the model
        cannot have.
    """
    tables = {}
    stages = list(experiment.stages)
    for i in range(len(stages)):
        budget = experiment.offload_of(i).device_bytes
        if budget is None:
            continue
        plan, table = plan_for(experiment, i, devices, budget, patches=patches)
        stages[i] = dataclasses.replace(stages[i], offload=plan)
        tables[i] = table
    return dataclasses.replace(experiment, stages=tuple(stages)), tables


def plan_for(
    experiment: Experiment,
    stage: int,
    devices: int,
    device_bytes: int,
    *,
    patches: int | None = None,
) -> tuple[OffloadPlan, str]:
    """Returns the plan with the fewest layers on the host that fits, and a table about it.

    Args:
      experiment: the run.
      stage: number of the stage.
      devices: number of devices.
      device_bytes: what one device's step may need, state and work together.
      patches: image patches of a row; None: see `patches_of`.

    Raises:
      ConfigError: nothing fits; names the least budget that would.
    """
    given = experiment.offload_of(stage)
    unit = experiment.layout(stage).unit
    bare = stage_shapes(
        experiment, stage, devices, patches=patches, plan=_with_layers(given, 0, unit)
    )

    def shapes(layers: int) -> StageShapes:
        return bare.with_plan(_with_layers(given, layers, unit))

    def needs(layers: int) -> int:
        return estimate_shapes(shapes(layers)).hbm_bytes_per_device

    layers = 0
    if needs(0) > device_bytes:
        least = min(needs(0), needs(unit))
        if least > device_bytes:
            raise _nothing_fits(experiment.stages[stage].name, device_bytes, least)
        # Layers that share parameters go all together.
        apart = experiment.layout(stage).all_distinct
        layers = least_number(lambda n: needs(n) <= device_bytes, unit) if apart else unit
    chosen = shapes(layers)
    return chosen.plan, _table(estimate_shapes(chosen), layers, unit, device_bytes)


def _with_layers(given: OffloadPlan, layers: int, unit: int) -> OffloadPlan:
    """Returns the plan for so many layers on the host; for all of them it names no number."""
    both = not given.weights and not given.optimizer_state
    return dataclasses.replace(
        given,
        device_bytes=None,
        layers=None if layers in (0, unit) else layers,
        weights=(given.weights or (EVERY_WEIGHT if both else ())) if layers else (),
        optimizer_state=layers > 0 and (both or given.optimizer_state),
    )


def _nothing_fits(stage: str, device_bytes: int, least: int) -> ConfigError:
    return ConfigError(
        f"OffloadPlan.device_bytes: stage {stage!r} does not fit {device_bytes:,} bytes a device"
        f" with any number of layers on the host; the smallest budget that fits is {least:,}"
        " (OffloadPlan.streamed, OffloadPlan.activations, more microbatches or more devices make it"
        " smaller)"
    )


def least_number(fits: Callable[[int], bool], most: int) -> int:
    """Returns the least number from 1 to `most` that fits; a larger one always fits too."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _table(estimate: Estimate, layers: int, unit: int, device_bytes: int) -> str:
    which = "nothing" if not layers else f"the last {layers} of {unit} distinct layers"
    scale, name = (GB, "GB") if device_bytes >= GB else (MB, "MB")

    def row(label: str, *values: float) -> str:
        return f"{'':9}{label:20}" + "".join(f"{value / scale:>12,.3f}" for value in values)

    lines = [
        f"offload  stage {estimate.stage}: {which} on the host, for {device_bytes / scale:,.3f}"
        f" {name} a device",
        f"{'':9}{name:20}{'device':>12}{'host':>12}",
    ]
    for field in dataclasses.fields(Memory):
        pair = [getattr(memory, field.name) or 0 for memory in (estimate.hbm, estimate.host)]
        if any(pair):
            lines.append(row(field.name.replace("_", " "), *pair))
    lines.append(row("together", estimate.hbm.total, estimate.host.total))
    return "\n".join([*lines, row("moved a step", estimate.host_traffic_bytes_per_device)])
