"""How evenly the experts are used.

A load is given relative to an even one: 2 is an expert that gets twice its share, 0 one that gets
nothing. A few experts are drawn one by one, with their numbers where there is room; many, which
would be thinner than a line, in order of their load, the busiest on the left, so that the mean over
neighbours hides neither an idle nor a crowded one.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from m6jax.reporting.report.records import Records
from m6jax.reporting.report.style import FAINT, OTHERS, TRAIN, curve, legend, over_steps, panels

_MOST_COLUMNS = 200
_LAST_RECORDS = 5
_LEAST, _MOST = 1 / 4, 4.0
_TICKS = (1 / 4, 1 / 2, 1, 2, 4)


def expert_load_picture(records: Records) -> Figure | None:
    """Draws the load of every layer's experts in the last records, and its evenness over steps."""
    loads = [
        (step, relative(load))
        for step, load in records.arrays("train", "expert_load")
        if load.ndim == 2 and load.size
    ]
    if not loads:
        return None
    last = [load for _, load in loads[-_LAST_RECORDS:] if load.shape == loads[-1][1].shape]
    load = np.mean(last, axis=0)
    layers, experts = load.shape
    dropped = records.series("train", "fraction_dropped")
    heights = [min(0.9 + 0.16 * layers, 6.0), 2.2, *([1.8] if dropped[0].size else [])]
    of_layers = f"{layers} MoE layer{'s' if layers > 1 else ''}"
    figure, grid = panels(f"Load of {experts:,} experts in {of_layers}", heights)
    _draw_map(figure, grid[0], load)
    averaged = f"last {len(last)} records" if len(last) > 1 else "last record"
    title = f"mean of the {averaged}, until step {loads[-1][0]:,}, relative to an even load"
    grid[0].set_title(title, fontsize=10, loc="left")
    _draw_extremes(grid[1], loads)
    over_steps(grid[1], records, names=True)
    legend(figure, grid[1])
    if dropped[0].size:
        curve(grid[2], dropped[0], 100 * dropped[1], TRAIN)
        grid[2].set_ylabel("dropped choices (%)")
        grid[2].set_ylim(bottom=0)
        over_steps(grid[2], records, names=False)
    return figure


def relative(load: np.ndarray) -> np.ndarray:
    """Returns load[layers, experts] over its mean in each layer; 0 where there is none, or NaN."""
    load = np.nan_to_num(load)
    mean = load.mean(axis=1, keepdims=True)
    return np.divide(load, mean, out=np.zeros_like(load), where=mean > 0)


def columns(load: np.ndarray) -> np.ndarray:
    """Returns load[layers, columns] as it is drawn: see the head of this file."""
    experts = load.shape[1]
    if experts <= _MOST_COLUMNS:
        return load
    ordered = -np.sort(-load, axis=1)
    edges = np.linspace(0, experts, _MOST_COLUMNS + 1).astype(int)
    return np.add.reduceat(ordered, edges[:-1], axis=1) / np.diff(edges)


def _draw_map(figure: Figure, axes: Axes, load: np.ndarray) -> None:
    layers, experts = load.shape
    drawn = columns(load)
    image = axes.imshow(
        np.clip(drawn, _LEAST, _MOST),
        aspect="auto",
        interpolation="nearest",
        cmap="RdBu_r",
        norm=LogNorm(_LEAST, _MOST),
        extent=(0.5, experts + 0.5, layers + 0.5, 0.5),
    )
    axes.grid(False)
    axes.yaxis.set_major_locator(FixedLocator(range(1, layers + 1, -(-layers // 12))))
    if experts <= 16:
        axes.xaxis.set_major_locator(FixedLocator(range(1, experts + 1)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("MoE layer")
    ordered = experts > _MOST_COLUMNS
    axes.set_xlabel("experts of the layer, the busiest first" if ordered else "expert")
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=max(8, 3 * layers**0.5))
    bar.ax.yaxis.set_major_locator(FixedLocator(_TICKS if layers > 2 else _TICKS[::2]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_share))
    bar.outline.set_visible(False)
    if experts <= 16 and layers <= 24:
        for (row, column), value in np.ndenumerate(load):
            axes.text(
                column + 1,
                row + 1,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if not 0.4 < value < 2.5 else "#2b2b2b",
            )


def _share(value: float, _: object = None) -> str:
    text = f"1/{1 / value:.0f}" if value < 1 else f"{value:.0f}"
    edge = {_LEAST: "≤ ", _MOST: "≥ "}.get(value, "")
    return f"{edge}{text}×"


def _draw_extremes(axes: Axes, loads: list[tuple[int, np.ndarray]]) -> None:
    steps = np.array([step for step, _ in loads])
    busiest = [load.max(axis=1) for _, load in loads]
    middle = np.array([np.median(each) for each in busiest])
    least = np.array([each.min() for each in busiest])
    most = np.array([each.max() for each in busiest])
    if loads[-1][1].shape[0] > 1:
        axes.fill_between(
            steps, least, most, color=FAINT, alpha=0.5, linewidth=0, label="range over layers"
        )
    curve(axes, steps, middle, TRAIN, "busiest expert of the median layer")
    idle = np.array([(load < 0.1).mean() for _, load in loads])
    axes.set_ylabel("load (× even)")
    if most.max() > 8:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(bottom=1)
    else:
        axes.set_ylim(bottom=0)
    beside = axes.twinx()
    beside.plot(steps, 100 * idle, color=OTHERS[0], linewidth=1.2, linestyle="--")
    beside.spines["right"].set_color(OTHERS[0])
    beside.set_ylim(0, max(5.0, 110 * idle.max()))
    beside.set_ylabel("experts below 1/10 of even (%)", color=OTHERS[0], fontsize=9)
    beside.tick_params(colors=OTHERS[0], labelsize=9, length=3)
    for side in ("top", "left", "bottom"):
        beside.spines[side].set_visible(False)
