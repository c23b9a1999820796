"""What the project says of itself, from the command line: shared layers, the delink, own layers."""

import pathlib

import pytest
import runs
from flax import linen as nn

from m6jax import main
from m6jax.layouts import Form
from m6jax.modeling import M6
from m6jax.modeling.transformer import Transformer
from m6jax.reporting.writers import read_records

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.usefixtures("quick_runs")
def test_both_stages_of_the_quick_start_apply_the_flax_module(text, tmp_path, monkeypatch):
    small = {
        "MODEL_DIR": str(tmp_path / "run"),
        "STEPS": 2,
        "DELINK_STEP": 1,
        "LENGTH": 16,
        "VOCABULARY": runs.VOCABULARY,
        "NUM_LAYERS": 2,
        "ModelConfig.embed_dim": 16,
        "ModelConfig.mlp_dim": 16,
        "WarmupStableDecay.warmup_steps": 1,
        "Experiment.sample": None,
        "TextData.rates": None,
        "TextFiles.train": str(text),
    }
    bindings = [f"--gin.{name}={value!r}" for name, value in small.items()]
    bindings.append("--gin.TextData.sources=(@TextFiles(),)")
    applied = set()

    def note(call, args, kwargs, context):
        if isinstance(context.module, M6) and context.method_name == "hidden":
            layout = context.module.layout
            names = frozenset(context.module.variables["params"])
            applied.add((layout.form, layout.unit, names))
        return call(*args, **kwargs)

    def by_slices(*args, **kwargs):
        raise AssertionError("the stack was applied by explicit slices")

    monkeypatch.setattr(Transformer, "apply_layers", by_slices)
    monkeypatch.chdir(ROOT)
    with nn.intercept_methods(note):
        assert main.main(["--gin_file=configs/quickstart.gin", "--quiet", *bindings]) == 0

    rest = {"embedder", "final_norm"}
    assert applied == {
        (Form.STACKED, 1, frozenset(rest | {"layers"})),
        (Form.UNROLLED, 2, frozenset(rest | {"layers_0", "layers_1"})),
    }
    stages = {
        r["stage"]: r["step"] for r in read_records(tmp_path / "run") if r["split"] == "train"
    }
    assert stages == {"pseudo": 1, "real": 2}
