"""A longer run goes on from before the decay, and becomes what it had been if always so long."""

import shutil

import jax
import numpy as np
import pytest
import runs

from m6jax import configuration
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import Cosine, WarmupStableDecay
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.run.extending import step_to_go_on_from

pytestmark = pytest.mark.usefixtures("quick_runs")

LONGER = runs.STEPS + 4


def experiment(text, directory, total, **changes):
    """A run whose last quarter decays; its first update there still has the peak."""
    schedule = WarmupStableDecay(peak=1e-2, total_steps=total, warmup_steps=1, decay_fraction=0.25)
    settings = {"steps": total, "stages": (Stage(name="real"),), "sample": None}
    return runs.experiment(text, directory, schedule=schedule, **(settings | changes))


@pytest.fixture(scope="module")
def short(text, tmp_path_factory):
    """A finished run of 8 steps, whose decay begins after 6."""
    directory = tmp_path_factory.mktemp("short")
    train.run(experiment(text, directory, runs.STEPS, keep=1, save_every=2))
    return directory


@pytest.fixture
def again(short, tmp_path):
    shutil.copytree(short, tmp_path / "again")
    return tmp_path / "again"


def steps(directory):
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.steps()


def test_the_last_checkpoint_before_the_decay_is_kept(short):
    assert steps(short) == [6, 8]


def test_a_longer_run_equals_one_that_was_as_long_from_the_start(text, again, tmp_path, capsys):
    changes = {"keep": 2, "save_every": 100}
    assert train.run(experiment(text, again, LONGER, **changes)).finished
    said = capsys.readouterr().out
    assert "2 of 8 steps are made again; later checkpoints are replaced" in said
    assert steps(again) == [6, LONGER]  # 8 was of a future that the run has left
    straight = tmp_path / "straight"
    train.run(experiment(text, straight, LONGER, **changes))
    states = []
    for directory in (again, straight):
        with Checkpoints(directory / "checkpoints") as checkpoints:
            states.append(checkpoints.restore(LONGER, checkpoints.metadata(LONGER)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    losses, expected = (
        {r["step"]: r["loss"] for r in read_records(d) if r["split"] == "train"}
        for d in (again, straight)
    )
    assert losses == expected


def test_a_run_without_a_checkpoint_before_the_decay_is_refused(text, again):
    shutil.rmtree(again / "checkpoints" / "6")
    before = {p: p.read_bytes() for p in again.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError) as error:
        train.run(experiment(text, again, LONGER))
    message = str(error.value)
    assert "WarmupStableDecay.total_steps: with 8 the run in" in message
    assert "had other learning rates from step 7 on than with 12" in message
    assert "and it holds no checkpoint from before (its steps: 8)" in message
    assert "Leave it at 8" in message
    assert {p: p.read_bytes() for p in again.rglob("*") if p.is_file()} == before


class Described:
    """Checkpoints of which only the descriptions are asked for."""

    def __init__(self, text, of):
        self._text, self._of = text, of

    def steps(self):
        return sorted(self._of)

    def description(self, step):
        return {"config": self._text.replace("total_steps = 8", f"total_steps = {self._of[step]}")}


@pytest.mark.parametrize(
    ("of", "total", "expected"),
    [
        ({6: 8, 7: 8, 8: 8}, 8, 8),
        ({6: 8, 7: 8, 8: 8}, 12, 7),
        ({6: 8, 9: 12, 12: 12}, 20, 9),
        ({6: 20, 9: 20, 12: 20}, 8, 6),  # a decay that begins earlier
        ({6: 12, 8: 8}, 12, 6),
    ],
)
def test_from_where_a_run_of_another_length_goes_on(text, tmp_path, of, total, expected):
    then = configuration.to_gin(experiment(text, tmp_path, 8), macros=MACROS)
    now = experiment(text, tmp_path, total, steps=8)
    assert step_to_go_on_from(now, Described(then, of), max(of)) == expected


def test_a_schedule_that_is_never_stable_cannot_be_extended(text, tmp_path):
    def falling(total):
        return runs.experiment(text, tmp_path, schedule=Cosine(peak=1e-2, total_steps=total))

    then = configuration.to_gin(falling(8), macros=MACROS)
    with pytest.raises(ConfigError, match=r"Cosine.total_steps: with 8 .* from step 1 on"):
        step_to_go_on_from(falling(9), Described(then, {4: 8, 8: 8}), 8)


def test_a_schedule_that_ends_before_the_run(text, tmp_path):
    schedule = Cosine(peak=1e-2, total_steps=6)
    message = r"Experiment.steps: 8 steps, but the learning rate ends at Cosine.total_steps = 6"
    with pytest.raises(ConfigError, match=message):
        runs.experiment(text, tmp_path, schedule=schedule)
