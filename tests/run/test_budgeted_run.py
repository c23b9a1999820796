"""A whole run whose offload plan follows from a budget."""

import dataclasses

import models
import pytest
import runs

from m6jax.experiment import Stage
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate
from m6jax.run import train

pytestmark = pytest.mark.usefixtures("quick_runs")


def experiment(directory, plan, **changes):
    return runs.experiment(
        runs.write_text(directory),
        directory / "run",
        model=models.tiny(vocab_size=runs.VOCABULARY, remat="FULL"),
        stages=(Stage(name="real", offload=plan),),
        partitioning=Partitioning(data=8),
        sample=None,
        steps=2,
        **changes,
    )


def test_a_run_says_what_it_moves_and_keeps_the_budget_in_its_configuration(tmp_path, capsys):
    one_layer = OffloadPlan(weights=("",), optimizer_state=True, layers=1, min_bytes=0)
    budget = estimate(experiment(tmp_path, one_layer), 0, 8).hbm_bytes_per_device
    run = experiment(tmp_path, OffloadPlan(device_bytes=budget, min_bytes=0))
    assert train.run(run).step == 2
    table = "offload  stage real: the last 1 of 2 distinct layers on the host, for"
    assert table in capsys.readouterr().out
    config = (tmp_path / "run" / "config.gin").read_text()
    assert f"OffloadPlan.device_bytes = {budget}" in config
    assert "OffloadPlan.layers = None" in config

    on = dataclasses.replace(run, steps=3)
    assert train.run(on).step == 3


def test_a_budget_that_nothing_fits_stops_before_compilation(tmp_path):
    run = experiment(tmp_path, OffloadPlan(device_bytes=1000, min_bytes=0))
    with pytest.raises(ConfigError, match="does not fit 1,000 bytes a device"):
        train.run(run)
    with pytest.raises(ConfigError, match="1,000 is a budget"):
        StageProgram(run, 0, 0)
