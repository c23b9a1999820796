"""The search over combinations, and the smallest change that fits."""

import dataclasses

import planned
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.advice import smallest_change
from m6jax.planning.analytic import estimate_shapes
from m6jax.planning.fit import fit
from m6jax.planning.hardware import TABLE
from m6jax.planning.search import applied, bindings, describe_search, search
from m6jax.planning.settings import PlanSettings
from m6jax.planning.stages import stage_shapes

SETTINGS = PlanSettings(search=True, search_microbatches=(1, 2), search_results=3)
FULL = {"remat": "FULL"}


def chip(hbm: float, host: float = 1e9):
    """A v6e with memories of other sizes, in bytes."""
    v6e = TABLE["v6e"]
    return dataclasses.replace(
        v6e,
        hbm_bytes=dataclasses.replace(v6e.hbm_bytes, value=hbm),
        host_bytes=dataclasses.replace(v6e.host_bytes, value=host),
    )


def test_what_fits_is_ranked_by_time():
    found = search(planned.tiny(model=FULL), 0, 8, chip(1e9), SETTINGS)
    own = [candidate for candidate in found.best if candidate.unit == 4]
    assert len(own) == 3
    times = [candidate.times.step_seconds for candidate in own]
    assert times == sorted(times)
    assert [candidate.unit for candidate in found.best[3:]] == [1]
    assert found.tried > found.fitting / 2 > 10
    assert all(candidate.fit.fits for candidate in found.best)


def test_meshes_units_plans_and_microbatches_are_tried():
    settings = dataclasses.replace(SETTINGS, search_results=10_000)
    found = search(planned.tiny(model=FULL), 0, 8, chip(1e9), settings)
    shapes = [candidate.shapes for candidate in found.best if candidate.unit == 4]
    wheres = {s.partitioning.mesh_shape(8) for s in shapes}
    assert {(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2)} <= wheres
    assert (1, 1, 8) not in wheres  # 4 heads
    assert {s.partitioning.fully_sharded for s in shapes} == {False, True}
    assert {s.microbatches for s in shapes} == {1, 2}
    assert {s.plan for s in shapes} >= {OffloadPlan(), OffloadPlan(streamed=True)}


def test_little_memory_asks_for_the_host():
    experiment = planned.tiny(model=FULL | {"mlp_dim": 4096}, batch_size=16)
    roomy, tight = (search(experiment, 0, 8, chip(hbm), SETTINGS) for hbm in (1e9, 12e6))
    assert not roomy.best[0].shapes.plan.uses_host
    assert tight.best[0].shapes.plan.optimizer_state
    assert tight.fitting < roomy.fitting


def test_as_few_layers_as_fit_go_to_the_host():
    experiment = planned.tiny(model=FULL | {"mlp_dim": 16_384})
    settings = dataclasses.replace(SETTINGS, search_results=10_000)
    found = search(experiment, 0, 1, chip(700e6, 10e9), settings)
    some = [c for c in found.best if c.shapes.plan.layers is not None]
    assert {c.shapes.plan.streamed for c in some} == {False, True}
    for candidate in some:
        layers = candidate.shapes.plan.layers
        assert 1 <= layers <= 3
        assert f"real/layouts.OffloadPlan.layers = {layers}" in bindings(candidate, "real")
        assert f"of the last {layers} layers" in describe_search(found, "real")
        if layers > 1:
            less = dataclasses.replace(candidate.shapes.plan, layers=layers - 1)
            more = estimate_shapes(candidate.shapes.with_plan(less)).hbm_bytes_per_device
            assert more > 0.95 * 700e6


def test_bindings_make_the_best():
    experiment = planned.tiny(model=FULL | {"mlp_dim": 4096}, batch_size=16)
    found = search(experiment, 0, 8, chip(12e6), SETTINGS)
    lines = bindings(found.best[0], "real")
    where = found.best[0].shapes.partitioning
    assert lines[0] == f"partitioning.Partitioning.data = {where.data}"
    assert "real/experiment.Stage.unit = 4" in lines
    assert "real/experiment.Stage.offload = @real/layouts.OffloadPlan()" in lines
    assert "real/layouts.OffloadPlan.optimizer_state = True" in lines
    text = describe_search(found, "real")
    assert text.startswith(f"search   {found.tried:,} tried, {found.fitting:,} fit")
    assert all(line in text for line in lines)
    assert "on the host: " in text
    every = dataclasses.replace(SETTINGS, search_results=10_000)
    roomy = search(experiment, 0, 8, chip(1e9), every).best
    plain = next(c for c in roomy if c.shapes.plan == OffloadPlan())
    assert bindings(plain, "real")[-1] == "real/experiment.Stage.offload = None"


def test_the_best_can_be_planned_again():
    experiment = planned.tiny(model=FULL)
    best = search(experiment, 0, 8, chip(1e9), SETTINGS).best[0]
    run = applied(experiment, 0, best)
    assert run.mesh_of(0) == best.shapes.partitioning
    again = estimate_shapes(stage_shapes(run, 0, 8), "v6e")
    assert again == best.estimate


def test_parts_with_units_of_their_own_stay():
    experiment = planned.tiny(stage={"unit": 2, "parts": (Part(pattern="moe/up", unit=1),)})
    found = search(experiment, 0, 1, chip(1e9), SETTINGS)
    assert {candidate.unit for candidate in found.best} == {2}


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"none of \d+ combinations fits 8 x v6e; the closest"):
        search(planned.tiny(model=FULL), 0, 8, chip(1e5), SETTINGS)


def test_no_mesh_divides():
    with pytest.raises(ConfigError, match="no mesh of 7 devices divides the rows"):
        search(planned.tiny(), 0, 7, chip(1e9), SETTINGS)


@pytest.mark.parametrize(
    ("changes", "plan", "memories", "words"),
    [
        ({}, {}, (13e6,), "OffloadPlan.optimizer_state = True"),
        ({}, {}, (12e6,), "ModelConfig.remat = 'FULL'"),
        ({"model": FULL}, {"optimizer_state": True}, (6.8e6,), "OffloadPlan.activations = True"),
        (
            {"model": FULL, "batch_size": 256},
            {"optimizer_state": True, "activations": True},
            (20e6,),
            "Update.microbatches = 8:",
        ),
        ({"model": FULL}, {"optimizer_state": True}, (5.8e6,), "layers = 3:"),
        ({"model": FULL}, {}, (4.1e6, 7.5e6), "optimizer_state = True, streamed = True"),
        ({"model": FULL, "update": {"clip_by": "GLOBAL"}}, {}, (4.1e6, 7.5e6), "clip_by = 'LAYER'"),
        (
            {"model": FULL},
            {},
            (5.5e6, 1e5),
            "4 devices with as many rows each, Partitioning.expert",
        ),
        (
            {"model": FULL | {"pattern": ("DENSE",), "moe": None}},
            {},
            (2.4e6, 1e5),
            ", fully_sharded = True",
        ),
    ],
)
def test_the_smallest_change_that_fits(changes, plan, memories, words):
    settings = PlanSettings(usable_memory=1.0)
    stage = {"offload": OffloadPlan(**plan, min_bytes=0)}
    shapes = stage_shapes(planned.tiny(**changes, stage=stage), 0, 1)
    assert not fit(estimate_shapes(shapes), chip(*memories), settings.usable_memory).fits
    found = smallest_change(shapes, chip(*memories), settings)
    assert found.startswith("it would fit with ")
    assert words in found
    assert "GB on the device" in found


def test_no_change_is_enough():
    shapes = stage_shapes(planned.tiny(partitioning=Partitioning(data=1)), 0, 1)
    assert smallest_change(shapes, chip(1e3), SETTINGS).startswith("nothing here makes it fit")
