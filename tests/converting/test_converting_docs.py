"""The example in docs/converting.md loads as it stands there."""

import pathlib
import re

from m6jax import configuration
from m6jax.experiment import Experiment, Initial
from m6jax.experiment.model_dir import MACROS

ROOT = pathlib.Path(__file__).parents[2]


def test_the_example_of_a_beginning_loads_and_repeats_itself(tmp_path):
    text = (ROOT / "docs" / "converting.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```gin\n(.*?)```", text, re.S)
    (tmp_path / "run.gin").write_text(example, encoding="utf-8")
    loaded = configuration.load([tmp_path / "run.gin"], [], [ROOT], root=Experiment, macros=MACROS)
    assert loaded.value.initial == Initial(model_dir="runs/pseudo")
    assert loaded.value.stage_number(None, "") == 1
    (tmp_path / "again.gin").write_text(loaded.text, encoding="utf-8")
    again = configuration.load([tmp_path / "again.gin"], root=Experiment, macros=MACROS)
    assert again.value == loaded.value
