"""Pictures of a run, drawn from MODEL_DIR/metrics.jsonl alone.

>>> write_report(model_dir)
[.../report/loss.png, .../report/optimization.png, .../report/step_time.png]

`loss` has the training loss and that of every evaluated task, `optimization` the learning rate and
the gradient's norm, `expert_load` how evenly the experts are used, `step_time` the speed. Stages
are named along the top of every picture. One without data, such as the experts of a dense model,
is left out.
"""

import io
from collections.abc import Callable

from etils import epath
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m6jax.reporting.report.curves import loss_picture, optimization_picture, step_time_picture
from m6jax.reporting.report.experts import expert_load_picture
from m6jax.reporting.report.records import Records
from m6jax.reporting.writers import read_records

__all__ = ["write_report"]

_PICTURES: dict[str, Callable[[Records], Figure | None]] = {
    "loss": loss_picture,
    "optimization": optimization_picture,
    "expert_load": expert_load_picture,
    "step_time": step_time_picture,
}


def write_report(model_dir: epath.PathLike) -> list[epath.Path]:
    """Draws what there is data for into MODEL_DIR/report and returns the pictures' paths.

    Args:
      model_dir: A local or a network path; if there are no records in it, there are no pictures.
    """
    records = Records(read_records(model_dir))
    directory = epath.Path(model_dir) / "report"
    paths = []
    for name, draw in _PICTURES.items():
        figure = draw(records)
        if figure is None:
            continue
        content = io.BytesIO()
        FigureCanvasAgg(figure).print_png(content)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.png"
        path.write_bytes(content.getvalue())
        paths.append(path)
    return paths
