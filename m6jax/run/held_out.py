"""Held-out sets during a run: measured, written, shown, and remembered until the next step."""

from collections.abc import Callable
from typing import Any

from m6jax.experiment import Experiment, summary
from m6jax.experiment.rules import best_of
from m6jax.processes import Group
from m6jax.run.evaluation import evaluate_sets, gzip_bits_per_byte
from m6jax.run.position import Position

Metrics = dict[str, Any]


def retention(experiment: Experiment) -> dict[str, Any]:
    """Returns which checkpoints of a run are kept, as `Checkpoints` takes it."""
    before = getattr(experiment.schedule, "decay_start", None)  # a longer run goes on from there
    kept = {"keep": experiment.keep, "keep_before": before}
    if not experiment.keep_best:
        return kept
    metric = best_of(experiment.keep_best, experiment.best_metric, experiment.data)
    return kept | {
        "keep_best": experiment.keep_best,
        "best_metric": metric,
        "highest": metric.endswith("/accuracy"),
    }


class HeldOut:
    """The held-out sets of a run."""

    def __init__(
        self,
        experiment: Experiment,
        group: Group,
        write: Callable[[Position, str, Metrics], None],
        say: Callable[..., None],
    ):
        """Measures nothing yet.

        Args:
          experiment: the run.
          group: the processes.
          write: takes the position, a split and its metrics.
          say: shows a line; `result=True` for those that a quiet run shows too.
        """
        self._experiment, self._group = experiment, group
        self._write, self._say = write, say
        self._measured: tuple[tuple[int, int], dict[str, Metrics]] | None = None

    def measure(self, position: Position) -> dict[str, Metrics]:
        """Returns the metrics of every set, after writing and showing them; once at a position."""
        at = position.stage, position.step
        if self._measured is not None and self._measured[0] == at:
            return self._measured[1]
        self._group.patient()
        results = {}
        last = position.step >= self._experiment.steps
        params = position.state.served()
        for name, metrics in evaluate_sets(self._experiment, position.program, params):
            results[name] = metrics
            self._write(position, f"eval/{name}", metrics)
            self._say(summary.describe_evaluation(name, metrics), result=last)
        self._measured = at, results
        return results

    def numbers(self, position: Position) -> dict[str, float]:
        """Returns what a checkpoint is compared by, such as `books/loss`; empty if not measured."""
        if self._measured is None or self._measured[0] != (position.stage, position.step):
            return {}
        return {
            f"{name}/{key}": float(value)
            for name, metrics in self._measured[1].items()
            for key, value in metrics.items()
            if getattr(value, "ndim", 0) == 0
        }

    def compare_with_gzip(self, evaluation: dict[str, Metrics]) -> None:
        """Says how many bits a byte gzip needs for the sets that have them."""
        for name, metrics in evaluation.items():
            if "bits_per_byte" in metrics:
                gzip = gzip_bits_per_byte(self._experiment.data.held_out_text(name))
                self._say(
                    f"result   {name}: {metrics['bits_per_byte']:.3f} bits per byte on held-out"
                    f" documents; gzip -9 needs {gzip:.3f}",
                    result=True,
                )
