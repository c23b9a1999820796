"""Whole runs that go on from another run's checkpoint, by the tool and by themselves."""

import dataclasses
import shutil

import pytest
import runs

from m6jax import configuration, main
from m6jax.checkpointing import Checkpoints
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.experiment import Initial, Stage
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.processes import Group
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.reporting.writers import read_records
from m6jax.run import train

pytestmark = pytest.mark.usefixtures("quick_runs")

REAL = Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.COPY)


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run through both stages that keeps the checkpoint of the first one's end, step 4."""
    directory = tmp_path_factory.mktemp("straight")
    train.run(runs.experiment(text, directory, keep=10))
    return directory


def losses(directory):
    return {r["step"]: r["loss"] for r in read_records(directory) if r["split"] == "train"}


def after_delink(directory):
    return {step: loss for step, loss in losses(directory).items() if step > runs.DELINK_STEP}


def real_run(text, directory, source, stage=REAL, **initial):
    initial = Initial(model_dir=str(source), step=runs.DELINK_STEP, **initial)
    return runs.experiment(text, directory, stages=(stage,), initial=initial)


def test_the_tool_s_checkpoint_goes_on_as_the_straight_run_did(text, straight, tmp_path, capsys):
    """By the command line, from a configuration of both stages; bit-equal losses."""
    config = tmp_path / "config.gin"
    run = runs.experiment(text, tmp_path / "real")
    config.write_text(configuration.to_gin(run, macros=MACROS))
    arguments = [f"--gin_file={config}", f"--gin.MODEL_DIR='{tmp_path / 'real'}'"]
    settings = [
        f"--gin.Conversion.source='{straight}'",
        f"--gin.Conversion.step={runs.DELINK_STEP}",
    ]

    assert main.main([*arguments, *settings, "--mode=delink"]) == 0
    said = capsys.readouterr().out
    assert main.main(arguments) == 0

    assert "params/layers_*/moe/up: 2 x float32[8,16,16], 2 copies\n" in said
    assert f"delink   {straight}, step 4, to {tmp_path / 'real'}:" in said
    assert losses(tmp_path / "real") == after_delink(straight)
    assert "resume   step 4, stage real" in capsys.readouterr().out


def test_a_run_that_names_the_checkpoint_goes_on_as_the_straight_run_did(
    text, straight, tmp_path, capsys
):
    assert train.run(real_run(text, tmp_path / "real", straight)).finished

    assert losses(tmp_path / "real") == after_delink(straight)
    said = capsys.readouterr().out
    assert f"begin    step 4, stage real, from checkpoint 4 of {straight}; " in said


def test_the_source_is_read_once(text, straight, tmp_path):
    """The run saves what it begins with; stopped before any step it goes on without the source."""
    shutil.copytree(straight, tmp_path / "source")
    run = real_run(text, tmp_path / "real", tmp_path / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "reached", lambda group, step: "SIGTERM")
        assert train.run(run).step == runs.DELINK_STEP
    shutil.rmtree(tmp_path / "source")

    assert train.run(run).finished
    assert losses(tmp_path / "real") == after_delink(straight)


@pytest.mark.long
def test_second_moments_are_measured_as_between_stages(text, tmp_path):
    measured = dataclasses.replace(REAL, optimizer_state=Policy.MEASURED)
    stages = (runs.stages()[0], measured)
    both = tmp_path / "both"
    train.run(runs.experiment(text, both, stages=stages, keep=10))

    assert train.run(real_run(text, tmp_path / "real", both, measured)).finished

    assert losses(tmp_path / "real") == after_delink(both)


def test_a_restart_begins_its_data_and_steps_anew(text, straight, tmp_path):
    run = real_run(text, tmp_path / "real", straight, restart=True, parameters_only=True)
    assert train.run(run).finished
    assert sorted(losses(tmp_path / "real")) == list(range(1, runs.STEPS + 1))
    with Checkpoints(tmp_path / "real" / "checkpoints") as checkpoints:
        taken = [checkpoints.restore_data_state(step)["rows_taken"] for step in (6, 8)]
    assert taken == [48, 64]


def test_the_tool_can_restart_too(text, straight, tmp_path):
    run = runs.experiment(text, tmp_path / "real", stages=(REAL,))
    conversion = Conversion(source=str(straight), step=runs.DELINK_STEP, restart=True)
    convert(run, conversion, LayoutChange.DELINK)
    assert train.run(run).finished
    assert sorted(losses(tmp_path / "real")) == list(range(1, runs.STEPS + 1))


def test_where_a_run_began_is_what_it_is(text, straight, tmp_path):
    run = real_run(text, tmp_path / "real", straight)
    train.run(run)
    other = dataclasses.replace(run, initial=dataclasses.replace(run.initial, step=8))
    with pytest.raises(ConfigError, match=r"Experiment.initial.step: 4 became 8"):
        train.run(other)


def test_other_data_is_refused_with_the_way_out(text, straight, tmp_path):
    run = real_run(text, tmp_path / "real", straight)
    data = dataclasses.replace(run.data, length=8)
    with pytest.raises(ConfigError, match=r"initial: the saved place .*\.restart = True"):
        train.run(dataclasses.replace(run, data=data))
    assert not (tmp_path / "real" / "config.gin").exists(), "another setting can be tried"
