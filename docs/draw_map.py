"""Draws docs/images/map.png: which package of m6jax imports which, read from the source.

    python docs/draw_map.py

An arrow points from a package to one that it imports. What follows from other arrows is left out:
where A imports B and B imports C, there is no arrow from A to C. The picture keeps its arrows as
text, which a test compares with the source.
"""

import ast
import json
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "map.png"

# Where each package stands from left to right, and what it decides in two or three words.
PACKAGES = {
    "foundation": (0.42, "settings, trees, mesh"),
    "processes": (0.775, "hosts that work together"),
    "layouts": (0.3, "layers in trees, offload"),
    "modeling": (0.16, "the network"),
    "optimizers": (0.4, "updates"),
    "training": (0.28, "loss, state, step"),
    "pseudo_to_real": (0.3, "delinking"),
    "decoding": (0.42, "generation"),
    "data": (0.51, "files to rows"),
    "trackers": (0.94, "W&B, MLflow"),
    "formats": (0.72, "files for other programs"),
    "configuration": (0.625, "gin files"),
    "checkpointing": (0.61, "states on disk"),
    "experiment": (0.5, "a run as a value"),
    "reporting": (0.94, "metrics, plots"),
    "planning": (0.28, "memory, time, cost"),
    "converting": (0.72, "checkpoint to checkpoint"),
    "run": (0.5, "the loop, modes"),
    "main": (0.5, "command line"),
}

Arrows = list[list[str]]


def imports() -> dict[str, set[str]]:
    """Returns what each package of m6jax imports of the other packages."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "m6jax").rglob("*.py")):
        package = path.relative_to(ROOT / "m6jax").with_suffix("").parts[0]
        own = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "m6jax":
                own |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("m6jax."):
                own.add(str(node.module).split(".")[1])
    found.pop("__init__")
    return {package: (own & found.keys()) - {package} for package, own in found.items()}


def arrows() -> Arrows:
    """Returns the pairs (package, imported package) that follow from no others, in order."""
    direct = imports()

    def reached(package: str) -> set[str]:
        return direct[package].union(*map(reached, direct[package]))

    return sorted(
        [package, other]
        for package, own in direct.items()
        for other in own
        if not any(other in reached(between) for between in own)
    )


def levels() -> list[list[str]]:
    """Returns the packages from top to bottom: each above all that it imports."""
    direct = imports()

    def height(package: str) -> int:
        return 1 + max(map(height, direct[package]), default=-1)

    heights = {package: height(package) for package in direct}
    return [
        [package for package in PACKAGES if heights[package] == h]
        for h in range(max(heights.values()), -1, -1)
    ]


def draw() -> Figure:
    """Returns the picture."""
    rows = levels()
    figure = Figure(figsize=(9, 1.05 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(rows) + 0.5, 0.5)
    boxes = {
        package: axes.text(
            PACKAGES[package][0],
            -y,
            f"{package}\n{PACKAGES[package][1]}",
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.45", "facecolor": "#eef3fa", "edgecolor": "#40648c"},
        )
        for y, row in enumerate(rows)
        for package in row
    }
    for package, other in arrows():
        axes.annotate(
            "",
            xy=boxes[other].get_position(),
            xytext=boxes[package].get_position(),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "0.5",
                "patchA": boxes[package].get_bbox_patch(),
                "patchB": boxes[other].get_bbox_patch(),
                "shrinkB": 2,
            },
        )
    return figure


def main() -> None:
    """Writes the picture."""
    FigureCanvasAgg(draw()).print_png(PICTURE, metadata={"Description": json.dumps(arrows())})
    print(PICTURE)


if __name__ == "__main__":
    main()
