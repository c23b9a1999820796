"""How the pictures look: panels over a common axis of steps, stages along the top, thin lines.

Nothing here touches matplotlib's global state, so that a report may be drawn beside a notebook's
own figures and from any thread.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from m6jax.reporting.report.records import Records

INK, FAINT, GRID = "#2b2b2b", "#a8c7e6", "#e6e6e6"
TRAIN, DELINK = "#1f5fa8", "#b5361c"
OTHERS = ("#d97706", "#2a9d6f", "#9b4fa5", "#6b4f2a", "#1497a6", "#707070")

_DPI = 130
_MOST_POINTS = 1500
_MARKED_POINTS = 40
_SMOOTHED_POINTS = 200


def panels(title: str, heights: Sequence[float], width: float = 9.0) -> tuple[Figure, list[Axes]]:
    """Returns a figure with panels below each other, of these heights in inches."""
    figure = Figure(figsize=(width, sum(heights) + 0.9), dpi=_DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=list(heights))
    return figure, [tidy(axes) for axes in grid[:, 0]]


def tidy(axes: Axes) -> Axes:
    """Leaves of `axes` what carries information."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9a9a9a")
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def over_steps(axes: Axes, records: Records, *, names: bool) -> None:
    """Gives `axes` its axis of steps, with the stages and, if `names`, what they are called."""
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    steps = [record["step"] for found in records.splits.values() for record in found]
    if max(steps) - min(steps) < 10:
        axes.xaxis.set_major_locator(FixedLocator(range(min(steps), max(steps) + 1)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    margin = max((max(steps) - min(steps)) * 0.02, 0.5)
    left, right = min(steps) - margin, max(steps) + margin
    axes.set_xlim(left, right)
    starts = [left, *_boundaries(records), right]
    for index, stage in enumerate(records.stages):
        begin, end = starts[index], starts[index + 1]
        if index % 2:
            axes.axvspan(begin, end, color="#f4f1ea", zorder=0, linewidth=0)
        if names:
            axes.annotate(
                stage.name,
                ((begin + end) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9,
                fontstyle="italic",
                color="#666666",
                annotation_clip=False,
            )
    for boundary in _boundaries(records):
        axes.axvline(boundary, color=DELINK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)


def _boundaries(records: Records) -> list[float]:
    """Where one stage ends and the next begins: at the delink, or between their records."""
    delinks = [record["step"] for record in records.splits.get("delink", [])]
    found = []
    for before, after in zip(records.stages, records.stages[1:], strict=False):
        at = [step for step in delinks if before.last <= step <= after.first]
        found.append(at[0] if at else (before.last + after.first) / 2)
    return found


def curve(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    label: str | None = None,
    *,
    smooth: bool = True,
) -> None:
    """Draws a series: few points with markers, many as their running mean over a faint line.

    Where a value is not finite, there is a cross at the foot of the panel.
    """
    finite = np.isfinite(values)
    if not finite.all():
        axes.plot(
            steps[~finite],
            np.full((~finite).sum(), 0.02),
            "x",
            color=DELINK,
            transform=axes.get_xaxis_transform(),
            label="not finite" if label else None,
        )
    steps, values = thin(steps[finite], values[finite])
    marker = "o" if steps.size <= _MARKED_POINTS else ""
    if smooth and steps.size > _SMOOTHED_POINTS:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.3)
        values = running_mean(values, steps.size // 100)
    axes.plot(steps, values, marker=marker, color=color, markersize=3.5, linewidth=1.5, label=label)


def thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns means over neighbours if there are more points than a picture can show."""
    group = -(-steps.size // _MOST_POINTS)
    if group <= 1:
        return steps, values
    starts = np.arange(0, steps.size, group)
    counts = np.diff([*starts, steps.size])
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def running_mean(values: np.ndarray, reach: int) -> np.ndarray:
    """Returns the mean of each value and of up to `reach` on both sides, as many on each."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    index = np.arange(values.size)
    reach_here = np.minimum(np.minimum(index, values.size - 1 - index), reach)
    return (sums[index + reach_here + 1] - sums[index - reach_here]) / (2 * reach_here + 1)


def legend(figure: Figure, axes: Axes) -> None:
    """Says what the lines of `axes` are, beside the title, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(
            handles,
            labels,
            loc="outside upper right",
            ncols=min(len(labels), 4),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
        )
