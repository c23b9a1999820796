"""The analytic engine: numbers by hand, and against what the traced step really asks for."""

import dataclasses
import json
import time
from typing import Any

import planned
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import LayerKind, ModelConfig, MoEConfig
from m6jax.planning import traced
from m6jax.planning.analytic import estimate
from m6jax.planning.estimate import Collective
from m6jax.planning.flops import active_experts, forward_flops
from m6jax.planning.stages import bytes_of, parameters_by_group, stage_shapes

EXPERTS = ("moe/(up|down)",)
FULL, PRODUCTS = {"remat": "FULL"}, {"remat": "ALL_BUT_PRODUCTS"}


def on_host(**changes: Any) -> dict[str, Any]:
    return {"offload": OffloadPlan(weights=EXPERTS, min_bytes=0, **changes)}


STREAMED = on_host(streamed=True)


def test_flops_of_a_layer_by_hand():
    # d = 64, FFN 256, two matrices, top-2 of 8: 2 experts x 2 matrices x 2 x 64 x 256.
    model = ModelConfig(
        vocab_size=16,
        num_layers=1,
        embed_dim=64,
        num_heads=4,
        mlp_dim=256,
        moe=MoEConfig(num_experts=8, num_selected_experts=2),
    )
    flops = forward_flops(model, LayerKind.SPARSE, length=10)
    assert flops["experts"] == 131_072
    assert flops["router"] == 1_024
    assert flops["attention"] == 4 * 2 * 64 * 64
    assert flops["scores"] == 2 * 2 * 10 * 64
    gated = dataclasses.replace(model, gated_mlp=True)
    assert forward_flops(gated, LayerKind.SPARSE, length=10)["experts"] == 3 * 65_536


@pytest.mark.parametrize(
    ("settings", "experts"),
    [
        ({"capacity_factor": 1.25}, 4.0),
        ({"capacity_factor": None}, 4.0),
        ({"capacity_factor": 0.5}, 2.0),
        ({"capacity_factor": 1.5, "capacity_mode": "ONE_X"}, 1.5),
    ],
)
def test_a_token_really_gets_so_many_experts(settings, experts):
    moe = MoEConfig(num_experts=8, num_prototypes=2, num_selected_experts=2, **settings)
    assert active_experts(moe) == experts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": FULL},
        {"model": PRODUCTS, "update": {"microbatches": 2}},
        {"stage": STREAMED},
        {"stage": STREAMED | {"unit": 2}, "model": FULL | {"dtype": "bfloat16"}},
        {"stage": STREAMED, "model": PRODUCTS | {"pattern": ("SPARSE", "DENSE")}},
        {"model": FULL | {"pattern": ("DENSE",), "gated_mlp": True, "patch_dim": 24}},
        {
            "model": FULL
            | {
                "pattern": ("SPARSE", "DENSE"),
                "sandwich_norm": True,
                "num_kv_heads": 2,
                "tied_output": False,
            },
            "moe": {"num_shared_experts": 1},
        },
    ],
)
def test_products_are_those_of_the_traced_step(changes):
    experiment = planned.tiny(**changes)
    step, found = planned.traced(experiment), estimate(experiment, 0, 1)
    assert found.flops_per_device == pytest.approx(traced.product_flops(step), rel=1e-3)
    touched = found.device_traffic_by_part["weights"] + found.device_traffic_by_part["activations"]
    assert touched == pytest.approx(traced.product_bytes(step), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": FULL, "stage": on_host()},
        {"model": FULL, "stage": on_host(), "update": {"microbatches": 2}},
        {"model": FULL, "stage": on_host() | {"unit": 2}},
        {"model": FULL, "stage": on_host(optimizer_state=True, activations=True, layers=2)},
        {"stage": on_host(streamed=True, optimizer_state=True, activations=True)},
        {"stage": STREAMED | {"form": "UNROLLED"}},
        {"stage": on_host(streamed=True, layers=(0, 1))},
        {"stage": STREAMED | {"unit": 2, "parts": (Part(pattern="moe/up", unit=1),)}},
    ],
)
def test_host_traffic_is_that_of_the_traced_step(changes):
    experiment = planned.tiny(**changes)
    moved = traced.moved_bytes(planned.traced(experiment))
    assert estimate(experiment, 0, 1).host_traffic_bytes_per_device == moved > 0


def test_sharing_counts_every_use():
    whole, shared = (
        estimate(planned.tiny(model=FULL, stage={"unit": unit}), 0, 1) for unit in (4, 1)
    )
    assert shared.flops_per_device == whole.flops_per_device
    assert shared.model_flops_per_device == whole.model_flops_per_device
    assert shared.parameters_active == whole.parameters_active
    assert shared.parameters_total < whole.parameters_total


def test_model_flops_leave_recomputation_and_empty_rows_out():
    plain = estimate(planned.tiny(moe={"capacity_factor": 2.0}), 0, 1)
    full = estimate(planned.tiny(model=FULL, moe={"capacity_factor": 2.0}), 0, 1)
    assert plain.model_flops_per_device == full.model_flops_per_device
    assert plain.model_flops_per_device < plain.flops_per_device < full.flops_per_device


def test_state_is_cut_by_mesh_and_memory():
    experiment = planned.tiny(
        stage=STREAMED, partitioning=Partitioning(data=2, expert=4), model=FULL
    )
    found = estimate(experiment, 0, 8)
    # 4 layers x 8 experts x two matrices of 64 x 128 float32, a fourth of the experts a device.
    assert found.host.weights == 4 * 8 * 2 * 64 * 128 * 4 // 4
    shapes = stage_shapes(experiment, 0, 8)
    assert found.hbm.weights == bytes_of(shapes.state.params, host=False)
    assert found.hbm.weights + found.hbm.optimizer_state == bytes_of(shapes.state, host=False)
    assert found.parameters_by_group == parameters_by_group(shapes.state.params)
    assert found.parameters_by_group["experts"] == 4 * 8 * 2 * 64 * 128
    assert sum(found.parameters_by_group.values()) == found.parameters_total


def test_gradients_exist_once_or_for_one_layer():
    ordinary, parts, streamed = (
        estimate(planned.tiny(**changes), 0, 1)
        for changes in ({}, {"update": {"microbatches": 2}}, {"stage": STREAMED})
    )
    assert ordinary.hbm.gradients == ordinary.hbm.weights
    assert parts.hbm.gradients == 2 * ordinary.hbm.gradients
    rest = 96 * 64 * 4 + 64 * 4  # table and last norm
    assert streamed.hbm.gradients == rest + (ordinary.hbm.gradients - rest) // 4


def test_activations_follow_rematerialisation_and_offload():
    nothing, products, full, host = (
        estimate(planned.tiny(**changes), 0, 1)
        for changes in (
            {},
            {"model": PRODUCTS},
            {"model": FULL},
            {"model": FULL, "stage": {"offload": OffloadPlan(activations=True, min_bytes=0)}},
        )
    )
    assert nothing.hbm.activations > products.hbm.activations > full.hbm.activations
    inputs = 4 * 8 * 32 * 64 * 4  # L x B x T x M float32
    assert full.hbm.activations - host.hbm.activations == inputs == host.host.activations
    assert host.host_temp_bytes_per_device == inputs


def test_microbatches_make_temporaries_smaller():
    whole = estimate(planned.tiny(), 0, 1).hbm.temporaries
    assert estimate(planned.tiny(update={"microbatches": 4}), 0, 1).hbm.temporaries < whole / 2


def test_collectives_by_hand():
    # Every device has all weights: one sum of all gradients.
    alone = estimate(planned.tiny(partitioning=Partitioning(data=8)), 0, 8)
    assert alone.collectives == (Collective("all-reduce", ("data",), alone.hbm.weights),)

    spread = estimate(planned.tiny(partitioning=Partitioning(data=1, expert=8)), 0, 8)
    # 32 tokens a device, 2 experts each at factor 1, M 64 float32; there and back, in two passes.
    sent = 4 * 2 * 2 * (32 * 2 * 64 * 4)
    exchanged = [c for c in spread.collectives if c.kind == "all-to-all"]
    assert exchanged == [Collective("all-to-all", ("expert",), sent)]
    assert estimate(planned.tiny(), 0, 1).collectives == ()


def test_collectives_of_fully_sharded_weights():
    where = Partitioning(data=8, fully_sharded=True)
    found = estimate(planned.tiny(model=FULL, partitioning=where), 0, 8)
    whole = estimate(planned.tiny(), 0, 1).hbm.weights
    assert found.collective_bytes("reduce-scatter") == whole
    assert found.collective_bytes("all-gather") == 2 * whole
    assert {c.axes for c in found.collectives if c.kind != "all-reduce"} == {("data",)}


@pytest.mark.parametrize("pattern", [("SPARSE",), ("DENSE",)])
def test_collectives_of_cut_heads_and_width(pattern):
    where = Partitioning(data=1, model=4)
    found = estimate(planned.tiny(model={"pattern": pattern}, partitioning=where), 0, 4)
    x = 8 * 32 * 64 * 4
    # A layer: 4 for the heads, 2 for the FFN; outside: the head's gradient and the table's rows.
    assert found.collectives == (Collective("all-reduce", ("model",), (4 * 6 + 2) * x),)


def test_ten_trillion_parameters_in_seconds_and_as_compiled():
    """The compiled bytes are those of docs/offload.md, from libtpu 0.0.52."""
    begin = time.process_time()
    found = {n: estimate(planned.ten_trillion(n), 0, n, hardware="v6e") for n in (256, 128)}
    assert time.process_time() - begin < 10
    assert found[256].parameters_total == pytest.approx(10.05e12, rel=1e-3)
    for n, device, host, moved in (
        (256, 11.18e9, 78.52e9, 237.2e9),
        (128, 15.96e9, 157.03e9, 474.4e9),
    ):
        assert found[n].hbm_bytes_per_device == pytest.approx(device, rel=0.1)
        assert found[n].host_bytes_per_device == pytest.approx(host, rel=1e-3)
        assert found[n].host_traffic_bytes_per_device == pytest.approx(moved, rel=1e-3)
        assert found[n].host_temp_bytes_per_device == 0


def test_an_estimate_is_json():
    document = estimate(planned.tiny(), 0, 8, hardware="v6e").to_json()
    assert json.loads(json.dumps(document)) == document
    assert document["engine"] == "analytic"
    assert document["compile_seconds"] is None
    assert document["hbm_bytes_per_device"] == sum(v or 0 for v in document["hbm"].values())
    assert document["mesh"] == {"data": 8, "expert": 1, "model": 1}


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"8 rows do not divide into 2 microbatches over the 8"):
        estimate(planned.tiny(update={"microbatches": 2}), 0, 8)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="groups of 64 tokens do not divide the 1 rows of 32"):
        estimate(planned.tiny(moe={"group_size": 64}), 0, 8)


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="does not fit 12 devices"):
        estimate(planned.tiny(partitioning=Partitioning(data=8)), 0, 12)


def test_another_mesh_refuses_what_does_not_divide():
    shapes = stage_shapes(planned.tiny(batch_size=48), 0, 1)
    with pytest.raises(
        ConfigError, match=r"moe/down: dimension 1 = 8 does not divide .* expert = 3"
    ):
        shapes.on_mesh(Partitioning(data=1, expert=3), 3)
    moved = shapes.on_mesh(Partitioning(data=2, expert=4), 8)
    direct = stage_shapes(
        planned.tiny(batch_size=48, partitioning=Partitioning(data=2, expert=4)), 0, 8
    )
    assert bytes_of(moved.state, host=False) == bytes_of(direct.state, host=False)
