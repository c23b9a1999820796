"""A plan for people, as a table, and for programs, as plan.json.

>>> plan = StagePlan(analytic=estimate(experiment, 1, 256), compiled=None)
>>> print(render([plan], settings))
>>> write("/tmp/plan", [plan], settings)
'/tmp/plan/plan.json'

plan.json holds the last stage's best estimate (the compiled one where it exists) with the fields of
`Estimate` at its top, and under `stages` everything: both engines' estimates of every stage, fit,
roofline and cost.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from m6jax.experiment.summary import UNITS
from m6jax.foundation.validated import ConfigError
from m6jax.planning.cost import Cost, cost, describe_cost
from m6jax.planning.estimate import GROUPS, Estimate, Memory
from m6jax.planning.fit import GB, fit
from m6jax.planning.hardware import TABLE
from m6jax.planning.roofline import Roofline, roofline
from m6jax.planning.settings import PlanSettings

_LABEL, _CELL = 44, 16
_ABSENT = "-"
Cell = Callable[[Estimate], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What the engines say of a stage.

    Attributes:
      analytic: by the analytic engine, if it was asked.
      compiled: by the compiled engine, if it was asked and could answer.
      notes: lines to be printed after the table: advice, or why an engine could not answer.
    """

    analytic: Estimate | None = None
    compiled: Estimate | None = None
    notes: tuple[str, ...] = ()

    @property
    def estimates(self) -> list[Estimate]:
        """What there is, the analytic one first."""
        return [e for e in (self.analytic, self.compiled) if e is not None]

    @property
    def best(self) -> Estimate:
        """The compiled estimate where it exists."""
        return self.estimates[-1]

    def roofline(self, estimate: Estimate, settings: PlanSettings) -> Roofline | None:
        """Returns the times of a step; None for unknown hardware."""
        if estimate.hardware not in TABLE:
            return None
        return roofline(estimate, TABLE[estimate.hardware], settings, self.analytic)


def render(plans: Sequence[StagePlan], settings: PlanSettings) -> str:
    """Returns the report of all stages, for a person to read."""
    return "\n\n".join("\n".join(_stage(plan, settings)) for plan in plans)


def unknown_hardware() -> str:
    """Returns the line about what is left out of the reports for devices of another kind."""
    return (
        "note     unknown hardware: nothing is said of fit, time, MFU and cost (set"
        f" PlanSettings.hardware to one of {', '.join(TABLE)})"
    )


def to_json(plans: Sequence[StagePlan], settings: PlanSettings) -> dict[str, Any]:
    """Returns the document of plan.json; see the module's description."""
    stages = []
    for plan in plans:
        engines = {e.engine: _estimate_json(plan, e, settings) for e in plan.estimates}
        stages.append({"stage": plan.best.stage, "notes": list(plan.notes)} | engines)
    return _estimate_json(plans[-1], plans[-1].best, settings) | {"stages": stages}


def write(directory: str, plans: Sequence[StagePlan], settings: PlanSettings) -> str:
    """Writes `plan.json` under a directory; returns its path.

    Raises:
      ConfigError: the directory cannot be written.
    """
    path = epath.Path(directory) / "plan.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(plans, settings), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"MODEL_DIR: {directory} cannot be written ({error.strerror or error}); choose another"
            " directory"
        ) from error
    return str(path)


def _estimate_json(plan: StagePlan, estimate: Estimate, settings: PlanSettings) -> dict[str, Any]:
    document = estimate.to_json()
    times = plan.roofline(estimate, settings)
    if times is not None and estimate.hardware is not None:
        found = fit(estimate, TABLE[estimate.hardware], settings.usable_memory)
        document |= {"fit": found.to_json(), "roofline": times.to_json()}
        spent = _cost(times, estimate, settings)
        if spent is not None:
            document["cost"] = spent.to_json()
    return document


def _cost(times: Roofline, estimate: Estimate, settings: PlanSettings) -> Cost | None:
    if settings.tokens is None or not times.positions_per_second:
        return None
    return cost(settings.tokens, times.positions_per_second, estimate.devices, settings)


def _stage(plan: StagePlan, settings: PlanSettings) -> list[str]:
    best = plan.best
    mesh = " x ".join(f"{axis} {size}" for axis, size in best.mesh.items())
    kind = best.hardware or best.platform or "devices"
    lines = [
        f"plan     stage {best.stage}, {best.devices} x {kind} ({mesh}),"
        f" {best.positions_per_step:,} positions a step",
        _row("", [e.engine for e in plan.estimates]),
        *_parameters(plan.estimates),
        *_memory("device memory, GB a device", plan.estimates, lambda e: e.hbm),
        *_memory("host memory, GB a device", plan.estimates, lambda e: e.host),
        _line(
            "  of it the step's own", plan.estimates, _gb(lambda e: e.host_temp_bytes_per_device)
        ),
        *_work(plan.estimates),
    ]
    times = [plan.roofline(e, settings) for e in plan.estimates]
    return lines + _speed(plan, times, settings) + [f"note     {note}" for note in plan.notes]


def _parameters(estimates: list[Estimate]) -> list[str]:
    lines = [
        _line("parameters", estimates, lambda e: _count(e.parameters_total)),
        _line("  active a token", estimates, lambda e: _count(e.parameters_active)),
    ]
    groups = [g for g in GROUPS if any(g in e.parameters_by_group for e in estimates)]
    return lines + [_line(f"  {group}", estimates, _of_group(group)) for group in groups]


def _count(number: int) -> str:
    """Returns a number in four digits, `10.05T`."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)


def _of_group(group: str) -> Cell:
    return lambda estimate: _count(estimate.parameters_by_group.get(group, 0))


def _memory(
    label: str, estimates: list[Estimate], memory: Callable[[Estimate], Memory]
) -> list[str]:
    def part(name: str) -> Cell:
        return _gb(lambda estimate: getattr(memory(estimate), name))

    names = [field.name for field in dataclasses.fields(Memory)]
    used = [n for n in names if any(getattr(memory(e), n) for e in estimates)]
    lines = [_line(f"  {name.replace('_', ' ')}", estimates, part(name)) for name in used]
    return [_line(label, estimates, _gb(lambda e: memory(e).total)), *lines]


def _work(estimates: list[Estimate]) -> list[str]:
    lines = [
        _line("TFLOPs a step and device", estimates, lambda e: f"{e.flops_per_device / 1e12:,.2f}"),
        _line("  asked for by the model", estimates, _asked),
        _line("device traffic, GB", estimates, _gb(lambda e: e.device_traffic_bytes_per_device)),
        *(
            _line(f"  {part}", estimates, _of_part(part))
            for part in next((e.device_traffic_by_part for e in estimates), None) or ()
        ),
        _line("host traffic, GB", estimates, _gb(lambda e: e.host_traffic_bytes_per_device)),
        _line("collectives, GB", estimates, _gb(lambda e: e.collective_bytes_per_device)),
    ]
    names = sorted({collective.name for e in estimates for collective in e.collectives})
    lines += [_line(f"  {name}", estimates, _of_name(name)) for name in names]
    if any(e.compile_seconds is not None for e in estimates):
        lines.append(_line("compile, s", estimates, _compile_seconds))
    return lines


def _of_part(part: str) -> Cell:
    return _gb(lambda estimate: (estimate.device_traffic_by_part or {}).get(part))


def _of_name(name: str) -> Cell:
    return _gb(lambda estimate: sum(c.bytes for c in estimate.collectives if c.name == name))


def _asked(estimate: Estimate) -> str | None:
    flops = estimate.model_flops_per_device
    return None if flops is None else f"{flops / 1e12:,.2f}"


def _compile_seconds(estimate: Estimate) -> str | None:
    seconds = estimate.compile_seconds
    return None if seconds is None else f"{seconds:,.0f}"


def _speed(plan: StagePlan, times: list[Roofline | None], settings: PlanSettings) -> list[str]:
    best, last = plan.best, times[-1]
    if last is None or best.hardware is None:
        return []
    known = [t for t in times if t is not None]
    lines = [
        _row(f"  {name}, s", [f"{t.times[name]:,.3f}{' *' * (t.binds == name)}" for t in known])
        for name in last.times
    ]
    lines = ["time of a step if alone (* binds)", *lines]
    lines += [
        _row("positions/s at most", [f"{t.positions_per_second:,.0f}" for t in known]),
        _row("MFU", [_ABSENT if t.mfu is None else f"{t.mfu:.1%}" for t in known]),
        *fit(best, TABLE[best.hardware], settings.usable_memory).lines(),
    ]
    spent = _cost(last, best, settings)
    if spent is not None:
        lines += [f"cost     {line}" for line in describe_cost(spent, settings)]
    lines += [f"link     over {axes}: {words}" for axes, words in last.links.items()]
    assumed = (*last.assumptions, *dict.fromkeys(a for e in plan.estimates for a in e.assumptions))
    return lines + [f"assumed  {line}" for line in assumed]


def _gb(value: Callable[[Estimate], int | None]) -> Cell:
    def cell(estimate: Estimate) -> str | None:
        found = value(estimate)
        return None if found is None else f"{found / GB:,.3f}"

    return cell


def _line(label: str, estimates: list[Estimate], cell: Cell) -> str:
    return _row(label, [cell(e) for e in estimates])


def _row(label: str, cells: Sequence[str | None]) -> str:
    row = "".join(f"{_ABSENT if cell is None else cell:>{_CELL}}" for cell in cells)
    return f"{label:{_LABEL}}{row}".rstrip()
