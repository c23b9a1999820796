"""`--mode=data`, and what a run says and logs of its data."""

import dataclasses
import json

import models
import pytest
import runs

from m6jax.experiment import Stage
from m6jax.run import modes, train

pytestmark = pytest.mark.usefixtures("quick_runs")


def short(text, directory):
    return runs.experiment(
        text,
        directory,
        model=models.tiny(vocab_size=runs.VOCABULARY, moe=None, pattern=("DENSE",)),
        stages=(Stage(name="only", unit=1),),
        steps=2,
        sample=None,
    )


def test_the_rows_of_a_run(text, tmp_path, capsys):
    experiment = short(text, tmp_path)
    assert experiment.all_rows() == 2 * 8
    two = dataclasses.replace(experiment, stages=runs.stages(), steps=8)
    assert two.all_rows() == 8 * 8
    modes.data(experiment)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("data     text: 180 documents, ")
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *["data"] * 3,
        *["rows", *["row"] * 4, "lengths"],
    ]
    assert not list(tmp_path.iterdir())


def test_a_run_says_and_logs_the_same(text, tmp_path, capsys):
    modes.data(short(text, tmp_path))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data ")]
    train.run(short(text, tmp_path))
    said = capsys.readouterr().out.splitlines()
    assert set(shown) <= set(said)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = [record for record in records if record["split"] == "train"]
    for record in logged:
        assert 0 <= record["data_wait_fraction"] < 1
        assert 0.5 < record["filled_fraction"] <= 1
