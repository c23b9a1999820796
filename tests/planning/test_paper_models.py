"""The configurations of the papers have the papers' sizes."""

import pathlib

import pytest

from m6jax import configuration
from m6jax.experiment import Experiment, summary
from m6jax.experiment.model_dir import MACROS
from m6jax.planning.settings import PlanSettings

ROOT = pathlib.Path(__file__).parents[2]
VOCABULARY, WIDTH, PATCH = 21_128, 1024, 2048

# Layers, experts and width of one: M6-T (arXiv 2105.15082) and M6-10T (arXiv 2110.03888).
SPARSE = {
    "m6_base": (5, 32, 4096, 1.4e9),
    "m6_10b": (10, 128, 4096, 10e9),
    "m6_100b": (24, 512, 4096, 100e9),
    "m6_1t": (24, 960, 21_248, 1e12),
    "m6_10t": (48, 10_240, 9984, 10e12),
}


def load(*names: str) -> Experiment:
    return configuration.load(
        [ROOT / "configs" / f"{name}.gin" for name in names],
        ["MODEL_DIR='unused'"],
        [ROOT],
        root=Experiment,
        roots=(Experiment, PlanSettings),
        macros=MACROS,
    ).value


def outside(width: int) -> int:
    return VOCABULARY * width + PATCH * width + width


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_models_by_hand(name):
    layers, experts, ffn, nominal = SPARSE[name]
    experiment = load(f"models/{name}", "runs/plan")
    model = experiment.model
    rest = 4 * WIDTH**2 + WIDTH * experts + 2 * WIDTH  # attention, router, two norms
    layer = rest + experts * 2 * WIDTH * ffn
    real, _ = summary.parameters_by_use(model, experiment.layout(1))
    assert real == outside(WIDTH) + layers * layer
    assert real == pytest.approx(nominal, rel=0.1)
    pseudo, _ = summary.parameters_by_use(model, experiment.layout(0))
    assert pseudo == outside(WIDTH) + layer
    assert (model.embed_dim, model.num_heads) == (WIDTH, 16)


def test_the_dense_model_by_hand():
    experiment = load("models/m6_dense_10b", "runs/plan")
    width, ffn = 4096, 16_384
    real, active = summary.parameters_by_use(experiment.model, experiment.layout(1))
    assert real == outside(width) + 50 * (4 * width**2 + 2 * width + 2 * width * ffn) == active
    assert experiment.model.num_heads == 128


@pytest.mark.parametrize(("name", "unit"), [("real", 48), ("pseudo", 1)])
def test_the_stages_of_the_largest_model(name, unit):
    experiment = load(f"runs/plan_m6_10t_{name}")
    stage = [stage.name for stage in experiment.stages].index(name)
    assert experiment.layout(stage).unit == unit
    assert experiment.offload_of(stage).streamed == (name == "real")
