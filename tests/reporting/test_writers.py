import json
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fake_network import network  # noqa: F401
from tensorboardX.proto.event_pb2 import Event

from m6jax.reporting.writers import MetricWriter, read_records, write_record


def record(step, split="train", **values):
    return {"step": step, "stage": "pseudo", "split": split, "loss": 5.0 - step / 10, **values}


def write(directory, steps, **options):
    with MetricWriter(directory, **options) as writer:
        for step in steps:
            writer.write(record(step))


def steps_in(directory):
    return [each["step"] for each in read_records(directory)]


def events(directory):
    """The events of all files in order of writing: a length, two checksums around the bytes."""
    found = []
    for file in sorted(
        (directory / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime
    ):
        content, at = file.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return found


def values(directory):
    return {
        (event.step, value.tag): value
        for event in events(directory)
        for value in event.summary.value
    }


def test_line_holds_what_was_given_scalars_exactly(tmp_path):
    loss = np.float32(0.1)
    with MetricWriter(tmp_path) as writer:
        writer.write(
            {
                "step": np.int64(3),
                "stage": "真",
                "split": "train",
                "loss": jnp.asarray(loss),
                "grad_norm": jnp.bfloat16(2.5),
                "tokens": 7,
                "skipped": None,
                "expert_load": jnp.asarray([[0.5, 1 / 3], [1e-9, 0]]),
                "counts": np.array([1, 2], np.int32),
            }
        )
        line = (tmp_path / "metrics.jsonl").read_text()

    assert line == (
        '{"step": 3, "stage": "真", "split": "train", "loss": 0.10000000149011612, '
        '"grad_norm": 2.5, "tokens": 7, "skipped": null, '
        '"expert_load": [[0.5, 0.333333], [1e-09, 0.0]], "counts": [1, 2]}\n'
    )
    assert np.float32(json.loads(line)["loss"]) == loss


def test_numbers_that_json_lacks_are_null_and_come_back(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(
            record(1, loss=math.nan, z=-math.inf, load=np.array([[1.0, np.nan], [np.inf, 2]]))
        )

    def refuse(constant):
        raise AssertionError(constant)

    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=refuse)
    assert (strict["loss"], strict["z"], strict["load"]) == (None, None, [[1.0, None], [None, 2.0]])
    assert strict["nonfinite"] == {"loss": "nan", "z": "-inf", "load": "inf nan"}

    (back,) = read_records(tmp_path)
    assert math.isnan(back["loss"])
    assert back["z"] == -math.inf
    np.testing.assert_array_equal(back["load"], [[1.0, np.nan], [np.nan, 2.0]])


@pytest.mark.parametrize("missing", ["step", "stage", "split"])
def test_record_must_say_what_it_is_of(tmp_path, missing):
    incomplete = record(1)
    del incomplete[missing]
    with MetricWriter(tmp_path) as writer, pytest.raises(ValueError, match=f"has no '{missing}'"):
        writer.write(incomplete)


def test_value_that_is_no_number_is_named(tmp_path):
    with MetricWriter(tmp_path) as writer, pytest.raises(ValueError, match="extra: a dict is no"):
        writer.write(record(1, extra={"a": 1}))
    assert steps_in(tmp_path) == []


def test_resume_drops_later_lines_and_keeps_the_rest_byte_for_byte(tmp_path):
    file = tmp_path / "metrics.jsonl"
    before = b'{"step":2 , "stage": "pseudo", "split": "train", "loss": 1.50}\n'
    later = b'{"step": 4, "stage": "pseudo", "split": "train"}\n{"step": 5, "loss"'
    evaluation = b'{"step": 3, "stage": "pseudo", "split": "eval/en", "loss": 2e0}\n'
    file.write_bytes(before + later[: later.index(b"\n") + 1] + evaluation + later)

    write(tmp_path, [4], resume_step=3)

    assert file.read_bytes().startswith(before + evaluation)
    assert steps_in(tmp_path) == [2, 3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"resume_step": None}, [9]),
        ({"resume_step": 2}, [1, 2, 9]),
        ({"keep_later": True}, [1, 2, 3, 9]),
    ],
)
def test_which_lines_stay(tmp_path, options, steps):
    write(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "sta')
    write(tmp_path, [9], **options)
    assert steps_in(tmp_path) == steps


def test_a_record_of_the_step_that_a_run_goes_on_from_is_not_written_again(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for split in ("train", "eval/en", "eval/en"):
            writer.write(record(2, split))
    file = tmp_path / "metrics.jsonl"
    before = file.read_bytes()
    file.write_bytes(before + before)  # as earlier versions left it
    with MetricWriter(tmp_path, resume_step=2) as writer:
        assert file.read_bytes() == before
        for split in ("eval/en", "eval/zh"):
            writer.write(record(2, split) | {"loss": 0.0})
        writer.write(record(3))
    found = [(r["step"], r["split"], r["loss"]) for r in read_records(tmp_path)]
    assert found[:2] == [(2, "train", 4.8), (2, "eval/en", 4.8)]
    assert found[2:] == [(2, "eval/zh", 0.0), (3, "train", 4.7)]


def test_last_line_without_an_end_stays_if_it_is_whole(tmp_path):
    write(tmp_path, [1, 2])
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    write(tmp_path, [3], resume_step=2)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_line_that_is_no_record_is_named_and_left_alone(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\nnonsense\n[2]\n{"step": 2}\n')

    assert [each["step"] for each in read_records(tmp_path)] == [1, 2]
    assert caplog.messages == [f"{file}:{n}: not a record, passed over" for n in (2, 3)]

    MetricWriter(tmp_path, resume_step=1).close()
    assert file.read_text() == '{"step": 1}\nnonsense\n[2]\n'


def test_every_line_is_in_the_file_at_once(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(record(1))
        assert steps_in(tmp_path) == [1]


def test_disabled_writer_touches_nothing(tmp_path):
    with MetricWriter(tmp_path / "run", enabled=False) as writer:
        writer.write(record(1))
        writer.text("config", "x", 0)
        writer.flush()
    assert not (tmp_path / "run").exists()


def test_no_file_no_records(tmp_path):
    assert read_records(tmp_path) == []


def test_tensorboard_has_scalars_histograms_and_text(tmp_path, caplog):
    load = np.array([[0.0, 0.25, 0.75, np.nan], [0.25, 0.25, 0.25, 0.25]])
    with MetricWriter(tmp_path) as writer:
        writer.text("config", "train.steps = 10", 0)
        writer.write(record(5, expert_load=load, note="hot", by_layer=np.array([1.0, np.nan])))
        writer.write(record(5, split="many", by_layer=np.ones(65)))
        writer.write(record(5, split="eval/en"))
        writer.write(record(6, loss=math.nan))

    found = values(tmp_path)
    assert found[5, "train/loss"].simple_value == 4.5
    assert found[5, "eval/en/loss"].simple_value == 4.5
    assert math.isnan(found[6, "train/loss"].simple_value)
    assert found[5, "train/expert_load/00"].histo.num == 3
    assert found[5, "train/expert_load/00"].histo.max == 0.75
    assert found[5, "train/expert_load/01"].histo.sum == 1.0
    assert found[5, "train/by_layer/00"].simple_value == 1.0
    assert math.isnan(found[5, "train/by_layer/01"].simple_value)
    assert found[5, "many/by_layer"].histo.sum == 65.0
    assert b"hot" in found[5, "train/note/text_summary"].tensor.string_val[0]
    assert b"train.steps = 10" in found[0, "config/text_summary"].tensor.string_val[0]
    assert caplog.records == []


def test_tensorboard_is_told_what_will_be_written_again(tmp_path):
    write(tmp_path, [1, 2, 3])
    write(tmp_path, [3], resume_step=2)
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [0, 3]


def test_network_path_is_written_at_flush_and_close_alone(network):  # noqa: F811
    file = network / "bucket" / "run" / "metrics.jsonl"
    with MetricWriter("gs://bucket/run", flush_seconds=3600) as writer:
        writer.write(record(1))
        assert not file.exists()
        writer.flush()
        assert steps_in("gs://bucket/run") == [1]
        writer.write(record(2))
    assert steps_in("gs://bucket/run") == [1, 2]
    with MetricWriter("gs://bucket/run", resume_step=1, flush_seconds=0) as writer:
        writer.write(record(2, note="again"))
        assert read_records("gs://bucket/run")[-1]["note"] == "again"
    assert steps_in("gs://bucket/run") == [1, 2]
    assert (2, "train/loss") in values(network / "bucket" / "run")


def test_an_evaluation_in_a_file_of_its_own(tmp_path, caplog):
    path = epath.Path(tmp_path / "evaluations" / "text-3.json")
    for loss in (2.0, math.inf):
        write_record(path, record(3, loss=loss))
    assert json.loads(path.read_text()) == record(3, loss=None, nonfinite={"loss": "inf"})
    write_record(path / "not a directory", record(3))
    assert f"{path}/not a directory cannot be written" in caplog.text


def test_killed_process_leaves_whole_lines(tmp_path):
    code = (
        "import os, sys; from m6jax.reporting.writers import MetricWriter\n"
        "writer = MetricWriter(sys.argv[1])\n"
        "writer.write({'step': 1, 'stage': 'pseudo', 'split': 'train'})\n"
        "assert 'tensorflow' not in sys.modules\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], stderr=subprocess.PIPE)
    assert (killed.returncode, killed.stderr) == (-9, b"")
    assert steps_in(tmp_path) == [1]
