"""The best checkpoints by a held-out metric are kept beside the newest."""

import pytest
import runs

from m6jax.checkpointing import Checkpoints
from m6jax.data.config import HeldOutFiles, TextData, TextFiles
from m6jax.experiment import Stage
from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import WarmupStableDecay
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.run.held_out import retention


@pytest.mark.usefixtures("quick_runs")
def test_a_run_keeps_its_best_and_its_newest_checkpoint(text, tmp_path):
    """The learning rate grows until the loss does too, so that the last one is not the best."""
    experiment = runs.experiment(
        text,
        tmp_path,
        stages=(Stage(name="pseudo", unit=1),),
        steps=4,
        schedule=WarmupStableDecay(peak=4.0, total_steps=4, warmup_steps=3),
        save_every=1,
        keep=1,
        keep_best=1,
        sample=None,
    )
    result = train.run(experiment)

    records = [r for r in read_records(tmp_path) if r["split"] == "eval/text"]
    losses = {record["step"]: record["loss"] for record in records}
    assert list(losses) == [1, 2, 3, 4]
    best = min(losses, key=losses.get)
    assert best != 4
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [best, 4]
    assert float(result.evaluation["text"]["loss"]) == losses[4]


def several():
    return TextData(
        sources=(TextFiles(train="a.txt", name="a"),),
        held_out=(HeldOutFiles(files="b.txt", name="b"),),
        length=16,
    )


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (several(), {"keep_best": -1}, "Experiment.keep_best: -1 is negative"),
        (
            TextData(sources=(TextFiles(train="a.txt", hold_out_every=0),), length=16),
            {"keep_best": 1},
            "Experiment.keep_best: 1 checkpoints cannot be kept for a held-out metric: nothing is",
        ),
        (
            several(),
            {"keep_best": 1, "best_metric": "c/loss"},
            "Experiment.best_metric: 'c' is no held-out set",
        ),
        (
            several(),
            {"keep_best": 1, "best_metric": "a/mean_loss"},
            "Experiment.best_metric: 'mean_loss' of 'a' does not say which checkpoint is the best",
        ),
    ],
)
def test_what_cannot_be_kept(tmp_path, data, settings, message):
    with pytest.raises(ConfigError, match=message):
        runs.experiment(tmp_path / "text.txt", tmp_path, data=data, **settings)


@pytest.mark.parametrize(
    ("metric", "name", "highest"),
    [
        ("loss", "all/loss", False),
        ("mean_loss", "all/mean_loss", False),
        ("accuracy", "all/accuracy", True),
        ("b/accuracy", "b/accuracy", True),
    ],
)
def test_which_metric_of_several_sets(tmp_path, metric, name, highest):
    experiment = runs.experiment(
        tmp_path / "text.txt", tmp_path, data=several(), keep_best=2, best_metric=metric
    )
    kept = {"keep": 3, "keep_best": 2, "best_metric": name, "highest": highest}
    assert retention(experiment) == kept | {"keep_before": 7}  # where the decay begins
