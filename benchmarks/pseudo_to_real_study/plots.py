"""The pictures of docs/pseudo_to_real.md, drawn from the results alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from m6jax.pseudo_to_real.delinking import Policy
from m6jax.reporting.report.style import INK, OTHERS, TRAIN, tidy
from pseudo_to_real_study.results import RESIDENT, STREAMED, Found, Result
from pseudo_to_real_study.variants import OWN, TRIGGERS, Variant

DPI = 80
LEARNT_FROM = (
    0.25  # share of the steps before which all curves fall alike and only stretch the axis
)
UNITS, SWITCHES = (1, 2, 4), (10, 30, 60)
# What is drawn against tokens and time: from scratch, and a Pseudo stage of each unit.
CURVES = {
    "Real from scratch": (Variant(unit=None), INK),
    "unit 1, switch at 60 %": (Variant(unit=1, switch=60), TRAIN),
    "unit 2, switch at 60 %": (Variant(unit=2, switch=60), OTHERS[0]),
}


def pictures(found: Found) -> Iterator[tuple[str, Figure]]:
    """Yields name and figure of every picture that there are results for."""
    if any(found.seeds(variant) for variant, _ in CURVES.values()):
        yield "pseudo_to_real_curves", curves(found)
    if any(grid_value(found, u, s) is not None for u in UNITS for s in SWITCHES):
        yield "pseudo_to_real_grid", grid(found)
    if found.depths:
        yield "pseudo_to_real_depths", depths(found.depths["depths"])


def save(figures: Iterator[tuple[str, Figure]], directory: Path) -> list[Path]:
    """Writes the pictures and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures:
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], metadata={"Software": None})
    return paths


def curves(found: Found) -> Figure:
    """Draws held-out loss against tokens, and against time with Real steps of three kinds."""
    times = [(RESIDENT, "all in device memory"), (STREAMED, "Real stage streamed from the host")]
    times = times if found.step_times else []
    if found.paper:
        name = next(iter(found.paper["topologies"]))
        times = [*times, (name, f"time of a step as planned for 10T on {name}")]
    figure = Figure(figsize=(9.5, 3.7 * (1 + len(times) // 2)), dpi=DPI, layout="constrained")
    panels = figure.subplots(1 + len(times) // 2, 2, squeeze=False, sharey=True).ravel()
    _draw(panels[0], found, lambda run: run.steps * run.study.tokens / 1e3)
    panels[0].set_xlabel("thousands of tokens")
    panels[0].set_title("the same tokens", fontsize=10, color=INK, loc="left")
    for axes, (real, title) in zip(panels[1:], times, strict=False):

        def elapsed(run: Result, real: str = real) -> np.ndarray:
            share = found.pseudo_step(run.variant, real)
            assert share is not None  # only measured times are drawn
            return run.real_steps(run.steps, share)

        _draw(axes, found, elapsed)
        axes.set_xlabel("time, in steps of the Real stage")
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    for axes in panels[::2]:
        axes.set_ylabel("held-out loss, nats a token")
    for axes in panels[1 + len(times) :]:
        axes.set_axis_off()
    panels[0].legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _draw(axes: Axes, found: Found, place: Callable[[Result], np.ndarray]) -> None:
    tidy(axes)
    ends = [run.final for run in found.seeds(Variant(unit=None))]
    if ends:
        axes.axhline(np.mean(ends), color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    for label, (variant, color) in CURVES.items():
        for i, run in enumerate(found.seeds(variant)):
            shown = run.steps >= LEARNT_FROM * run.steps[-1]
            x = place(run)
            axes.plot(
                x[shown],
                run.loss[shown],
                color=color,
                linewidth=1.3,
                alpha=0.85,
                label=label if i == 0 else None,
            )
            if run.switched:
                at = place_of(run, x, run.switched)
                loss = np.interp(run.switched, run.steps, run.loss)
                axes.plot(at, loss, "o", color=color, markersize=4)


def place_of(run: Result, x: np.ndarray, step: float) -> float:
    """Returns where on an axis a step of a run is, if the run's scores are at `x`."""
    return float(np.interp(step, run.steps, x))


def grid_value(found: Found, unit: int, switch: int) -> float | None:
    """Returns a final loss minus that from scratch, of seed 0; None before both were run."""
    run, scratch = found.runs.get(Variant(unit=unit, switch=switch).name), found.scratch(0)
    return run.final - scratch.final if run and scratch else None


def grid(found: Found) -> Figure:
    """Draws the final losses against Real from scratch: units by switches, then all else."""
    figure = Figure(figsize=(9.5, 4.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
    for unit, color in zip(UNITS, (TRAIN, *OTHERS), strict=False):
        values = [(s, v) for s in SWITCHES if (v := grid_value(found, unit, s)) is not None]
        if values:
            tidy(left).plot(*zip(*values, strict=True), "o-", color=color, label=f"unit {unit}")
    left.axhline(0, color=INK, linewidth=1)
    left.set_xlabel("switch, % of the steps")
    left.set_ylabel("final loss minus that from scratch, nats")
    left.set_xticks(SWITCHES)
    left.set_xlim(0, 70)
    left.legend(frameon=False, fontsize=9, labelcolor=INK)
    rows = [row for row in others(found) if row[1] is not None]
    if not rows:
        right.set_axis_off()
        return figure
    tidy(right)
    right.axvline(0, color=INK, linewidth=1)
    right.barh(range(len(rows)), [value for _, value in rows], color=TRAIN, height=0.6)
    right.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("final loss minus that from scratch, nats")
    return figure


def others(found: Found) -> list[tuple[str, float | None]]:
    """Returns what is compared besides units and switches: label and difference to scratch."""
    scratch = found.scratch(0)

    def against(label: str, variant: Variant) -> tuple[str, float | None]:
        run = found.runs.get(variant.name)
        return label, run.final - scratch.final if run and scratch else None

    policies = [
        against(
            f"{policy.name}, {'mean' if mean else 'sum'}", Variant(policy=policy.name, mean=mean)
        )
        for mean in (True, False)
        for policy in Policy
    ]
    own = [
        against(f"own {own.replace('-', ' ')}, 60 %", Variant(switch=60, own=own))
        for own in list(OWN)[1:]
    ]
    triggers = [
        against(f"{trigger} trigger", Variant(switch=80, trigger=trigger))
        for trigger in TRIGGERS[1:]
    ]
    return policies + own + triggers


def depths(rows: list[dict]) -> Figure:
    """Draws bytes and step time of both stages against depth."""
    figure = Figure(figsize=(9.5, 3.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = [row["depth"] for row in rows]
    for stage, color in (("pseudo", TRAIN), ("real", OTHERS[0])):
        of_stage = [row[stage] for row in rows]
        state = [(s["parameters"] + s["optimizer"]) / 1e6 for s in of_stage]
        whole = [(s["parameters"] + s["optimizer"] + s["temporary"]) / 1e6 for s in of_stage]
        left.plot(layers, whole, "o-", color=color, label=f"{stage}, with the step's own")
        left.plot(layers, state, "o--", color=color, markersize=3, label=f"{stage}, state")
        right.plot(layers, [s["step_seconds"] for s in of_stage], "o-", color=color, label=stage)
    for axes, what in ((left, "MB"), (right, "seconds a step")):
        tidy(axes).set_xlabel("layers")
        axes.set_ylabel(what)
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
