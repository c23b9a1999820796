"""A run whose numbers become infinite stops, says where, and keeps what it had; and its replay."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from m6jax import configuration, main
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.experiment.identity import Identity
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.failures import NotFiniteError
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import Constant
from m6jax.reporting.writers import read_records
from m6jax.run.finite_guard import check_state
from m6jax.run.replay import replay

pytestmark = pytest.mark.usefixtures("quick_runs")

PLACE = "outside of the layers, in the gradient of final_norm/scale"  # of 1e30 times the table


def ruinous(text, directory, **changes):
    """Step 1 makes weights of 1e30; all steps after it are skipped, and the third stops the run."""
    settings = {
        "stages": (Stage(name="real"),),
        "schedule": Constant(peak=1e30),
        "most_skipped": 1,
        "save_every": 1,
        "sample": None,
    }
    return runs.experiment(text, directory, **(settings | changes))


def call(experiment, *arguments):
    """The exit code of the command line for an experiment."""
    config = f"{experiment.model_dir}.gin"
    with open(config, "w", encoding="utf-8") as file:
        file.write(configuration.to_gin(experiment, macros=MACROS))
    return main.main([f"--gin_file={config}", *arguments])


def written(experiment):
    """Every file of a run, and when it was written."""
    files = pathlib.Path(experiment.model_dir).rglob("*")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.fixture
def ruined(text, tmp_path, capsys):
    """The experiment, after its run, and what that said."""
    experiment = ruinous(text, tmp_path / "run")
    assert call(experiment) == 76
    return experiment, capsys.readouterr().err


def test_a_learning_rate_that_ruins_the_weights_stops_the_run(ruined, capsys):
    experiment, said = ruined
    assert "stage 'real': loss, gradient or update is not finite" in said
    assert f"first seen, going back from the loss, {PLACE}" in said
    assert "2 updates in a row were skipped and Experiment.most_skipped allows 1" in said
    records = read_records(experiment.model_dir)
    assert [r["skipped"] for r in records if r["split"] == "train"] == [0, 1, 1]
    with Checkpoints(f"{experiment.model_dir}/checkpoints") as checkpoints:
        assert checkpoints.steps() == [1, 2]
        metadata = checkpoints.metadata(2)
        state = checkpoints.restore(2, metadata)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
        # Another writer's, which is newer and not finite.
        state["opt_state"]["nu"]["final_norm"]["scale"][1] = np.nan
        rest = checkpoints.restore_data_state(2), checkpoints.description(2)
        checkpoints.save(3, jax.tree.map(jnp.asarray, state), *rest, wait=True)

    assert call(experiment, "--mode=eval") == 76
    bad = "is not finite, the first such leaf is opt_state/nu/final_norm/scale"
    assert f"checkpoint 3 of {experiment.model_dir} {bad}" in capsys.readouterr().err

    before = written(experiment)
    assert call(experiment, "--mode=replay") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("passed   checkpoint 3 ")
    assert out[1] == "replay   from step 2, which is finite"
    assert out[2].startswith("bad      step 3, stage 'real': loss ")
    assert out[2].endswith("skipped: everything")
    assert out[3] == f"backward first seen, going back from the loss, {PLACE}"
    assert out[4] == "forward  all is finite"
    assert written(experiment) == before


def test_a_replay_begins_anew_where_nothing_was_saved_and_goes_on_over_the_delink(text, tmp_path):
    experiment = runs.experiment(text, tmp_path, steps=3, stages=runs.stages(delink_step=1))
    Identity(str(tmp_path)).claim(experiment.data)
    found = replay(experiment)
    assert found.step is None
    assert found.lines == [
        "replay   from step 0, which is finite",
        "replay   all steps up to 3 are finite",
    ]


def test_a_state_that_is_not_finite_is_not_saved():
    state = {"w": jnp.array([1.0, jnp.inf])}
    with pytest.raises(NotFiniteError, match=r"^step 3: w is not finite, so nothing was saved"):
        check_state(state, "step 3")


def test_a_number_of_skips_that_cannot_be(text, tmp_path):
    with pytest.raises(ConfigError, match=r"Experiment.most_skipped: -1 is negative"):
        runs.experiment(text, tmp_path, most_skipped=-1)
