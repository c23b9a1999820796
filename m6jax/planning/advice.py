"""The smallest change that makes a step fit which does not.

Changes are tried in the order of what they cost: what only takes time on the host link first, then
recomputation, smaller parts of a batch, more and more layers on the host, the streamed step, and
more devices. The first that fits is named.

>>> smallest_change(shapes, find("v6e"), settings)
'it would fit with OffloadPlan.optimizer_state = True: 21.30 GB on the device, 9.10 GB on the host'
"""

import dataclasses
from collections.abc import Iterator

from m6jax.experiment.rules import check_offload
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import Remat
from m6jax.planning.analytic import estimate_shapes
from m6jax.planning.estimate import Estimate
from m6jax.planning.fit import GB, fit
from m6jax.planning.hardware import Hardware
from m6jax.planning.settings import PlanSettings
from m6jax.planning.stages import StageShapes, stage_shapes

_MOST_MICROBATCHES = 64
_MOST_DEVICES = 2**13

Change = tuple[str, StageShapes]


def smallest_change(shapes: StageShapes, hardware: Hardware, settings: PlanSettings) -> str:
    """Returns the smallest change that fits, in words.

    Args:
      shapes: of the step that does not fit.
      hardware: of every device.
      settings: usable memory.
    """
    for text, changed in _changes(shapes):
        estimate = estimate_shapes(changed)
        if fit(estimate, hardware, settings.usable_memory).fits:
            return f"it would fit with {text}: {_sizes(estimate)}"
    return (
        f"nothing here makes it fit, up to {_MOST_DEVICES:,} devices (choose a smaller model, or"
        " fewer rows)"
    )


def _sizes(estimate: Estimate) -> str:
    device, host = estimate.hbm_bytes_per_device / GB, estimate.host_bytes_per_device / GB
    return f"{device:,.2f} GB on the device, {host:,.2f} GB on the host"


def _changes(shapes: StageShapes) -> Iterator[Change]:
    """Goes through the changes that are possible, from the smallest."""
    plan, full = shapes.plan, _with_full_remat(shapes)
    if not plan.optimizer_state:
        more = dataclasses.replace(plan, optimizer_state=True)
        yield from _planned(shapes, "OffloadPlan.optimizer_state = True", more)
    if full is not shapes and not plan.streamed:
        yield "ModelConfig.remat = 'FULL'", full
    if not plan.activations:
        more = dataclasses.replace(plan, activations=True)
        yield from _planned(shapes, "OffloadPlan.activations = True", more)
    yield from _smaller_parts(shapes)
    also = "" if full is shapes else ", ModelConfig.remat = 'FULL'"
    yield from _more_layers(full, also)
    yield from _streamed(shapes)
    yield from _more_devices(shapes)


def _planned(shapes: StageShapes, text: str, plan: OffloadPlan) -> Iterator[Change]:
    try:
        if not plan.streamed:  # its text names the update that it needs
            check_offload(plan, shapes.model, shapes.experiment.update)
        yield text, shapes.with_plan(plan)
    except ConfigError:
        return  # the model refuses, or nothing of this kind is large enough to be moved


def _with_full_remat(shapes: StageShapes) -> StageShapes:
    if shapes.model.remat is Remat.FULL:
        return shapes
    model = dataclasses.replace(shapes.model, remat=Remat.FULL)
    return dataclasses.replace(
        shapes, experiment=dataclasses.replace(shapes.experiment, model=model)
    )


def _smaller_parts(shapes: StageShapes) -> Iterator[Change]:
    microbatches = 2 * shapes.microbatches
    while microbatches <= _MOST_MICROBATCHES and not shapes.plan.streamed:
        try:
            changed = shapes.with_microbatches(microbatches)
        except ConfigError:
            return  # rows or groups do not divide any further
        yield f"Update.microbatches = {microbatches}", changed
        microbatches *= 2


def _more_layers(shapes: StageShapes, also: str) -> Iterator[Change]:
    """Goes through weights and state of more and more layers on the host."""
    unit = shapes.layout.unit
    already = shapes.plan.weights and shapes.plan.layers is None
    if shapes.plan.streamed or already:
        return
    for layers in (*range(1, unit), None) if unit == shapes.layout.depth else (None,):
        text = f"OffloadPlan.weights = ('',), optimizer_state = True, layers = {layers}{also}"
        more = dataclasses.replace(shapes.plan, weights=("",), optimizer_state=True, layers=layers)
        yield from _planned(shapes, text, more)


def _streamed(shapes: StageShapes) -> Iterator[Change]:
    text = "OffloadPlan.weights = ('',), optimizer_state = True, streamed = True"
    try:
        check_offload(OffloadPlan(streamed=True), shapes.model, shapes.experiment.update)
    except ConfigError:
        text += ", Update.clip_by = 'LAYER'"
    if shapes.microbatches > 1:
        text += ", Update.microbatches = 1"
    try:
        whole = shapes.with_microbatches(1)
    except ConfigError:
        return  # groups that divide a microbatch's rows alone
    plan = OffloadPlan(
        weights=("",), optimizer_state=True, streamed=True, min_bytes=shapes.plan.min_bytes
    )
    yield from _planned(whole, text, plan)
    text = text.replace("streamed", "activations = True, streamed")
    yield from _planned(whole, text, dataclasses.replace(plan, activations=True))


def _more_devices(shapes: StageShapes) -> Iterator[Change]:
    """Doubles the devices and the mesh axis that cuts the most weights."""
    where, rows = shapes.partitioning, shapes.experiment.rows(shapes.stage)
    data, expert, _ = where.mesh_shape(shapes.devices)
    devices = shapes.devices
    while (devices := 2 * devices) <= _MOST_DEVICES:
        factor = devices // shapes.devices
        if shapes.model.moe is None:
            wider = dataclasses.replace(
                where, data=data * factor, expert=expert, fully_sharded=True
            )
            text = f"Partitioning.data = {wider.data}, fully_sharded = True"
        else:
            wider = dataclasses.replace(where, data=data, expert=expert * factor)
            text = f"Partitioning.expert = {wider.expert}"
        stages = list(shapes.experiment.stages)
        stages[shapes.stage] = dataclasses.replace(
            stages[shapes.stage], batch_size=rows * factor, partitioning=wider
        )
        try:
            more = dataclasses.replace(shapes.experiment, stages=tuple(stages))
            changed = stage_shapes(
                more, shapes.stage, devices, patches=shapes.patches, plan=shapes.plan
            )
        except ConfigError:
            return  # experts, heads or rows do not divide any further
        yield f"{devices:,} devices with as many rows each, {text}", changed
