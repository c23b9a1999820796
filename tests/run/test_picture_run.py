"""A run on pictures and text, from gin, through the delink to its evaluation."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from m6jax import configuration
from m6jax.experiment import Experiment
from m6jax.run import modes
from m6jax.run.train import run

pytestmark = pytest.mark.usefixtures("quick_runs")

GIN = """
from __gin__ import dynamic_registration
from m6jax import data
from m6jax import experiment
from m6jax import modeling
from m6jax import optimizers
from m6jax import pseudo_to_real

experiment.Experiment.model = @modeling.ModelConfig()
modeling.ModelConfig.vocab_size = 320
modeling.ModelConfig.num_layers = 2
modeling.ModelConfig.embed_dim = 16
modeling.ModelConfig.num_heads = 2
modeling.ModelConfig.mlp_dim = 32
modeling.ModelConfig.patch_dim = 48
modeling.ModelConfig.pattern = ('DENSE',)

experiment.Experiment.data = @data.TextData()
data.TextData.sources = (@data.BuiltinPictures(), @data.TextFiles())
data.BuiltinPictures.name = 'fashion'
data.TextFiles.train = '{text}'
data.TextData.rates = (3.0, 1.0)
data.TextData.length = 64
data.TextData.vocabulary = @data.SentencePiece()
data.SentencePiece.size = 320
data.TextData.pictures = @data.Pictures()
data.Pictures.grid = (2, 2)
data.Pictures.patch_size = 4

experiment.Experiment.model_dir = '{directory}'
experiment.Experiment.steps = 4
experiment.Experiment.batch_size = 8
experiment.Experiment.eval_batch_size = 64
experiment.Experiment.log_every = 1
experiment.Experiment.save_every = 3
experiment.Experiment.schedule = @optimizers.Constant()
optimizers.Constant.peak = 1e-3
experiment.Experiment.stages = (@pseudo/experiment.Stage(), @real/experiment.Stage())
pseudo/experiment.Stage.name = 'pseudo'
pseudo/experiment.Stage.unit = 1
pseudo/experiment.Stage.until = @pseudo_to_real.AtStep()
pseudo_to_real.AtStep.step = 2
real/experiment.Stage.name = 'real'
real/experiment.Stage.optimizer_state = 'COPY'
"""


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An experiment that was run to its end, and its directory."""
    directory = tmp_path_factory.mktemp("picture_run")
    file = directory / "caption.gin"
    file.write_text(GIN.format(text=text, directory=directory / "run"))
    experiment = configuration.load([file], root=Experiment).value
    return experiment, run(experiment), directory / "run"


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_pictures_train_through_both_stages(finished):
    _, result, directory = finished
    assert result.finished
    assert set(result.evaluation) >= {"fashion", "text"}
    assert "bits_per_byte" in result.evaluation["text"]
    assert "bits_per_byte" not in result.evaluation["fashion"]
    losses = [m["loss"] for m in records(directory) if m["split"] == "train"]
    assert len(losses) == 4
    assert np.isfinite(losses).all()


def test_pictures_are_asked_about(finished):
    _, _, directory = finished
    answers = {m["split"]: m for m in records(directory) if m["split"].startswith("answers/")}
    held_out = answers["answers/fashion/validation"]
    assert 0 <= held_out["class_exact"] <= held_out["class_f1"] <= 1
    assert held_out["ridge_exact"] > 0.5
    assert "answers/fashion/train" in answers
    assert len((directory / "report/captions.tsv").read_text().splitlines()) == 1 + 120 + 480
    assert (directory / "report/captions.png").exists()


def test_evaluation_says_the_same(finished, capsys):
    experiment, _, directory = finished
    (directory / "report/captions.png").unlink()
    capsys.readouterr()
    assert modes.evaluate(experiment) == 0
    lines = capsys.readouterr().out.splitlines()
    (said,) = (x for x in lines if x.startswith("answers  fashion, held out (120 questions): "))
    (kept,) = (m for m in records(directory) if m["split"] == "answers/fashion/validation")
    assert f"class {kept['class_exact']:.1%} exact, token F1 {kept['class_f1']:.3f}" in said
    assert f"a ridge classifier on the same pixels {kept['ridge_exact']:.1%}" in said
    assert (directory / "report/captions.png").exists()


def test_a_resumed_run_is_the_straight_one(finished, tmp_path):
    """Its last checkpoint lost, the run goes on from step 3 and makes the same step 4."""
    experiment, _, directory = finished
    before = records(directory)
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "checkpoints" / "4")
    resumed = dataclasses.replace(experiment, model_dir=str(again))
    assert run(resumed).finished

    def last(found):
        names = ("loss", "grad_norm", "accuracy")
        wanted = [m for m in found if m["split"] == "train" and m["step"] == 4]
        return [[m[name] for name in names] for m in wanted]

    assert last(records(again)) == last(before)
    assert len(last(before)) == 1
