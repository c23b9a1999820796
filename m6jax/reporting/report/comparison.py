"""Several runs in one picture: loss over tokens, steps and time."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from m6jax.reporting.report.records import Records
from m6jax.reporting.report.style import DELINK, OTHERS, TRAIN, curve, legend, panels

COLORS = (TRAIN, *OTHERS)
_AXES = {"tokens": "tokens trained on", "step": "steps", "hours": "hours of training"}


def progress(run: Records) -> dict[str, np.ndarray]:
    """Returns how far a run was at each of its training records.

    Returns:
      `step`, `tokens` and `hours`, as float64 of one length. Between records a step takes the time,
      and has the tokens, of the record that follows; time in which nothing was trained (between two
      starts) does not count.
    """
    records = run.splits.get("train", [])
    steps = np.array([record["step"] for record in records], np.float64)
    seconds = np.array([record.get("step_seconds") or np.nan for record in records], np.float64)
    rates = np.array([record.get("tokens_per_second") or np.nan for record in records], np.float64)
    made = np.diff(steps, prepend=0.0)
    return {
        "step": steps,
        "tokens": np.cumsum(np.nan_to_num(made * seconds * rates)),
        "hours": np.cumsum(np.nan_to_num(made * seconds)) / 3600,
    }


def comparison_picture(runs: Mapping[str, Records]) -> Figure | None:
    """Draws the training loss (or, without any, nothing) of runs over tokens, steps and time."""
    drawn = {name: run for name, run in runs.items() if run.splits.get("train")}
    if not drawn:
        return None
    figure, grid = panels("Training loss", [3.2] * len(_AXES))
    for axes, (quantity, label) in zip(grid, _AXES.items(), strict=True):
        for number, (name, run) in enumerate(drawn.items()):
            losses = np.array([r.get("loss") for r in run.splits["train"]], np.float64)
            color = COLORS[number % len(COLORS)]
            places = progress(run)[quantity]
            curve(axes, places, losses, color, name if axes is grid[0] else None)
            for record in run.splits.get("delink", []):
                at = np.interp(record["step"], progress(run)["step"], places)
                loss = np.interp(at, places, losses)
                axes.plot([at], [loss], "D", color=color, markeredgecolor=DELINK, markersize=6)
        axes.set_xlabel(label)
        axes.set_ylabel("cross-entropy (nats a token)")
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if quantity != "hours" else "{x:g}")
    if any(run.splits.get("delink") for run in drawn.values()):
        grid[0].plot([], [], "D", color="white", markeredgecolor=DELINK, label="delink")
    legend(figure, grid[0])
    return figure
