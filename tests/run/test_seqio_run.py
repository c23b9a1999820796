"""A run on tasks of a user's own module: trained, resumed, evaluated by their metrics."""

import json
import shutil

import models
import pytest
import runs
import their_tasks

from m6jax.data.config import SeqioTask, TaskVocabulary, TextData
from m6jax.experiment import Stage
from m6jax.optimizers.schedules import Constant
from m6jax.run import modes, train

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def their(tmp_path_factory):
    """Makes a run of the tasks."""
    path = their_tasks.write(tmp_path_factory.mktemp("tasks"))

    def make(directory, steps):
        data = TextData(
            sources=(SeqioTask(name="who_mixed", module=str(path), version="1"),),
            vocabulary=TaskVocabulary(extra_ids=their_tasks.SENTINELS),
            length=32,
        )
        return runs.experiment(
            path,
            directory,
            model=models.tiny(vocab_size=runs.VOCABULARY, moe=None, pattern=("DENSE",)),
            data=data,
            steps=steps,
            stages=(Stage(name="only", unit=1),),
            schedule=Constant(peak=1e-2),
            sample=None,
        )

    make.folder = path.parent
    return make


def losses(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [m["loss"] for m in map(json.loads, lines) if m["split"] == "train"]


def test_trained_resumed_and_evaluated(their, tmp_path, capsys):
    train.run(their(tmp_path, 4))
    straight = losses(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    train.run(their(tmp_path, 4))
    said = capsys.readouterr().out
    assert "resume   step 3" in said
    assert losses(tmp_path) == straight
    assert len(straight) == 4
    assert (tmp_path / "vocabulary.model").exists()

    modes.evaluate(their(tmp_path, 4))
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["held-out who_mixed", "metrics  who"]
    metrics = dict(part.split() for part in said[1].split(": ")[1].split(", "))
    assert metrics["examples"] == "8"
    assert 0 <= float(metrics["exact_match"]) <= 1
    assert float(metrics["mean_score"]) < 0
    target, _ = (their.folder / "asked.txt").read_text().splitlines()[0].split("|")
    assert target == their_tasks.LINES[32].split("\t")[1]
