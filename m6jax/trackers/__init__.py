"""Metrics to services that keep runs of many people: one line in a gin file, off by default.

    from m6jax import trackers
    experiment.Experiment.trackers = (@trackers.WandB(),)
    trackers.WandB.project = 'giants'

Nothing leaves the machine without such a line. A service that fails costs no run: a warning says so
once, and the run goes on with `metrics.jsonl` and TensorBoard.
"""

from m6jax.trackers.services import MLflow, WandB
from m6jax.trackers.tracking import Tracked, start

__all__ = ["MLflow", "Tracked", "WandB", "start"]
