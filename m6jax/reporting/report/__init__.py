"""Pictures of a run, drawn from MODEL_DIR/metrics.jsonl alone.

>>> write_report(model_dir)
[.../report/loss.png, .../report/optimization.png, .../report/step_time.png, .../report/index.html]

`loss` has the training loss and that of every evaluated task, `optimization` the learning rate and
the gradient's norm, `expert_load` how evenly the experts are used, `step_time` the speed. Stages
are named along the top of every picture. One without data, such as the experts of a dense model,
is left out. `index.html` has all of it and the configuration on one page that needs no other file;
`write_comparison` writes such a page of several runs.
"""

import io
from collections.abc import Callable, Mapping, Sequence

from etils import epath
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m6jax.foundation.validated import ConfigError
from m6jax.reporting.report.comparison import comparison_picture
from m6jax.reporting.report.curves import loss_picture, optimization_picture, step_time_picture
from m6jax.reporting.report.experts import expert_load_picture
from m6jax.reporting.report.page import page
from m6jax.reporting.report.records import Records
from m6jax.reporting.writers import read_records

__all__ = ["write_comparison", "write_report"]

_PICTURES: dict[str, Callable[[Records], Figure | None]] = {
    "loss": loss_picture,
    "optimization": optimization_picture,
    "expert_load": expert_load_picture,
    "step_time": step_time_picture,
}


def write_report(model_dir: epath.PathLike) -> list[epath.Path]:
    """Draws what there is data for into MODEL_DIR/report and returns the paths.

    The last is `index.html`, one page with everything.

    Args:
      model_dir: A local or a network path; if there are no records in it, there is no report.
    """
    path = epath.Path(model_dir)
    run = Records(read_records(path))
    directory = path / "report"
    contents = {f"{name}.png": content for name, content in _drawn(run).items()}
    if contents:
        pictures = {name.removesuffix(".png"): content for name, content in contents.items()}
        text = page(path.name, {path.name: run}, pictures, _configs({path.name: path}))
        contents["index.html"] = text.encode()
        directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in contents]


def write_comparison(model_dirs: Sequence[str], out: str) -> epath.Path:
    """Writes one page of several runs side by side.

    Args:
      model_dirs: of the runs.
      out: path of the page.

    Raises:
      ConfigError: a run has no records, or the page cannot be written.
    """
    paths = {name: epath.Path(name).expanduser() for name in model_dirs}
    runs = {name: Records(read_records(path)) for name, path in paths.items()}
    empty = [name for name, run in runs.items() if not run.splits]
    if empty:
        raise ConfigError(
            f"--runs {empty[0]}: there is no metrics.jsonl with records in it (name directories of"
            " runs)"
        )
    figure = comparison_picture(runs)
    pictures = {} if figure is None else {"Training loss": _png(figure)}
    pictures |= {
        f"{name}: {what}": content
        for name, run in runs.items()
        for what, content in _drawn(run).items()
    }
    text = page(", ".join(runs), runs, pictures, _configs(paths))
    path = epath.Path(out).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    return path


def _drawn(run: Records) -> dict[str, bytes]:
    """Returns the pictures of a run as PNG files, by name."""
    figures = {name: draw(run) for name, draw in _PICTURES.items()}
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def _png(figure: Figure) -> bytes:
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    return content.getvalue()


def _configs(paths: Mapping[str, epath.Path]) -> dict[str, str]:
    files = {name: path / "config.gin" for name, path in paths.items()}
    return {name: file.read_text() for name, file in files.items() if file.exists()}
