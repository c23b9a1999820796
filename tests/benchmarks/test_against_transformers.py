"""Logits of Mixtral and Llama as transformers computed them: benchmarks/against_transformers.py."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "against_transformers.py"
spec = importlib.util.spec_from_file_location("against_transformers", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.mark.parametrize("name", script.NAMES)
def test_logits_are_those_of_transformers(name):
    golden = np.array(json.loads(script.GOLDEN.read_text(encoding="utf-8"))[name])
    config = script.config_of(name)
    layout = config.layout(config.num_layers, "STACKED")
    logits = script.logits_of(config, script.params_of(config, layout), layout)
    np.testing.assert_allclose(logits, golden, rtol=0, atol=script.TOLERANCE)
