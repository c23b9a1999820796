"""What the benchmarks of killed and of several processes count, without starting any."""

import pathlib
import random
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from m6jax import configuration
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Experiment
from m6jax.reporting.writers import MetricWriter

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import kill
import local_runs
import several_processes


def record(step, **values):
    return {"step": step, "stage": "s", "split": "train", "loss": 2.0 / step, **values}


def write(runs, name, steps, position=0, **values):
    directory = runs.directory(name)
    with MetricWriter(directory) as writer:
        for step in range(1, steps + 1):
            writer.write(record(step, **values))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(3, {"params": {"w": jnp.ones(2)}}, {"position": position}, {}, wait=True)


@pytest.fixture
def runs(tmp_path):
    return local_runs.Runs(tmp_path, steps=6, delink=3, save_every=2)


def test_the_configuration_loads(runs, tmp_path):
    places = {"text": tmp_path / "text.txt", "model_dir": "d"}
    config = tmp_path / "config.gin"
    text = local_runs.GIN.format(steps=6, delink=3, save_every=2, **places)
    config.write_text(text, encoding="utf-8")
    experiment = configuration.load([config], root=Experiment).value
    assert [experiment.layout(i).unit for i in (0, 1)] == [1, 2]
    assert experiment.end_of(0).at_most == 3


def test_values_that_differ_are_counted_by_bits():
    one = {"a": np.array([0.0, np.nan, 1.0], np.float32), "b": np.arange(3)}
    assert local_runs.different_bits(one, {name: value.copy() for name, value in one.items()}) == 0
    assert local_runs.different_bits(one, one | {"a": np.array([-0.0, np.nan, 2.0], "f4")}) == 2
    with pytest.raises(ValueError, match=r"other leaves: \['b'\]"):
        local_runs.different_bits(one, {"a": one["a"]})


def test_records_are_compared_without_what_the_clock_says():
    one, other = record(1, step_seconds=1.0), record(1, step_seconds=2.0)
    assert local_runs.recorded([one]) == local_runs.recorded([other])
    assert local_runs.recorded([one]) != local_runs.recorded([record(1, loss=3.0)])


def test_steps_lost_are_those_after_the_newest_checkpoint(runs):
    write(runs, "run", steps=5)
    (runs.directory("run") / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()
    count = kill.Count()
    kill.lost(runs, "run", count)
    assert count.steps_lost == 2


def test_losses_and_data_are_compared(runs):
    write(runs, "one", 5)
    write(runs, "same", 5)
    write(runs, "other", 5, position=1, loss=7.0)
    write(runs, "short", 4)
    assert several_processes.compare(runs, "same", "one") == (0.0, True)
    worst, same = several_processes.compare(runs, "other", "one")
    assert (worst, same) == (pytest.approx((7 - 0.4) / 0.4), False)
    with pytest.raises(RuntimeError, match="short has other records"):
        several_processes.compare(runs, "short", "one")


def test_children_are_found_and_killed():
    with subprocess.Popen(["bash", "-c", "sleep 60 & wait"]) as launcher:
        while not (there := local_runs.children(launcher)):
            pass
        assert [local_runs.kill(process) for process in there] == [True]
    assert local_runs.children(launcher) == []
    assert not local_runs.kill(there[0])


def test_a_run_that_ends_is_not_killed(runs, monkeypatch):
    ended = subprocess.Popen(["true"])
    monkeypatch.setattr(runs, "start", lambda name, processes: ended)
    monkeypatch.setattr(kill.time, "sleep", lambda seconds: ended.wait())
    assert not kill.kill_once(runs, "run", 1, random.Random(0))
