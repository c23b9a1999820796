"""Whole runs: both stages in one call, interruption and resumption, directories of other runs."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest
import runs

from m6jax import configuration, main
from m6jax.checkpointing import Checkpoints
from m6jax.experiment.lock import Lock
from m6jax.experiment.model_dir import MACROS, ModelDir
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout
from m6jax.processes import Group
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.run.preemption import Preemption

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run without interruption: its directory and result."""
    directory = tmp_path_factory.mktemp("straight")
    return directory, train.run(runs.experiment(text, directory))


def losses(directory):
    return {r["step"]: r["loss"] for r in read_records(directory) if r["split"] == "train"}


def assert_each_record_once(directory):
    keys = [(r["step"], r["stage"], r["split"]) for r in read_records(directory)]
    assert len(keys) == len(set(keys))


def final_state(directory, step):
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.restore(step, checkpoints.metadata(step))


def test_a_run_goes_through_both_stages(straight):
    directory, result = straight
    assert result.finished
    assert result.step == runs.STEPS
    records = read_records(directory)
    train_records = [r for r in records if r["split"] == "train"]
    assert [r["step"] for r in train_records] == list(range(1, runs.STEPS + 1))
    assert [r["stage"] for r in train_records] == ["pseudo"] * 4 + ["real"] * 4
    assert {
        "loss",
        "total_loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "step_seconds",
        "fraction_dropped",
        "load_balance_loss",
        "expert_load",
    } <= train_records[0].keys()
    assert train_records[-1]["loss"] < train_records[0]["loss"]


def test_the_page_of_metrics_names_them_all(straight):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for record in read_records(straight[0]):
        if record["split"] == "train" or record["split"].startswith("eval/"):
            for name in record.keys() - {"step", "stage", "split", "nonfinite"}:
                assert f"`{name.removesuffix('_by_layer')}`" in page, name


def test_tokens_a_second_are_real_tokens(straight):
    train_records = [r for r in read_records(straight[0]) if r["split"] == "train"]
    for record in train_records:
        assert 64 < record["real_tokens"] <= 8 * 16  # some rows are not full
        rate = record["real_tokens"] / record["step_seconds"]
        assert record["tokens_per_second"] == pytest.approx(rate, rel=1e-6)


def test_the_loss_is_the_same_before_and_after_the_delink(straight):
    (record,) = [r for r in read_records(straight[0]) if r["split"] == "delink"]
    assert record["step"] == runs.DELINK_STEP
    np.testing.assert_allclose(record["loss_before"], record["loss_after"], rtol=1e-6)


def test_a_run_leaves_its_outputs(straight):
    directory, result = straight
    assert (directory / "config.gin").exists()
    assert any((directory / "tensorboard").iterdir())
    assert {"loss.png", "expert_load.png", "step_time.png"} <= {
        path.name for path in (directory / "report").iterdir()
    }
    assert result.evaluation["text"]["bits_per_byte"] > 0
    assert result.samples[0].startswith("the whale")
    with Checkpoints(directory / "checkpoints") as checkpoints:
        assert checkpoints.latest() == runs.STEPS
        description = checkpoints.description(runs.STEPS)
    assert description["stage_name"] == "real"
    assert Layout.from_json(description["layout"]) == Layout(depth=2, unit=2, form=Form.UNROLLED)


def ask_to_stop_after(step, monkeypatch):
    """Sends SIGTERM while `step` is made."""
    reached = Group.reached

    def signalled(group, now):
        reason = reached(group, now)
        if now == step - 1:
            signal.raise_signal(signal.SIGTERM)
        return reason

    monkeypatch.setattr(Group, "reached", signalled)


@pytest.mark.parametrize("stops", [(2, 6)])
def test_an_interrupted_run_equals_a_straight_one(text, straight, tmp_path, stops, monkeypatch):
    """B10 on one process: stopped in each stage, across the delink, losses and state bit-equal."""
    for step in stops:
        ask_to_stop_after(step, monkeypatch)
        result = train.run(runs.experiment(text, tmp_path))
        assert not result.finished
        assert result.step == step
    monkeypatch.undo()
    assert train.run(runs.experiment(text, tmp_path)).finished
    assert losses(tmp_path) == losses(straight[0])
    assert_each_record_once(tmp_path)
    ours, theirs = final_state(tmp_path, runs.STEPS), final_state(straight[0], runs.STEPS)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_finished_run_is_not_trained_again(text, straight, capsys):
    """B23: its metrics stay as they are, to the byte."""
    before = (straight[0] / "metrics.jsonl").read_bytes()
    assert train.run(runs.experiment(text, straight[0])).finished
    assert (straight[0] / "metrics.jsonl").read_bytes() == before
    said = capsys.readouterr().out
    assert f"nothing left to train: Experiment.steps = {runs.STEPS}" in said
    assert "stage    real: steps 4 to 8," in said
    assert "stage    pseudo" not in said


def test_a_run_that_stands_behind_its_end_shows_no_stage(text, straight, capsys):
    fewer = runs.experiment(text, straight[0], steps=6)
    lock = ModelDir(str(straight[0])).lock()
    with lock as held, train.open_trainer(fewer, held) as trainer:
        assert trainer.start().step == runs.STEPS
    said = capsys.readouterr().out
    assert "nothing left to train: Experiment.steps = 6" in said
    assert "stage    " not in said


def test_the_saved_configuration_alone_repeats_the_run(straight, tmp_path):
    """B9: config.gin with another MODEL_DIR gives the first loss bit for bit."""
    code = main.main(
        [
            f"--gin_file={straight[0] / 'config.gin'}",
            f"--gin.MODEL_DIR='{tmp_path}'",
        ]
    )
    assert code == 0
    assert losses(tmp_path) == losses(straight[0])


def test_another_configuration_is_refused_and_nothing_changes(text, straight, capsys):
    directory = straight[0]
    before = {p: p.read_bytes() for p in directory.iterdir() if p.is_file()}
    with pytest.raises(ConfigError, match=r"holds a run of another") as error:
        train.run(runs.experiment(text, directory, seed=7))
    assert "Experiment.seed: 0 became 7" in str(error.value)
    assert {p: p.read_bytes() for p in directory.iterdir() if p.is_file()} == before


def test_where_a_run_goes_on_may_change(text, straight):
    directory = straight[0]
    changed = runs.experiment(text, directory, log_every=2, keep=2)
    assert train.run(changed).finished
    assert "keep = 2" in (directory / "config.gin").read_text()


def test_a_directory_that_cannot_be_written(text, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        train.run(runs.experiment(text, blocked / "run"))


def test_a_vocabulary_larger_than_the_models(text, tmp_path):
    small = runs.models.tiny(vocab_size=64)
    with pytest.raises(ConfigError, match=r"vocab_size: 64 is less than the 320 tokens"):
        train.run(runs.experiment(text, tmp_path, model=small))
    assert not (tmp_path / "config.gin").exists()


def test_evaluation_and_inference_of_a_checkpoint(straight, text, capsys):
    directory, result = straight
    arguments = [f"--gin_file={directory / 'config.gin'}", f"--gin.MODEL_DIR='{directory}'"]
    kept = directory / "evaluations" / f"text-{runs.STEPS}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("an older evaluation", encoding="utf-8")
    with Lock(directory):  # beside a training
        assert main.main([*arguments, "--mode=eval"]) == 0
    record = json.loads(kept.read_text(encoding="utf-8"))
    assert (record["step"], record["stage"], record["split"]) == (runs.STEPS, "real", "eval/text")
    loss = result.evaluation["text"]["loss"]
    assert record["loss"] == pytest.approx(loss)
    assert f"held-out text: loss {loss:.4f}" in capsys.readouterr().out
    assert main.main([*arguments, "--mode=infer"]) == 0
    assert result.samples[0] in capsys.readouterr().out
    assert main.main([*arguments, "--mode=report"]) == 0
    assert "loss.png" in capsys.readouterr().out


def test_evaluation_without_a_checkpoint(text, tmp_path, capsys):
    config = tmp_path / "config.gin"
    config.write_text(configuration.to_gin(runs.experiment(text, tmp_path), macros=MACROS))
    arguments = [f"--gin_file={config}", f"--gin.MODEL_DIR='{tmp_path}'", "--mode=eval"]
    assert main.main(arguments) == 2
    assert "holds no checkpoint (train first)" in capsys.readouterr().err


def test_a_signal_asks_to_stop_and_handlers_come_back():
    group, before = Group(), signal.getsignal(signal.SIGTERM)
    with Preemption(group):
        assert group.reached(1) is None
        signal.raise_signal(signal.SIGTERM)
        assert group.reached(2) == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    group.begin()
    assert group.reached(0) is None


def test_metrics_are_strict_json(straight):
    for line in (straight[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
