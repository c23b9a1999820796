"""A plan says what would fit, and what would be faster."""

import dataclasses
import json

import planned
import pytest

from m6jax.experiment import Stage
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.planner import plan
from m6jax.planning.settings import PlanSettings
from m6jax.pseudo_to_real.triggers import AtStep

SETTINGS = PlanSettings(engines="ANALYTIC", devices=8, hardware="v6e", search_microbatches=(1,))
FULL = {"remat": "FULL"}


def test_a_plan_that_does_not_fit_says_what_would(tmp_path):
    said = []
    experiment = planned.tiny(model=FULL | {"mlp_dim": 2**19}, model_dir=str(tmp_path))
    assert not plan(experiment, SETTINGS, said.append)
    text = "\n".join(said)
    assert "over     " in text
    assert "note     it does not fit; it would fit with OffloadPlan.optimizer_state = True" in text
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["fit"]["fits"] is False
    assert document["stages"][0]["notes"][0].startswith("it does not fit; it would fit with")


def test_a_search_plans_the_best_again(tmp_path):
    said = []
    experiment = planned.tiny(model=FULL, model_dir=str(tmp_path))
    settings = dataclasses.replace(SETTINGS, search=True)
    assert plan(experiment, settings, said.append)
    given, found, best, _ = said
    assert given.startswith("plan     stage real, 8 x v6e (data 8 x expert 1 x model 1)")
    assert found.startswith("search   ")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert len(document["stages"]) == 2
    for axis, size in document["mesh"].items():
        assert f"partitioning.Partitioning.{axis} = {size}" in found
        assert f"{axis} {size}" in best.splitlines()[0]
    first, second = (stage["analytic"]["roofline"] for stage in document["stages"])
    assert second["step_seconds"] <= first["step_seconds"]


def test_unknown_hardware_is_said_once(tmp_path):
    stages = (Stage(name="a", until=AtStep(step=4)), Stage(name="b"))
    experiment = planned.tiny(stages=stages, model_dir=str(tmp_path))
    said = []
    assert plan(experiment, dataclasses.replace(SETTINGS, hardware=None), said.append)
    text = "\n".join(said)
    assert text.count("unknown hardware: nothing is said of fit, time, MFU and cost") == 1
    assert "PlanSettings.hardware to one of v4, v5e" in text
    assert text.count("plan     stage") == 2


def test_arithmetic_that_the_peak_is_not_of_is_said(tmp_path):
    for dtype, times in (("float32", 1), ("bfloat16", 0)):
        said = []
        experiment = planned.tiny(model={"dtype": dtype}, model_dir=str(tmp_path))
        assert plan(experiment, SETTINGS, said.append)
        assert "\n".join(said).count("peak: of products in bfloat16; the model's are") == times


def test_a_search_needs_known_hardware(tmp_path):
    settings = dataclasses.replace(SETTINGS, search=True, hardware=None)
    with pytest.raises(ConfigError, match=r"ranked by time, of which nothing is known"):
        plan(planned.tiny(model_dir=str(tmp_path)), settings, lambda text: None)


def test_hardware_beside_a_topology_of_other_chips_is_refused(tmp_path):
    experiment = planned.tiny(model_dir=str(tmp_path))
    both = PlanSettings(engines="ANALYTIC", topology="v5e:2x4", hardware="H100")
    with pytest.raises(ConfigError, match=r"'H100' beside topology = 'v5e:2x4', .* are v5e"):
        plan(experiment, both, lambda text: None)
    assert plan(experiment, dataclasses.replace(both, hardware="v5e"), lambda text: None)
    assert plan(experiment, dataclasses.replace(both, topology="cpu:8"), lambda text: None)


def test_twice_the_gpus_keep_the_experts_in_one_machine(tmp_path):
    """8 and 16 H100, 8 experts: each device has as many rows, and the exchange stays inside."""
    found = {}
    for machines in (1, 2):
        where = Partitioning(data=machines, expert=8)
        experiment = planned.tiny(
            partitioning=where, batch_size=8 * machines, model_dir=str(tmp_path)
        )
        settings = PlanSettings(engines="ANALYTIC", devices=8 * machines, hardware="H100")
        assert plan(experiment, settings, lambda text: None)
        found[machines] = json.loads((tmp_path / "plan.json").read_text())["roofline"]
    exchange = "all-to-all over expert"
    assert found[1]["collectives"][exchange] == found[2]["collectives"][exchange]
    assert found[2]["links"]["expert"] == "inside a machine of 8, 450 GB/s"
    assert found[2]["links"]["data"] == "between 2 machines, 50 GB/s"


def test_a_plan_resolves_budgets(tmp_path):
    said = []
    experiment = planned.tiny(
        model=FULL,
        stage={"offload": OffloadPlan(device_bytes=6_000_000, min_bytes=0)},
        model_dir=str(tmp_path),
    )
    assert plan(experiment, SETTINGS, said.append)
    assert said[0].startswith("offload  stage real: the last ")
    assert json.loads((tmp_path / "plan.json").read_text())["hbm_bytes_per_device"] <= 6_000_000
