"""A run in Python: `m6jax.train` and `m6jax.load`."""

import shutil

import jax
import numpy as np
import pytest
import runs

import m6jax
from m6jax import configuration
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.validated import ConfigError

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of four shared steps, then one: trained from a gin file."""
    root = tmp_path_factory.mktemp("trained")
    experiment = runs.experiment(text, root / "elsewhere", steps=2 * runs.DELINK_STEP)
    file = root / "run.gin"
    file.write_text(configuration.describe(experiment, macros=MACROS), encoding="utf-8")
    settings = {"Experiment.steps": runs.DELINK_STEP + 1}
    return m6jax.train(file, MODEL_DIR=str(root / "run"), settings=settings, quiet=True)


def test_a_run_is_opened_where_it_was_moved_to(trained, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained.experiment.model_dir, moved)
    run = m6jax.load(moved)
    assert run.step == runs.DELINK_STEP + 1
    jax.tree.map(np.testing.assert_array_equal, run.params, trained.params)
    assert run.generate(["the whale"]) == trained.generate(["the whale"])
    assert run.generate(["the whale", "a"], max_new_tokens=2)[1].startswith("a")


def test_metrics_are_a_table(trained):
    table = trained.metrics
    losses = table.split("train")
    assert losses["step"].tolist() == list(range(1, runs.DELINK_STEP + 2))
    assert np.isfinite(losses["loss"]).all()
    assert np.isnan(table["loss_before"]).sum() == len(table) - 1
    assert str(losses).splitlines()[0].split()[:3] == ["step", "stage", "split"]
    with pytest.raises(KeyError, match="no split 'valid'"):
        table.split("valid")
    with pytest.raises(KeyError, match="no column 'lost'"):
        table["lost"]


def test_evaluation_of_files(trained, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(runs.LINES) + "\n", encoding="utf-8")
    metrics = trained.evaluate(str(tmp_path / "*.txt"))
    assert metrics.keys() == {"files"}
    assert metrics["files"]["bits_per_byte"] > 0
    own = trained.evaluate()
    last = trained.metrics.split("eval/text")["loss"][-1]
    assert own.keys() == {"text"}
    assert float(own["text"]["loss"]) == pytest.approx(last, rel=1e-6)


def test_a_shared_model_is_delinked(trained, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(runs.LINES) + "\n", encoding="utf-8")
    shared = m6jax.load(trained.experiment.model_dir, step=runs.DELINK_STEP)
    assert set(shared.params) == {"embedder", "layers", "final_norm"}
    real = shared.delink()
    assert real.module.layout.unit == 2
    assert set(real.params) == {"embedder", "layers_0", "layers_1", "final_norm"}
    files = str(tmp_path / "*.txt")
    before, after = (model.evaluate(files)["files"]["loss"] for model in (shared, real))
    assert float(after) == pytest.approx(float(before), rel=1e-6)
    assert real.generate(["the sea"]) == shared.generate(["the sea"])


def test_what_cannot_be_opened(trained, tmp_path):
    with pytest.raises(ConfigError, match=r"load: there is no run in .*config.gin is missing"):
        m6jax.load(tmp_path)
    with pytest.raises(ConfigError, match=r"step 5000: .* has no checkpoint of it \(there are"):
        m6jax.load(trained.experiment.model_dir, step=5000)
    with pytest.raises(ConfigError, match=r"a list of texts is needed \(write \['a'\]\)"):
        trained.generate("a")
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        m6jax.lode  # noqa: B018
