"""B17: a directory that another run writes is left alone."""

import threading
import time

import pytest
import runs

from m6jax.checkpointing import CheckpointError
from m6jax.experiment import lock
from m6jax.experiment.lock import Lock
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import Constant
from m6jax.run import train

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_training_where_another_run_writes_is_refused(text, tmp_path):
    with Lock(tmp_path):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=rf"MODEL_DIR: {tmp_path} is used by process \d+ on"):
            train.run(runs.experiment(text, tmp_path))
        assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_loses_its_directory_ends(text, tmp_path, monkeypatch):
    """As if a newcomer elsewhere took it for gone, since it was stopped for long."""
    quick = lock.Times(beat=0.02)
    monkeypatch.setattr(lock, "Times", lambda: quick)

    def take_over():
        while not list(tmp_path.glob("checkpoints/*/description/metadata")):
            time.sleep(0.01)
        (tmp_path / "lock.json").unlink()

    thread = threading.Thread(target=take_over)
    thread.start()
    long = runs.experiment(
        text, tmp_path, steps=100_000, stages=runs.stages()[1:], schedule=Constant(peak=1e-3)
    )
    with pytest.raises(CheckpointError, match=r"lock.json was removed; nothing more is written"):
        train.run(long)
    thread.join()
