"""Every configuration that is shipped can be loaded, and its model can be described."""

import pathlib

import pytest

from m6jax import configuration
from m6jax.experiment import Experiment, summary
from m6jax.experiment.model_dir import MACROS
from m6jax.modeling.transformer import Transformer

ROOT = pathlib.Path(__file__).parent.parent
PARTS = {"models", "runs"}  # included by others
RUN = ROOT / "configs" / "runs" / "caption.gin"  # a whole one
WHOLE = [*sorted((ROOT / "configs").glob("*.gin")), RUN]


def test_there_are_configurations():
    assert ROOT / "configs" / "quickstart.gin" in WHOLE


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_configuration_loads_and_repeats_itself(path):
    loaded = configuration.load([path], [], [ROOT], root=Experiment, macros=MACROS)
    experiment = loaded.value
    for i in range(len(experiment.stages)):
        stored, active = summary.parameters_by_use(experiment.model, experiment.layout(i))
        assert stored > 0
        assert active > 0
        experiment.layout(i)


def test_every_part_is_used():
    """By another file, or by hand: models of papers and plans, see tests/planning."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "configs").rglob("*.gin"))
    for directory in PARTS:
        for path in (ROOT / "configs" / directory).glob("*.gin"):
            by_hand = path == RUN or path.name.startswith(("m6_", "plan"))
            assert by_hand or f"include 'configs/{directory}/{path.name}'" in text


def test_the_quick_starts_sizes():
    """The counts of `describe_run` by hand.

    A table of 4000 x 128; in a layer attention of 4 x 128^2, a router of 128 x 16, two norms of 128
    and 16 experts of 2 x 128 x 256; one final norm.
    """
    loaded = configuration.load(
        [ROOT / "configs" / "quickstart.gin"], [], [ROOT], root=Experiment, macros=MACROS
    )
    experiment = loaded.value
    outside = 4000 * 128 + 128
    layer = 4 * 128**2 + 128 * 16 + 2 * 128
    expert = 2 * 128 * 256
    pseudo, real = experiment.stages
    model = experiment.model
    assert summary.parameters_by_use(model, model.layout(1, pseudo.form)) == (
        outside + layer + 16 * expert,
        outside + 4 * (layer + 4 * expert),
    )
    assert summary.parameters_by_use(model, model.layout(4, real.form)) == (
        outside + 4 * (layer + 16 * expert),
        outside + 4 * (layer + 4 * expert),
    )


def test_parts_of_their_own():
    """Norms and routers of all eight layers, four of the rest."""
    loaded = configuration.load(
        [ROOT / "configs" / "quickstart_parts.gin"], [], [ROOT], root=Experiment, macros=MACROS
    )
    experiment = loaded.value
    layout, names = experiment.layout(0), Transformer(experiment.model).layer_names()
    own = {"attention_norm/scale", "mlp_norm/scale", "moe/router/kernel"}
    assert {name for name in names if layout.unit_of(name) == 8} == own
    assert {layout.unit_of(name) for name in names} == {4, 8}
    pseudo = summary.describe_units(experiment.stages[0], experiment.model)
    assert pseudo == "4 (norm|router: 8)"


def test_counts_read_as_people_write_them():
    assert [summary.count(n) for n in (7, 1234, 12_345_678, 10**10, 10**13)] == [
        "7",
        "1.23k",
        "12.3M",
        "10B",
        "10T",
    ]
