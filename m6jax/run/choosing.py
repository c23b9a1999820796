"""Which checkpoints of a run are meant: `--step 100 200`, `--step best`, `--step newest`."""

from collections.abc import Sequence

import numpy as np

from m6jax import processes
from m6jax.checkpointing import Checkpoints
from m6jax.data.config import ALL_SETS
from m6jax.experiment.model_dir import ModelDir
from m6jax.foundation.validated import ConfigError
from m6jax.reporting.writers import read_records

BEST, NEWEST = "best", "newest"


def choose_steps(model_dir: str, asked: Sequence[str]) -> list[int]:
    """Returns steps of checkpoints of a run, in the order in which they were asked for.

    Args:
      model_dir: of the run.
      asked: numbers, `newest`, or `best`: the checkpoint with the least held-out loss that the run
        itself has recorded (the mean over its sets).

    Raises:
      ConfigError: there is no such checkpoint, or none was evaluated.
    """
    with Checkpoints(ModelDir(model_dir).checkpoints) as checkpoints:
        there = checkpoints.steps()
        newest = checkpoints.latest()
    if newest is None:
        raise ConfigError(f"MODEL_DIR: {model_dir} holds no checkpoint (train first)")
    steps = []
    for name in asked:
        if name == BEST:
            steps.append(_best(model_dir, there))
        elif name == NEWEST:
            steps.append(newest)
        elif name.isdecimal() and int(name) in there:
            steps.append(int(name))
        else:
            raise ConfigError(
                f"--step {name}: {model_dir} has no such checkpoint (choices: {BEST}, {NEWEST},"
                f" {', '.join(map(str, there))})"
            )
    chosen = list(dict.fromkeys(steps))
    # A training beside may save meanwhile: all processes take what the first one saw.
    return list(map(int, processes.current().first(chosen)))


def _best(model_dir: str, there: Sequence[int]) -> int:
    losses: dict[int, list[float]] = {}
    for record in read_records(model_dir):
        task = record["split"].removeprefix("eval/")
        if task not in (record["split"], ALL_SETS) and record["step"] in there:
            losses.setdefault(record["step"], []).append(float(record["loss"]))
    found = {step: np.mean(values) for step, values in losses.items() if np.isfinite(values).all()}
    if not found:
        raise ConfigError(
            f"--step {BEST}: no checkpoint of {model_dir} was evaluated by the run (it has"
            f" {', '.join(map(str, there))}; name them, and --mode=eval compares them)"
        )
    return min(found, key=lambda step: found[step])
