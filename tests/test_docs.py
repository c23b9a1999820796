"""Examples in the documentation load as they stand there."""

import pathlib
import re

import pytest

from m6jax import configuration
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import MACROS

ROOT = pathlib.Path(__file__).parent.parent
PART = "configs/runs/pseudo_to_real.gin"
EXAMPLES = re.findall(r"```gin\n(.*?)```", (ROOT / "docs/delinking.md").read_text("utf-8"), re.S)


def load(example, directory):
    """The quick start with an example in the place of its stages."""
    (directory / "stages.gin").write_text(example, encoding="utf-8")
    quickstart = (ROOT / "configs/quickstart.gin").read_text(encoding="utf-8")
    assert f"include '{PART}'" in quickstart
    whole = quickstart.replace(PART, str(directory / "stages.gin"))
    whole = re.sub(r"DELINK_STEP = \d+\n", "", whole)
    (directory / "run.gin").write_text(whole, encoding="utf-8")
    loaded = configuration.load([directory / "run.gin"], [], [ROOT], root=Experiment, macros=MACROS)
    return loaded.value


def test_there_are_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_delinking_loads(number, tmp_path):
    experiment = load(EXAMPLES[number], tmp_path)
    described = configuration.to_gin(experiment, macros=MACROS)
    (tmp_path / "again.gin").write_text(described, encoding="utf-8")
    again = configuration.load([tmp_path / "again.gin"], root=Experiment, macros=MACROS)
    assert again.value == experiment
    last = experiment.layout(len(experiment.stages) - 1)
    assert last.unit == last.depth == 4
    units = [experiment.layout(i).unit_of("moe/up") for i in range(len(experiment.stages))]
    assert units == ([1, 2, 4] if number == 0 else [1, 4])
