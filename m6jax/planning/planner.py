"""One plan from beginning to end: both engines, the report, plan.json.

>>> plan(experiment, PlanSettings(topology="v6e:16x16"), say=print)
False

What is wrong is found before anything is compiled, and what could be said is said all the same: the
analytic report of a model that does not fit, or of a topology that nothing here compiles for.
"""

import dataclasses
from collections.abc import Callable

import jax

from m6jax.experiment import Experiment
from m6jax.foundation.validated import ConfigError, nearest
from m6jax.planning import analytic, budget, compiled, hardware, report, topologies
from m6jax.planning.advice import smallest_change
from m6jax.planning.fit import fit
from m6jax.planning.hardware import Hardware
from m6jax.planning.report import StagePlan
from m6jax.planning.search import applied, describe_search, search
from m6jax.planning.settings import Engines, PlanSettings
from m6jax.planning.stages import stage_shapes
from m6jax.planning.topologies import MissingCompilerError, Topology

Say = Callable[[str], None]


def plan(experiment: Experiment, settings: PlanSettings, say: Say) -> bool:
    """Plans the stages of a run, and writes plan.json under its model_dir.

    Args:
      experiment: the run.
      settings: what to plan for.
      say: takes lines for a person to read.

    Returns:
      Whether all that was asked could be answered, and everything fits.

    Raises:
      ConfigError: unknown topology, stage or hardware, or a mesh that does not fit the devices.
    """
    topology = None if settings.topology is None else topologies.parse(settings.topology)
    devices = topology.num_devices if topology else settings.devices or len(jax.devices())
    experiment = with_rows(experiment, settings.rows_per_device, devices)
    experiment, tables = budget.resolve(experiment, devices, patches=settings.patches)
    plans, done = [], True
    if _hardware(topology, settings) is None:
        say(report.unknown_hardware())
    for stage in _stages(experiment, settings):
        if stage in tables:
            say(tables[stage])
        # What a better one is searched for need not be compiled.
        quick = dataclasses.replace(settings, engines=Engines.ANALYTIC)
        first = quick if settings.search else settings
        one = _plan_stage(experiment, stage, devices, topology, first, say)
        plans.append(one)
        if settings.search:
            best = _search(experiment, stage, devices, topology, settings, say)
            one = _plan_stage(best, stage, devices, topology, settings, say)
            plans.append(one)
        done &= not one.notes
    say(f"outputs  {report.write(experiment.model_dir, plans, settings)}")
    return done


def with_rows(experiment: Experiment, rows_per_device: int | None, devices: int) -> Experiment:
    """Returns the run with batches of so many rows a device; None leaves it as it is."""
    if rows_per_device is None:
        return experiment
    stages = tuple(dataclasses.replace(stage, batch_size=None) for stage in experiment.stages)
    rows = rows_per_device * devices
    return dataclasses.replace(experiment, stages=stages, batch_size=rows, eval_batch_size=None)


def _stages(experiment: Experiment, settings: PlanSettings) -> list[int]:
    """Returns the numbers of the stages to plan."""
    names = [stage.name for stage in experiment.stages]
    for name in settings.stages:
        if name not in names:
            raise ConfigError(
                f"PlanSettings.stages: the run has no stage {name!r}{nearest(name, names)}"
            )
    return [i for i, name in enumerate(names) if not settings.stages or name in settings.stages]


def _plan_stage(
    experiment: Experiment,
    stage: int,
    devices: int,
    topology: Topology | None,
    settings: PlanSettings,
    say: Say,
) -> StagePlan:
    """Plans a stage and prints its report; what could not be answered is among its notes."""
    known = _hardware(topology, settings)
    shapes = stage_shapes(experiment, stage, devices, patches=settings.patches)
    estimate = analytic.estimate_shapes(shapes, known.name if known else None)
    notes: tuple[str, ...] = ()
    if known is not None and not fit(estimate, known, settings.usable_memory).fits:
        notes = (f"it does not fit; {smallest_change(shapes, known, settings)}",)
    one = StagePlan(analytic=estimate, notes=notes)
    if settings.engines is not Engines.ANALYTIC:
        one = _with_compiled(one, experiment, stage, topology, settings)
    say(report.render([one], settings))
    return one


def _hardware(topology: Topology | None, settings: PlanSettings) -> Hardware | None:
    """Returns what is known of the devices; raises ConfigError if settings name two kinds."""
    own = hardware.find(topology.generation) if topology else None
    if settings.hardware is None:
        return own
    given = hardware.named(settings.hardware)
    if own is not None and own != given:
        raise ConfigError(
            f"PlanSettings.hardware: {given.name!r} beside topology = {settings.topology!r}, whose"
            f" chips are {own.name} (leave one of them out; PlanSettings.devices says how many"
            f" {given.name} there are)"
        )
    return given


def _search(
    experiment: Experiment,
    stage: int,
    devices: int,
    topology: Topology | None,
    settings: PlanSettings,
    say: Say,
) -> Experiment:
    """Prints the best combinations for a stage; returns the run with the best of them."""
    known = _hardware(topology, settings)
    if known is None:
        raise ConfigError(
            "PlanSettings.search: combinations are ranked by time, of which nothing is known for"
            f" these devices (set PlanSettings.hardware to one of {', '.join(hardware.TABLE)})"
        )
    found = search(experiment, stage, devices, known, settings)
    say(describe_search(found, experiment.stages[stage].name))
    return applied(experiment, stage, found.best[0])


def _with_compiled(
    one: StagePlan,
    experiment: Experiment,
    stage: int,
    topology: Topology | None,
    settings: PlanSettings,
) -> StagePlan:
    """Adds the compiled engine's answer, or a note that says why there is none."""
    assert one.analytic is not None
    if one.notes and settings.engines is Engines.BOTH:
        return one  # compiling what does not fit takes minutes, to say so again
    if topology is None and settings.devices is not None:
        missing = (
            f"not compiled: PlanSettings.devices = {settings.devices} does not say which devices"
            " (set PlanSettings.topology, or PlanSettings.engines = 'ANALYTIC')"
        )
        return dataclasses.replace(one, notes=(missing,))
    try:
        found = compiled.estimate(experiment, stage, topology, patches=settings.patches)
    except (MissingCompilerError, compiled.DoesNotFitError) as error:
        return dataclasses.replace(one, notes=(f"not compiled: {error}",))
    return dataclasses.replace(
        one,
        analytic=one.analytic if settings.engines is Engines.BOTH else None,
        compiled=dataclasses.replace(found, hardware=one.analytic.hardware),
    )
