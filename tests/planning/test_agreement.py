"""Both engines on one step: what they must agree on."""

import planned
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning import analytic, compiled
from m6jax.planning.topologies import parse


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model": {"remat": "FULL"},
            "stage": {"offload": OffloadPlan(optimizer_state=True, min_bytes=0)},
            "partitioning": Partitioning(data=2, expert=4),
        },
        {
            "model": {"num_layers": 2, "gated_mlp": True, "patch_dim": 24},
            "stage": {
                "offload": OffloadPlan(weights=("moe/(up|down)",), streamed=True, min_bytes=0)
            },
            "partitioning": Partitioning(data=1, expert=4, model=2),
        },
    ],
)
def test_the_engines_agree(changes):
    experiment = planned.tiny(**changes)
    ours = analytic.estimate(experiment, 0, 8, patches=planned.PATCHES)
    theirs = compiled.estimate(experiment, 0, parse("cpu:8"), patches=planned.PATCHES)
    assert ours.parameters_by_group == theirs.parameters_by_group
    assert ours.parameters_active == theirs.parameters_active
    assert ours.hbm.weights == pytest.approx(theirs.hbm.weights, rel=0.01)
    assert ours.hbm.optimizer_state == pytest.approx(theirs.hbm.optimizer_state, rel=0.01)
    assert ours.host.weights == pytest.approx(theirs.host.weights, rel=0.01)
    assert ours.host.optimizer_state == pytest.approx(theirs.host.optimizer_state, rel=0.01)
    assert ours.flops_per_device == pytest.approx(theirs.flops_per_device, rel=0.05)
    (mine,), (exchanged,) = (
        [c for c in e.collectives if c.kind == "all-to-all"] for e in (ours, theirs)
    )
    assert mine.axes == exchanged.axes == ("expert",)
    assert mine.bytes == pytest.approx(exchanged.bytes, rel=0.01)
