"""Loss, optimization and speed over the steps of a run."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from m6jax.reporting.report.records import Records
from m6jax.reporting.report.style import (
    DELINK,
    OTHERS,
    TRAIN,
    curve,
    legend,
    over_steps,
    panels,
)


def loss_picture(records: Records) -> Figure | None:
    """Draws the training loss, each task's loss, and the step and the effect of the delink."""
    train = records.series("train", "loss")
    tasks = {task: records.series(f"eval/{task}", "loss") for task in records.tasks()}
    if not train[0].size and not any(steps.size for steps, _ in tasks.values()):
        return None
    figure, (axes,) = panels("Loss" + _last(train), [4.4])
    if train[0].size:
        curve(axes, *train, TRAIN, "train")
    for index, (task, (steps, values)) in enumerate(tasks.items()):
        cycle, place = divmod(index, len(OTHERS))
        axes.plot(
            steps,
            values,
            "o-" if cycle % 2 == 0 else "s--",
            color=OTHERS[place],
            markersize=4,
            linewidth=1.2,
            label=f"eval/{task}",
        )
    axes.set_ylabel("cross-entropy (nats a token)")
    over_steps(axes, records, names=True)
    for record in records.splits.get("delink", []):
        _mark_delink(axes, record)
    legend(figure, axes)
    return figure


def _last(series: tuple[np.ndarray, np.ndarray]) -> str:
    steps, values = series
    return f" {values[-1]:.3f} at step {steps[-1]:,}" if steps.size else ""


def _mark_delink(axes: Axes, record: dict) -> None:
    before, after = record.get("loss_before"), record.get("loss_after")
    effect = "" if before is None or after is None else f"\nloss {before:.3f} → {after:.3f}"
    left, right = axes.get_xlim()
    late = record["step"] > (left + 2 * right) / 3
    axes.axvline(record["step"], color=DELINK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"delink at step {record['step']:,}{effect}",
        (record["step"], 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if late else 6, 0),
        textcoords="offset points",
        fontsize=9,
        color=DELINK,
        ha="right" if late else "left",
        va="top",
    )


def optimization_picture(records: Records) -> Figure | None:
    """Draws the learning rate and the norm of the gradient."""
    shown = {
        name: records.series("train", name)
        for name in ("learning_rate", "grad_norm")
        if records.series("train", name)[0].size
    }
    if not shown:
        return None
    figure, grid = panels("Optimization", [2.4] * len(shown))
    for index, (axes, (name, series)) in enumerate(zip(grid, shown.items(), strict=True)):
        curve(axes, *series, TRAIN, smooth=name == "grad_norm")
        axes.set_ylabel({"learning_rate": "learning rate", "grad_norm": "gradient norm"}[name])
        positive = series[1][np.isfinite(series[1]) & (series[1] > 0)]
        if name == "learning_rate":
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axes.set_ylim(bottom=0)
        elif positive.size and positive.max() > 30 * positive.min():
            axes.set_yscale("log")
        over_steps(axes, records, names=index == 0)
    return figure


def step_time_picture(records: Records) -> Figure | None:
    """Draws the time of a step and tokens a second, with the median of each stage.

    The first record of a stage has the compilation in it: it is drawn as a ring and does not
    count for the range of the axis, beyond which there are triangles at the edge.
    """
    labels = {"step_seconds": "time of a step", "tokens_per_second": "tokens a second"}
    units = {"step_seconds": EngFormatter("s"), "tokens_per_second": EngFormatter(sep="")}
    shown = {
        name: records.series("train", name)
        for name in labels
        if records.series("train", name)[0].size
    }
    if not shown:
        return None
    figure, grid = panels("Speed", [2.4] * len(shown))
    for index, (axes, (name, series)) in enumerate(zip(grid, shown.items(), strict=True)):
        _draw_speed(axes, records, *series, units[name])
        axes.set_ylabel(labels[name])
        axes.yaxis.set_major_formatter(units[name])
        over_steps(axes, records, names=index == 0)
    legend(figure, grid[0])
    return figure


def _draw_speed(
    axes: Axes, records: Records, steps: np.ndarray, values: np.ndarray, unit: EngFormatter
) -> None:
    compiling = np.isin(steps, [stage.first for stage in records.stages])
    finite = np.isfinite(values)
    usual = values[~compiling & finite] if (~compiling & finite).any() else values[finite]
    top = 1.25 * np.quantile(usual, 0.98) if usual.size else 1.0
    axes.set_ylim(0, top)
    for stage in records.stages:
        of_stage = (steps >= stage.first) & (steps <= stage.last) & ~compiling
        curve(axes, steps[of_stage], values[of_stage], TRAIN)
        if (of_stage & finite).any():
            median = float(np.median(values[of_stage & finite]))
            axes.annotate(
                f"median {_rounded(unit, median)}",
                (stage.first, median),
                xytext=(6, 9),
                textcoords="offset points",
                fontsize=9,
                color=OTHERS[0],
                fontweight="bold",
            )
            axes.hlines(median, stage.first, stage.last, color=OTHERS[0], linewidth=1.2, zorder=3)
    inside = compiling & (values <= top)
    axes.plot(
        steps[inside],
        values[inside],
        "o",
        markerfacecolor="white",
        color=DELINK,
        markersize=5,
        label="with compilation" if inside.any() else None,
        zorder=4,
    )
    above = values > top
    axes.plot(
        steps[above],
        np.full(above.sum(), 0.96 * top),
        "^",
        color=DELINK,
        markersize=5,
        label="beyond the axis" if above.any() else None,
    )
    for step, value in zip(steps[above & compiling], values[above & compiling], strict=True):
        axes.annotate(
            f"{_rounded(unit, value)} with compilation",
            (step, 0.96 * top),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=DELINK,
        )


def _rounded(unit: EngFormatter, value: float) -> str:
    return EngFormatter(unit.unit, places=1, sep=unit.sep)(value)
