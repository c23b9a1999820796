"""A run on pictures and text, from gin, through the delink to its evaluation."""

import json

import numpy as np
import pytest

from m6jax import configuration
from m6jax.experiment import Experiment
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


def test_pictures_train_through_both_stages(text, tmp_path):
    file = tmp_path / "caption.gin"
    file.write_text(GIN.format(text=text, directory=tmp_path / "run"))
    result = run(configuration.load([file], root=Experiment).value)
    assert result.finished
    assert set(result.evaluation) >= {"fashion", "text"}
    assert "bits_per_byte" in result.evaluation["text"]
    assert "bits_per_byte" not in result.evaluation["fashion"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [m["loss"] for m in map(json.loads, lines) if m["split"] == "train"]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()
    answers = {m["split"]: m for m in map(json.loads, lines) if m["split"].startswith("answers/")}
    held_out = answers["answers/fashion/validation"]
    assert 0 <= held_out["class_exact"] <= held_out["class_f1"] <= 1
    assert held_out["ridge_exact"] > 0.5
    assert "answers/fashion/train" in answers
    report = tmp_path / "run" / "report"
    assert len((report / "captions.tsv").read_text().splitlines()) == 1 + 120 + 480
    assert (report / "captions.png").exists()
