"""A run whose numbers become infinite stops, says where, and keeps what it had."""

import pytest
import runs

from m6jax import configuration, main
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import Constant
from m6jax.reporting.writers import read_records

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_a_learning_rate_that_ruins_the_weights_stops_the_run(text, tmp_path, capsys):
    run = runs.experiment(
        text,
        tmp_path,
        stages=(Stage(name="real"),),
        schedule=Constant(peak=1e30),
        most_skipped=1,
        save_every=100,
        sample=None,
    )
    config = tmp_path.parent / "ruin.gin"
    config.write_text(configuration.to_gin(run, macros=MACROS))
    assert main.main([f"--gin_file={config}", f"--gin.MODEL_DIR='{tmp_path}'"]) == 76
    said = capsys.readouterr().err
    assert "stage 'real': loss or gradient is not finite" in said
    place = "outside of the layers, in the gradient of final_norm/scale"  # of 1e30 times the table
    assert f"first seen, going back from the loss, {place}" in said
    assert "2 updates in a row were skipped and Experiment.most_skipped allows 1" in said
    skipped = [r["skipped"] for r in read_records(tmp_path) if r["split"] == "train"]
    assert skipped[0] == 0
    assert skipped[-2:] == [1, 1]
    assert len(skipped) < runs.STEPS
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() is None


def test_a_number_of_skips_that_cannot_be(text, tmp_path):
    with pytest.raises(ConfigError, match=r"Experiment.most_skipped: -1 is negative"):
        runs.experiment(text, tmp_path, most_skipped=-1)
