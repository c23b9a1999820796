"""Bytes between a device's memory and its arithmetic: by hand."""

import planned
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate

STREAMED = {"offload": OffloadPlan(weights=("moe/(up|down)",), streamed=True, min_bytes=0)}


def parts(devices=1, **changes):
    return estimate(planned.tiny(**changes), 0, devices, patches=16).device_traffic_by_part


# Products are held to those of the traced step in test_analytic.
def test_a_step_by_hand():
    """One layer of 8 rows of 32: n = 256 positions, M 64, H 128, N D = 64, E 8, Q 2, V 96."""
    found = parts(model={"num_layers": 1})
    n, attention, router, experts, head = 256, 4 * 64 * 64, 64 * 8, 8 * 2 * 64 * 128, 96 * 64
    # Forward, by the input and by the weight: three products, each reads or writes all weights.
    assert found["weights"] == 3 * 4 * (attention + router + experts + head)
    # Query, key, value, output; scores [n, N, T] and their use; the router; an expert's buffer of
    # 2 rows a position, into H and out; the weighted sum, whose backward pass has one product.
    position = (4 * 64 + 4 * 64) + (4 * 64 + 2 * 4 * 32) + (64 + 8) + 2 * 2 * (64 + 128)
    combine, logits = 2 * 64 + 2 + 64, 64 + 96
    assert found["activations"] == 4 * n * (3 * (position + logits) + 2 * combine)
    parameters = attention + router + experts + head + 3 * 64  # and three norms
    # AdamW: weights and two moments, read and written; gradients read twice. And three counters.
    state = 4 * 3 * parameters
    assert found["update"] == pytest.approx(2 * state + 2 * 4 * parameters, abs=2 * 64)
    assert (found["host copies"], found["collectives"]) == (0, 0)


def test_more_positions_read_the_weights_as_often():
    one, two = (parts(batch_size=rows) for rows in (8, 16))
    assert one["weights"] == two["weights"]
    assert 2 * one["activations"] == two["activations"]
    in_parts = parts(batch_size=16, update={"microbatches": 2})
    assert in_parts["weights"] == 2 * two["weights"]


def test_devices_share_the_work():
    whole = parts()
    shared = parts(8, partitioning=Partitioning(data=1, expert=4, model=2))
    assert shared["weights"] < whole["weights"] / 2
    assert shared["activations"] < whole["activations"] / 4
    assert shared["collectives"] > 0


def test_what_comes_from_the_host_is_written_and_read():
    experiment = planned.tiny(stage=STREAMED)
    found = estimate(experiment, 0, 1)
    copies = found.device_traffic_by_part["host copies"]
    assert copies == found.host_traffic_bytes_per_device > 0
    assert found.device_traffic_bytes_per_device == sum(found.device_traffic_by_part.values())
