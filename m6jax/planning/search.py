"""Which mesh, unit, offload plan and microbatches would be fastest among those that fit.

>>> found = search(experiment, stage=1, devices=256, hardware=find("v6e"), settings=settings)
>>> print(describe_search(found, "real"))
search   1,184 tried, 96 fit; the best by predicted time:
         step s  binds     device GB  host GB  mesh (data x expert x model)  ...

Every combination is estimated by the analytic engine; those that fit are ranked by the roofline's
step time (all steps have the same positions), then by the sum of its times, then by memory. How
many layers are distinct is what the model is, not a matter of speed: the best of the stage's own
unit come first, then the best with one layer and with all layers distinct, to compare. The compiled
engine then confirms the best.
"""

import dataclasses
from collections.abc import Sequence

from m6jax.experiment import Experiment
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate_shapes
from m6jax.planning.combinations import combinations
from m6jax.planning.estimate import Estimate
from m6jax.planning.fit import GB, Fit, fit
from m6jax.planning.hardware import Hardware
from m6jax.planning.roofline import Roofline, roofline
from m6jax.planning.settings import PlanSettings
from m6jax.planning.stages import StageShapes


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One combination that fits, and what is predicted of it."""

    shapes: StageShapes
    unit: int
    estimate: Estimate
    fit: Fit
    times: Roofline

    @property
    def rank(self) -> tuple[float, float, int]:
        """What candidates are ordered by; the smallest is the best."""
        seconds = self.times.step_seconds, sum(self.times.times.values())
        return *seconds, self.estimate.hbm_bytes_per_device


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      best: those of the stage's own unit, the best first, then the best of every other unit.
      fitting: how many fit.
      tried: how many were tried.
    """

    best: tuple[Candidate, ...]
    fitting: int
    tried: int


def search(
    experiment: Experiment, stage: int, devices: int, hardware: Hardware, settings: PlanSettings
) -> Found:
    """Tries combinations for a stage.

    Args:
      experiment: the run; its rows, model and optimizer stay.
      stage: number of the stage.
      devices: number of devices.
      hardware: of every device.
      settings: efficiencies, usable memory, microbatches to try, how many to return.

    Raises:
      ConfigError: nothing fits; says what is over by least.
    """
    tried, fitting, closest = 0, [], None
    for shapes, unit in combinations(experiment, stage, devices, hardware, settings):
        tried += 1
        estimate = estimate_shapes(shapes, hardware.name)
        room = fit(estimate, hardware, settings.usable_memory)
        if room.fits:
            times = roofline(estimate, hardware, settings)
            fitting.append(Candidate(shapes, unit, estimate, room, times))
        elif closest is None or _over(room) < _over(closest):
            closest = room
    if not fitting:
        raise _nothing_fits(devices, hardware, tried, closest)
    fitting.sort(key=lambda candidate: candidate.rank)
    own = experiment.stages[stage].unit or experiment.model.num_layers
    best = [c for c in fitting if c.unit == own][: settings.search_results]
    others = {c.unit: c for c in reversed(fitting) if c.unit != own}  # the best of each
    return Found((*best, *others.values()), len(fitting), tried)


def _over(room: Fit) -> int:
    return room.hbm_over + room.host_over


def _nothing_fits(devices: int, hardware: Hardware, tried: int, closest: Fit | None) -> ConfigError:
    if closest is None:
        return ConfigError(
            f"PlanSettings.search: no mesh of {devices} devices divides the rows, experts and heads"
            " of the run (choose another number of devices, or other rows)"
        )
    over = "; ".join(line.removeprefix("over").strip() for line in closest.lines())
    return ConfigError(
        f"PlanSettings.search: none of {tried} combinations fits {devices} x {hardware.name}; the"
        f" closest needs {over} (choose more devices, or fewer rows)"
    )


def applied(experiment: Experiment, stage: int, candidate: Candidate) -> Experiment:
    """Returns the run with a candidate in the place of a stage's settings; it may be compiled.

    Args:
      experiment: the run.
      stage: number of the stage.
      candidate: from `search` for this stage.

    Raises:
      ConfigError: other stages do not fit the candidate's unit or microbatches.
    """
    shapes = candidate.shapes
    stages = list(experiment.stages)
    own = shapes.experiment.stages[0]
    stages[stage] = dataclasses.replace(
        stages[stage],
        partitioning=shapes.partitioning,
        unit=own.unit,
        form=own.form,
        offload=shapes.plan,
    )
    update = dataclasses.replace(experiment.update, microbatches=shapes.microbatches)
    return dataclasses.replace(experiment, stages=tuple(stages), update=update)


def describe_search(found: Found, stage: str) -> str:
    """Returns what was found and the gin bindings of the best, for a person to read."""
    lines = [
        f"search   {found.tried:,} tried, {found.fitting:,} fit; the best by predicted time:",
        f"{'':9}{'step s':>8}  {'binds':14}{'device GB':>9}{'host GB':>9}  mesh, and the rest",
    ]
    for candidate in found.best:
        times, estimate = candidate.times, candidate.estimate
        mesh = " x ".join(f"{axis} {size}" for axis, size in estimate.mesh.items())
        lines.append(
            f"{'':9}{times.step_seconds:>8.3f}  {times.binds:14}"
            f"{estimate.hbm_bytes_per_device / GB:>9.2f}{estimate.host_bytes_per_device / GB:>9.2f}"
            f"  {mesh}; {_rest(candidate)}"
        )
    return "\n".join([*lines, "best     " + "\n         ".join(bindings(found.best[0], stage))])


def _rest(candidate: Candidate) -> str:
    shapes, plan = candidate.shapes, candidate.shapes.plan
    words = [f"unit {candidate.unit}", f"microbatches {shapes.microbatches}"]
    words += ["fully sharded"] if shapes.partitioning.fully_sharded else []
    names = {"weights": plan.weights, "optimizer": plan.optimizer_state}
    offloaded = [name for name, is_there in names.items() if is_there]
    offloaded += ["activations"] if plan.activations else []
    which = "" if plan.layers is None else f" of the last {plan.layers} layers"
    words += [f"on the host: {' and '.join(offloaded)}{which}"] if offloaded else []
    return ", ".join([*words, "streamed"] if plan.streamed else words)


def bindings(candidate: Candidate, stage: str) -> Sequence[str]:
    """Returns the lines of gin that make a run of a candidate.

    Args:
      candidate: from `search`.
      stage: name of the stage, which is its scope in the files under configs.
    """
    shapes, plan = candidate.shapes, candidate.shapes.plan
    where = shapes.partitioning
    lines = [
        f"partitioning.Partitioning.{field} = {getattr(where, field)}"
        for field in ("data", "expert", "model", "fully_sharded")
    ]
    lines.append(f"training.Update.microbatches = {shapes.microbatches}")
    lines.append(f"{stage}/experiment.Stage.unit = {candidate.unit}")
    if plan == OffloadPlan():
        return [*lines, f"{stage}/experiment.Stage.offload = None"]
    lines.append(f"{stage}/experiment.Stage.offload = @{stage}/layouts.OffloadPlan()")
    return lines + [
        f"{stage}/layouts.OffloadPlan.{field.name} = {getattr(plan, field.name)!r}"
        for field in dataclasses.fields(plan)
        if getattr(plan, field.name) != field.default
    ]
