import json
import logging

import pytest

from m6jax.checkpointing.steps import CheckpointError, Retention, StepDirectories
from m6jax.foundation.validated import ConfigError

FILES = (
    "state/_METADATA",
    "state/manifest.ocdbt",
    "data_state/metadata",
    "description/metadata",
    "metrics/metadata",
)


def make_step(directory, step, metrics=None):
    for name in FILES:
        file = directory / str(step) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(metrics or {}))


def open_directory(directory, unfinished=()):
    return StepDirectories(directory, lambda path: path.name not in unfinished)


def test_complete_steps_in_order_of_number(tmp_path):
    for step in (2, 10, 0):
        make_step(tmp_path, step)
    for name in ("notes", "007", "3.orbax-checkpoint-tmp"):
        make_step(tmp_path, name)
    (tmp_path / "11").write_text("a file")

    directories = open_directory(tmp_path)

    assert directories.steps() == [0, 2, 10]
    assert directories.latest() == 10


def test_every_way_of_not_being_complete_is_named_in_one_warning(tmp_path, caplog):
    for step in (1, 3, 4):
        make_step(tmp_path, step)
    (tmp_path / "2").mkdir()
    (tmp_path / "4" / "data_state" / "metadata").unlink()

    directories = open_directory(tmp_path, unfinished=("3",))
    assert directories.latest() == 1
    assert directories.latest() == 1

    assert [record.getMessage() for record in caplog.records] == [
        "passing over what is not a complete checkpoint: "
        f"{tmp_path}/4 (no data_state/metadata); {tmp_path}/3 (unfinished); {tmp_path}/2 (empty)"
    ]


def test_nothing_there(tmp_path):
    directories = open_directory(tmp_path / "absent")
    assert (directories.steps(), directories.latest()) == ([], None)
    with pytest.raises(CheckpointError, match=r"absent/3: not there \(complete steps here: none\)"):
        directories.require(3)


def test_document_that_is_no_json_is_named(tmp_path):
    make_step(tmp_path, 1)
    file = tmp_path / "1" / "description" / "metadata"
    file.write_text('{"stage": "ps')
    with pytest.raises(CheckpointError, match=rf"checkpoint 1: {file} is damaged: Unterminated"):
        open_directory(tmp_path).document(1, "description")


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(keep=1), {5}),
        (Retention(keep=2), {4, 5}),
        (Retention(keep=1, keep_best=1), {2, 5}),
        (Retention(keep=1, keep_best=2), {1, 2, 5}),
        (Retention(keep=1, keep_best=9), {1, 2, 3, 5}),
        (Retention(keep=1, keep_best=1, best_metric="error"), {4, 5}),
        (Retention(keep=1, keep_best=1, highest=True), {3, 5}),
        (Retention(keep=9), {1, 2, 3, 4, 5}),
        (Retention(keep=1, keep_before=3), {3, 5}),
        (Retention(keep=1, keep_before=0), {5}),
    ],
)
def test_newest_and_best_are_kept(retention, kept):
    metrics = {
        1: {"loss": 1.0},
        2: {"loss": 1.0},  # as good as step 1, and newer
        3: {"loss": 2.0},
        4: {"loss": float("nan"), "error": 0.1},
        5: {},
    }
    assert retention.kept(metrics) == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "Checkpoints.keep: expected at least 1, got 0"),
        ({"keep_best": -1}, "Checkpoints.keep_best: expected at least 0, got -1"),
    ],
)
def test_retention_needs_sensible_numbers(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Retention(**arguments)


def test_removes_what_is_not_kept_and_what_comes_later(tmp_path, caplog):
    for step, loss in ((1, 0.5), (2, 3.0), (3, 2.0), (4, 1.0), (9, 0.1)):
        make_step(tmp_path, step, {"loss": loss})
    (tmp_path / "0").mkdir()
    (tmp_path / "notes").mkdir()

    open_directory(tmp_path).remove_old(4, Retention(keep=1, keep_best=1))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "notes"]
    assert "after step 4, left behind: [9]" in caplog.text


def test_step_without_readable_metrics_is_not_among_the_best(tmp_path, caplog):
    for step in (1, 2, 3):
        make_step(tmp_path, step, {"loss": step})
    (tmp_path / "1" / "metrics" / "metadata").write_text("{")

    open_directory(tmp_path).remove_old(3, Retention(keep=1, keep_best=1))

    assert open_directory(tmp_path).steps() == [2, 3]
    assert caplog.records[0].levelno == logging.WARNING


def test_directory_that_is_half_removed_is_not_complete(tmp_path, monkeypatch):
    make_step(tmp_path, 1)
    make_step(tmp_path, 2)
    directories = open_directory(tmp_path)

    def killed(self, missing_ok=False):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(directories.directory), "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        directories.remove_old(2, Retention(keep=1))
    assert open_directory(tmp_path).steps() == [2]


def test_unfinished_saves_are_removed_and_nothing_else(tmp_path):
    make_step(tmp_path / "deep" / "er", 1)
    make_step(tmp_path / "deep" / "er", "2.orbax-checkpoint-tmp-17")

    open_directory(tmp_path / "deep" / "er").remove_unfinished()
    open_directory(tmp_path / "new").remove_unfinished()

    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["1"]
    assert (tmp_path / "new").is_dir()


def test_network_path_stays_as_it_is_and_local_path_becomes_absolute(tmp_path, monkeypatch):
    assert str(open_directory("gs://bucket/run/checkpoints").path(5)) == (
        "gs://bucket/run/checkpoints/5"
    )
    monkeypatch.chdir(tmp_path)
    assert open_directory("run").path(5) == tmp_path / "run" / "5"
