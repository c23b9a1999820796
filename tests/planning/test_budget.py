"""From a budget of device memory to the fewest layers on the host."""

import planned
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.planning.analytic import estimate
from m6jax.planning.budget import plan_for, resolve
from m6jax.planning.stages import stage_shapes

FULL = {"remat": "FULL"}


def budgeted(device_bytes: int, form: str = "STACKED", **plan):
    offload = OffloadPlan(device_bytes=device_bytes, min_bytes=0, **plan)
    return planned.tiny(model=FULL, stage={"offload": offload, "form": form})


def needs(experiment, plan: OffloadPlan) -> int:
    stage = {"offload": plan, "form": experiment.stages[0].form}
    return estimate(planned.tiny(model=FULL, stage=stage), 0, 1).hbm_bytes_per_device


def test_nothing_is_moved_where_all_fits():
    resolved, tables = resolve(budgeted(10**9), 1)
    assert resolved.offload_of(0) == OffloadPlan(min_bytes=0)
    assert tables[0].startswith("offload  stage real: nothing on the host, for 1.000 GB a device")


@pytest.mark.parametrize("form", list(Form.__members__))
def test_the_fewest_layers_that_fit(form):
    experiment = budgeted(8_500_000, form)
    resolved, tables = resolve(experiment, 1)
    plan = resolved.offload_of(0)
    assert (plan.weights, plan.layers, plan.optimizer_state) == (("",), 2, True)
    one_less = OffloadPlan(weights=("",), layers=1, optimizer_state=True, min_bytes=0)
    assert needs(experiment, plan) <= 8_500_000 < needs(experiment, one_less)
    assert "the last 2 of 4 distinct layers on the host, for 8.500 MB a device" in tables[0]
    assert stage_shapes(resolved, 0, 1).state.params  # the plan can be placed


def test_everything_is_moved_at_the_other_end():
    resolved, tables = resolve(budgeted(3_500_000), 1)
    plan = resolved.offload_of(0)
    assert (plan.weights, plan.layers, plan.optimizer_state) == (("",), None, True)
    lines = {line[9:29].strip(): line[29:].split() for line in tables[0].splitlines()[1:]}
    found = estimate(resolved, 0, 1)
    assert lines["together"] == [
        f"{found.hbm_bytes_per_device / 1e6:.3f}",
        f"{found.host_bytes_per_device / 1e6:.3f}",
    ]
    assert lines["moved a step"] == [f"{found.host_traffic_bytes_per_device / 1e6:.3f}"]
    assert lines["gradients"][1] == f"{found.host.gradients / 1e6:.3f}"


def test_layers_that_share_parameters_go_together():
    whole = estimate(planned.tiny(model=FULL, stage={"unit": 2}), 0, 1).hbm_bytes_per_device
    offload = OffloadPlan(device_bytes=whole - 1, min_bytes=0)
    resolved, tables = resolve(planned.tiny(model=FULL, stage={"unit": 2, "offload": offload}), 1)
    assert resolved.offload_of(0).layers is None
    assert "the last 2 of 2 distinct layers on the host" in tables[0]


def test_what_is_named_is_what_goes():
    plan, _ = plan_for(budgeted(9_000_000, weights=("moe/",)), 0, 1, 9_000_000)
    assert (plan.weights, plan.optimizer_state) == (("moe/",), False)
    state, _ = plan_for(budgeted(9_000_000, optimizer_state=True), 0, 1, 9_000_000)
    assert (state.weights, state.optimizer_state) == ((), True)


def test_a_budget_that_nothing_fits_names_the_smallest_that_does():
    with pytest.raises(ConfigError, match=r"does not fit 1,000,000 bytes a device") as caught:
        resolve(budgeted(1_000_000), 1)
    least = int(str(caught.value).split("that fits is ")[1].split(" ")[0].replace(",", ""))
    resolved, _ = resolve(budgeted(least), 1)
    assert needs(resolved, resolved.offload_of(0)) == least
    with pytest.raises(ConfigError, match="does not fit"):
        resolve(budgeted(least - 1), 1)


def test_without_a_budget_nothing_changes():
    experiment = planned.tiny()
    assert resolve(experiment, 1) == (experiment, {})


def test_weights_on_the_host_need_rematerialisation():
    stage = {"offload": OffloadPlan(device_bytes=12_000_000, min_bytes=0)}
    with pytest.raises(ConfigError, match=r"remat = NOTHING"):
        resolve(planned.tiny(stage=stage), 1)


def test_a_budget_is_resolved_before_anything_is_described():
    with pytest.raises(ConfigError, match="7,000,000 is a budget, which"):
        stage_shapes(budgeted(7_000_000), 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_bytes": 0}, "OffloadPlan.device_bytes: 0; give at least 1"),
        ({"device_bytes": 10**9, "layers": 2}, "1,000,000,000 beside layers = 2"),
    ],
)
def test_budgets_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        OffloadPlan(**changes)
