"""Nothing is written, and the message says what is wrong and what to do."""

import collections
import pathlib
import shutil

import jax
import models
import pytest
import source_runs
from source_runs import STEP, experiment, layout

from m6jax import main
from m6jax.checkpointing import CheckpointError, Checkpoints
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.experiment import Stage
from m6jax.experiment.lock import Lock
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.optimizers import Adafactor
from m6jax.pseudo_to_real.delinking import Policy


@pytest.fixture(scope="module")
def pseudo(tmp_path_factory):
    """A run with one distinct layer of four."""
    directory = tmp_path_factory.mktemp("pseudo")
    run = experiment(directory)
    source_runs.save(directory, source_runs.make_state(run, layout(1)), layout(1))
    return directory


@pytest.fixture
def real(tmp_path):
    """A run with four unrolled layers."""
    directory = tmp_path / "real"
    run = experiment(directory)
    lies = layout(4, Form.UNROLLED)
    source_runs.save(directory, source_runs.make_state(run, lies), lies)
    return directory


def stage(unit=None, form=Form.STACKED, policy=Policy.COPY):
    return Stage(name="target", unit=unit, form=form, optimizer_state=policy)


def files(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def refusal(run, source, change=LayoutChange.DELINK, error=ConfigError, **settings):
    """The message; makes sure that nothing was written and the source is as it was."""
    before = files(pathlib.Path(source))
    target = pathlib.Path(run.model_dir)
    there = files(target) if target.exists() else {}
    with pytest.raises(error) as caught:
        convert(run, Conversion(source=str(source), **settings), change)
    assert files(pathlib.Path(source)) == before
    assert (files(target) if target.exists() else {}) == there
    return str(caught.value)


def test_no_source(tmp_path):
    with pytest.raises(ConfigError, match=r"Conversion.source: --mode=link needs the MODEL_DIR"):
        convert(experiment(tmp_path / "target"), Conversion(), LayoutChange.LINK)


def test_a_source_without_checkpoints(tmp_path):
    message = refusal(experiment(tmp_path / "target"), tmp_path / "nothing")
    assert f"Conversion.source: {tmp_path / 'nothing'} holds no checkpoint" in message


def test_a_step_that_is_not_there(pseudo, tmp_path):
    run = experiment(tmp_path / "target")
    message = refusal(run, pseudo, step=3)
    assert message == f"Conversion.step: {pseudo} holds no checkpoint of step 3 (it has 7)"


def test_a_step_after_which_there_is_nothing_to_train(pseudo, tmp_path):
    over = experiment(tmp_path / "target", steps=STEP)
    message = refusal(over, pseudo)
    assert (
        "Experiment.steps: there would be nothing to train: the checkpoint is of step 7" in message
    )
    assert "or Conversion.restart = True" in message
    convert(over, Conversion(source=str(pseudo), restart=True), LayoutChange.DELINK)


def test_a_target_that_a_run_writes(pseudo, tmp_path):
    with Lock(tmp_path / "target") as lock:
        message = refusal(experiment(tmp_path / "target"), pseudo)
        lock.require()
    assert "target is used by process" in message


def test_a_checkpoint_of_no_run(tmp_path):
    with Checkpoints(tmp_path / "other" / "checkpoints") as checkpoints:
        checkpoints.save(1, {"x": jax.numpy.ones(1)}, {}, {}, wait=True)
    message = refusal(experiment(tmp_path / "target"), tmp_path / "other")
    assert "does not say how its layers lie" in message


@pytest.mark.parametrize(
    ("target", "change", "expected"),
    [
        (
            stage(unit=1),
            LayoutChange.DELINK,
            "has 1 distinct of 4 layers (STACKED) and stage 'target' of the configuration 1"
            " distinct of 4 layers (STACKED): there is nothing to delink",
        ),
        (stage(), LayoutChange.LINK, "there is nothing to link (use --mode=delink)"),
        (stage(), LayoutChange.STACK, "there is nothing to stack (use --mode=delink)"),
        (
            stage(unit=2, policy=None),
            LayoutChange.DELINK,
            "needs a policy for the optimizer's state",
        ),
        (
            stage(unit=2, policy=Policy.MEASURED),
            LayoutChange.DELINK,
            "MEASURED needs batches and a step, which --mode=delink does not make (choose COPY,",
        ),
    ],
)
def test_what_cannot_become_of_a_pseudo_giant(pseudo, tmp_path, target, change, expected):
    assert expected in refusal(experiment(tmp_path / "target", target), pseudo, change)


@pytest.mark.parametrize(
    ("target", "change", "expected"),
    [
        (stage(form=Form.UNROLLED), LayoutChange.DELINK, "there is nothing to delink"),
        (stage(), LayoutChange.DELINK, "there is nothing to delink (use --mode=stack)"),
        (stage(unit=2), LayoutChange.DELINK, "there is nothing to delink (use --mode=link)"),
        (stage(unit=2), LayoutChange.LINK, "the layers to be linked differ (average them"),
        (
            stage(form=Form.UNROLLED),
            LayoutChange.UNSTACK,
            "there is nothing to unstack (name another",
        ),
    ],
)
def test_what_cannot_become_of_a_real_giant(real, tmp_path, target, change, expected):
    assert expected in refusal(experiment(tmp_path / "target", target), real, change)
    target_files = list((tmp_path / "target").rglob("checkpoints/*"))
    assert target_files == []


def test_a_unit_that_is_no_multiple(tmp_path):
    model = models.tiny(num_layers=12)
    old = source_runs.Layout(depth=12, unit=4)
    run = experiment(tmp_path / "target", stage(unit=6), model=model)
    source_runs.save(tmp_path / "source", source_runs.make_state(run, old), old)
    message = refusal(run, tmp_path / "source")
    assert "a unit of 4 layers cannot expand to 6: not a larger multiple" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model": models.tiny(num_layers=4, mlp_dim=32)},
            "is of another model; the first of 6 leaves that differ, there against in the"
            " configuration: params/layers/moe/down: float32[1,8,16,16] against"
            " float32[1,8,32,16]",
        ),
        (
            {"model": models.tiny(num_layers=8)},
            "ModelConfig.num_layers: checkpoint 7 of",
        ),
        (
            {"optimizer": Adafactor()},
            "is of another optimizer; the first of",
        ),
    ],
)
def test_another_model_or_optimizer(pseudo, tmp_path, changes, expected):
    assert expected in refusal(experiment(tmp_path / "target", **changes), pseudo)


def test_a_stage_that_is_not_there(pseudo, tmp_path):
    message = refusal(experiment(tmp_path / "target"), pseudo, stage="reel")
    assert message == "Conversion.stage: 'reel' is no stage (did you mean 'real'?)"


def test_a_target_that_is_there(pseudo, real):
    message = refusal(experiment(real), pseudo)
    assert f"MODEL_DIR: {real} holds checkpoints already (steps {STEP})" in message


def test_a_target_of_another_run(pseudo, tmp_path):
    run = experiment(tmp_path / "target")
    convert(run, Conversion(source=str(pseudo)), LayoutChange.DELINK)
    shutil.rmtree(tmp_path / "target" / "checkpoints")
    other = experiment(tmp_path / "target", seed=9)
    assert "holds a run of another configuration" in refusal(other, pseudo)


def test_too_little_disk(pseudo, tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    message = refusal(experiment(tmp_path / "target"), pseudo)
    needed = int(message.split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert f"{tmp_path / 'target'} has 1,000 free" in message
    assert 2**20 < needed < 3 * 2**20
    assert not (tmp_path / "target").exists()


def test_a_damaged_source(pseudo, tmp_path):
    shutil.copytree(pseudo, tmp_path / "source")
    data = max((tmp_path / "source").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    run = experiment(tmp_path / "target")
    message = refusal(run, tmp_path / "source", error=CheckpointError)
    assert f"{data} is damaged: it has 100 bytes" in message


def test_a_source_that_is_damaged_on_the_way(pseudo, tmp_path, monkeypatch):
    """What is only found while reading leaves no half target behind."""

    def fail(self, name, index):
        raise CheckpointError(f"{name} cannot be read")

    monkeypatch.setattr("m6jax.checkpointing.WholeReader.read", fail)
    run = experiment(tmp_path / "target")
    message = refusal(run, pseudo, error=CheckpointError)
    assert message.endswith("cannot be read")
    assert list((tmp_path / "target" / "checkpoints").iterdir()) == []


def test_the_command_line_says_it_without_a_traceback(tmp_path, capsys):
    code = main.main(
        [
            "--gin_file=configs/quickstart.gin",
            f"--gin.MODEL_DIR='{tmp_path / 'target'}'",
            f"--gin.Conversion.source='{tmp_path / 'source'}'",
            "--mode=delink",
        ]
    )
    assert code == main.EXIT_BAD_CONFIGURATION
    error = capsys.readouterr().err
    assert f"m6jax: Conversion.source: {tmp_path / 'source'} holds no checkpoint" in error


@pytest.mark.parametrize("step", [-1])
def test_a_negative_step(step):
    with pytest.raises(ConfigError, match=r"Conversion.step: -1 is negative"):
        Conversion(step=step)


def test_a_disk_that_fills_on_the_way(pseudo, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("m6jax.converting.values.make", full)
    message = refusal(experiment(tmp_path / "target"), pseudo, error=CheckpointError)
    assert "saving checkpoint" in message
    assert "No space left on device" in message
    assert list((tmp_path / "target" / "checkpoints").iterdir()) == []
