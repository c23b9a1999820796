"""The compiled engine, and plans from beginning to end."""

import importlib.util
import json
import pathlib

import jax
import planned
import pytest

from m6jax import main
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning import analytic, compiled, hlo, planner, topologies
from m6jax.planning.settings import PlanSettings
from m6jax.planning.topologies import parse
from m6jax.training.train_step import Update

DENSE = {"pattern": ("DENSE",), "moe": None}
QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.gin"


def compile_text(experiment):
    program = StageProgram(experiment, 0, 0, jax.devices()[:1])
    return compiled.compile_step(program, planned.PATCHES).text


@pytest.mark.parametrize(
    "changes",
    [
        {"model": DENSE | {"remat": "ALL_BUT_PRODUCTS"}},
        {"stage": {"unit": 2}},
    ],
    ids=["dense", "shared"],
)
def test_the_engines_agree(changes):
    experiment = planned.tiny(**changes)
    ours = analytic.estimate(experiment, 0, 8)
    theirs = compiled.estimate(experiment, 0, parse("cpu:8"))
    assert ours.parameters_total == theirs.parameters_total
    assert ours.hbm.weights == pytest.approx(theirs.hbm.weights, rel=0.01)
    assert ours.hbm.optimizer_state == pytest.approx(theirs.hbm.optimizer_state, rel=0.01)
    assert ours.host_bytes_per_device == theirs.host_bytes_per_device == 0
    assert ours.flops_per_device == pytest.approx(theirs.flops_per_device, rel=0.05)


def test_the_program_grows_neither_with_depth_nor_with_experts():
    """But for a few constants: with 4 times the layers, and with 4 times the experts."""

    def instructions(layers, experts):
        changes = {"model": {"num_layers": layers}, "moe": {"num_experts": experts}}
        return hlo.measure(compile_text(planned.tiny(**changes))).instructions

    small = instructions(4, 8)
    assert instructions(16, 8) == pytest.approx(small, rel=0.01)
    assert instructions(4, 32) == pytest.approx(small, rel=0.01)


def test_the_compiler_is_asked_again_although_it_remembers(tmp_path):
    """A program out of the cache would come without its text."""
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        experiment = planned.tiny(model=DENSE | {"num_layers": 1})
        texts = [compile_text(experiment) for _ in range(2)]
        assert len(texts[0]) == len(texts[1]) > 1000
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        assert not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)


def test_a_program_without_room_says_what_the_compiler_says(monkeypatch):
    def refuse(message):
        def lower(self, batch):
            class Lowered:
                def compile(self, **options):
                    raise jax.errors.JaxRuntimeError(message)

            return Lowered()

        monkeypatch.setattr(StageProgram, "lower", lower)

    refuse("RESOURCE_EXHAUSTED: Ran out of memory: 152.04G exceeds 31.24G.\nSee elsewhere")
    with pytest.raises(compiled.DoesNotFitError, match=r"does not fit 8 .*152.04G exceeds 31.24G"):
        compiled.estimate(planned.tiny(), 0, parse("cpu:8"))
    refuse("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiled.estimate(planned.tiny(), 0, parse("cpu:8"))


def plan(tmp_path, changes=None, **settings):
    """Returns whether all was answered, what was printed, and plan.json."""
    lines = []
    experiment = planned.tiny(model_dir=str(tmp_path), **(changes or {}))
    done = planner.plan(experiment, PlanSettings(**settings), lines.append)
    return done, "\n".join(lines), json.loads((tmp_path / "plan.json").read_text())


def test_without_libtpu_the_analytic_report_is_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    done, text, document = plan(tmp_path, topology="v6e:2x4", rows_per_device=1)
    assert not done
    assert "device memory, GB a device" in text
    assert "note     not compiled: PlanSettings.topology: to compile for 'v6e:2x4' libtpu" in text
    assert "pip install 'm6jax[plan]'" in text
    assert document["engine"] == "analytic"
    assert document["devices"] == 8


def test_a_number_of_devices_is_nothing_to_compile_for(tmp_path):
    done, text, _ = plan(tmp_path, devices=2)
    assert not done
    assert "PlanSettings.devices = 2 does not say which devices" in text


def test_rows_of_a_device_make_the_batch():
    run = planned.tiny(stage={"batch_size": 16})
    assert planner.with_rows(run, None, 4) is run
    changed = planner.with_rows(run, 3, 4)
    assert changed.rows(0) == changed.batch_size == 12


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"topology": "v6e:2x5"}, r"unknown 'v6e:2x5' \(did you mean 'v6e:2x4'\?\)"),
        ({}, {"topology": "v6e:2x4", "stages": ("reel",)}, r"no stage 'reel' .*'real'"),
        (
            {"partitioning": Partitioning(data=3, expert=5)},
            {"topology": "v6e:2x4"},
            r"data 3 x expert 5 x model 1 does not fit 8 devices",
        ),
    ],
)
def test_what_cannot_be_planned(tmp_path, changes, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, changes, **settings)


def test_the_command_line_plans(tmp_path, capsys):
    arguments = ["--mode=plan", f"--gin_file={QUICKSTART}", f"--gin.MODEL_DIR='{tmp_path}'"]
    settings = ["topology='v6e:2x4'", "engines='ANALYTIC'", "stages=('real',)"]
    asked = [f"--gin.PlanSettings.{setting}" for setting in settings]
    assert main.main([*arguments, *asked]) == 0
    assert "plan     stage real, 8 x v6e" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["parameters_total"] > 0
    wrong = "--gin.PlanSettings.topology='v6e:9x9'"
    assert main.main([*arguments, wrong]) == main.EXIT_BAD_CONFIGURATION
    assert "unknown 'v6e:9x9'" in capsys.readouterr().err


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_the_engines_agree_on_absent_tpus():
    """A dense model, since it compiles in seconds; its weights on the host, streamed."""
    experiment = planned.tiny(
        model=DENSE
        | {"embed_dim": 256, "mlp_dim": 1024, "dtype": "bfloat16", "param_dtype": "bfloat16"},
        stage={"offload": OffloadPlan(weights=("mlp/(up|down)",), streamed=True, min_bytes=0)},
        update={"clip_norm": None},
    )
    assert isinstance(experiment.update, Update)
    ours = analytic.estimate(experiment, 0, 8)
    theirs = compiled.estimate(experiment, 0, parse("v6e:2x4"))
    assert ours.host_bytes_per_device == pytest.approx(theirs.host_bytes_per_device, rel=0.01)
    assert theirs.host_temp_bytes_per_device == 0
    assert ours.flops_per_device == pytest.approx(theirs.flops_per_device, rel=0.05)
    traffic = theirs.host_traffic_bytes_per_device
    assert ours.host_traffic_bytes_per_device == pytest.approx(traffic, rel=0.01)
    assert theirs.platform == "tpu"
    assert theirs.hardware == "v6e"
