"""The report for people and plan.json."""

import dataclasses
import json

import planned
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.planning.analytic import estimate
from m6jax.planning.report import StagePlan, render, to_json, write
from m6jax.planning.settings import PlanSettings

SETTINGS = PlanSettings(topology="v6e:2x4", tokens=10**9)
KEYS = {
    *("parameters_total", "parameters_active", "devices", "hbm_bytes_per_device"),
    *("host_bytes_per_device", "host_temp_bytes_per_device", "flops_per_device"),
    *("host_traffic_bytes_per_device", "collective_bytes_per_device", "compile_seconds", "engine"),
}


@pytest.fixture(scope="module")
def both():
    analytic = estimate(planned.tiny(), 0, 8, hardware="v6e")
    compiled = dataclasses.replace(
        analytic,
        engine="compiled",
        platform="tpu",
        model_flops_per_device=None,
        flops_by_part=None,
        device_traffic_by_part=None,
        compile_seconds=12.5,
        assumptions=("as the compiler says",),
    )
    return StagePlan(analytic=analytic, compiled=compiled, notes=("something to know",))


def line(text: str, label: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(label)]
    return found


def test_engines_stand_side_by_side(both):
    text = render([both], SETTINGS)
    first = text.splitlines()[0]
    assert first == (
        "plan     stage real, 8 x v6e (data 8 x expert 1 x model 1), 256 positions a step"
    )
    assert text.splitlines()[1].split() == ["analytic", "compiled"]
    assert line(text, "parameters").split()[1:] == ["598.6k", "598.6k"]
    assert line(text, "compile, s").split()[2:] == ["-", "12"]
    assert line(text, "  asked for by the model").split()[-1] == "-"
    assert line(text, "  all-reduce over data").split()[3:] == ["0.002", "0.002"]
    assert line(text, "link").startswith("link     over data: line of 2 and line of 4 of the torus")
    assert line(text, "device traffic, GB").split()[-1] == "-"
    assert line(text, "  update").split()[-1] == "-"
    # The analytic engine lends what the compiled one does not know.
    first, second = line(text, "  device memory, s").split()[3:]
    assert first == second
    assert "*" in line(text, "  interconnect, s")
    assert line(text, "MFU").count("%") == 2
    assert line(text, "fits").startswith("fits     0.01 of 30.40 GB of device memory")
    assert "cost     energy: set PlanSettings.watts_per_device" in text
    assert "assumed  as the compiler says" in text
    assert text.splitlines()[-1] == "note     something to know"


def test_unknown_hardware_has_no_mfu(both):
    unknown = StagePlan(analytic=dataclasses.replace(both.analytic, hardware=None))
    text = render([unknown], SETTINGS)
    for word in ("MFU", "/s", "fits", "cost"):
        assert word not in text
    assert not {"roofline", "fit", "cost"} & to_json([unknown], SETTINGS).keys()


def test_without_a_budget_there_is_no_cost(both):
    text = render([both], PlanSettings(topology="v6e:2x4"))
    assert "cost" not in text
    assert "cost" not in to_json([both], PlanSettings(topology="v6e:2x4"))


def test_plan_json(both, tmp_path):
    other = StagePlan(analytic=both.analytic)
    path = write(str(tmp_path / "run"), [other, both], SETTINGS)
    document = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert path == str(tmp_path / "run" / "plan.json")
    assert set(document) >= KEYS
    (sums,) = document["collectives"]
    assert sums == {"kind": "all-reduce", "axes": ["data"], "bytes": sums["bytes"]}
    assert document["engine"] == "compiled"
    assert document["fit"]["fits"] is True
    assert document["roofline"]["binds"] == "interconnect"
    assert document["cost"]["tokens"] == 10**9
    assert [set(stage) for stage in document["stages"]] == [
        {"stage", "notes", "analytic"},
        {"stage", "notes", "analytic", "compiled"},
    ]
    assert set(document["stages"][1]["analytic"]) >= KEYS
    assert document["stages"][1]["notes"] == ["something to know"]


def test_a_directory_that_cannot_be_written(both, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"MODEL_DIR: .*file.* cannot be written"):
        write(str(tmp_path / "file"), [both], SETTINGS)
