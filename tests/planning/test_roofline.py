"""Times of a step, and what a token budget costs, by hand."""

import pytest

from m6jax.planning.cost import cost, describe_cost
from m6jax.planning.estimate import Collective, Estimate, Memory
from m6jax.planning.fit import fit
from m6jax.planning.hardware import TABLE
from m6jax.planning.roofline import roofline
from m6jax.planning.settings import PlanSettings

SETTINGS = PlanSettings(
    topology="v6e:16x16",
    compute_efficiency=0.5,
    device_memory_efficiency=0.25,
    interconnect_efficiency=0.8,
    host_link_efficiency=0.5,
)


def made(**changes):
    fields = {
        "engine": "analytic",
        "stage": "real",
        "devices": 256,
        "mesh": {"data": 1, "expert": 256, "model": 1},
        "hardware": "v6e",
        "positions_per_step": 1000,
        "parameters_total": 10,
        "parameters_active": 10,
        "parameters_by_group": {"experts": 10},
        "hbm": Memory(weights=20 * 10**9, temporaries=5 * 10**9),
        "host": Memory(weights=100 * 10**9),
        "host_temp_bytes_per_device": 0,
        "flops_per_device": 918e12,
        "model_flops_per_device": 459e12,
        "device_traffic_by_part": {"weights": 500 * 10**9, "update": 100 * 10**9},
        "host_traffic_bytes_per_device": 16 * 10**9,
        "collectives": (
            Collective("all-reduce", ("expert",), 16 * 10**9),
            Collective("all-to-all", ("expert",), 4 * 10**9),
            Collective("all-gather", ("expert",), 32 * 10**9),
        ),
    }
    return Estimate(**(fields | changes))


def test_the_times_by_hand():
    times = roofline(made(), TABLE["v6e"], SETTINGS)
    assert times.compute == pytest.approx(2.0)  # 918 T at half of 918 T/s
    assert times.device_memory == pytest.approx(1.5)  # 600 GB at a quarter of 1,600 GB/s
    # (2 x 16 + 32) x 255 / 256 + 4 x 8 GB, over rings of 16 chips, at 0.8 x 400 GB/s
    assert times.interconnect == pytest.approx((64 * 255 / 256 + 32) / 320)
    assert times.interconnect == pytest.approx(sum(times.collectives.values()))
    assert times.links == {
        "expert": "ring of 16 and ring of 16 of the torus 16x16, 400 GB/s",
    }
    assert times.host_link == pytest.approx(1.0)  # 16 GB at half of 32 GB/s
    assert times.binds == "compute"
    assert times.step_seconds == times.compute
    assert times.positions_per_second == pytest.approx(500)
    assert times.mfu == pytest.approx(0.25)  # half of the peak's time, of half of the work
    assert len(times.assumptions) == 5
    assert times.assumptions[1].startswith("device memory: 1,600 GB/s x 0.25 (cloud.google.com")
    assert "assumed" in times.assumptions[3]
    assert times.to_json()["binds"] == "compute"


def test_the_longest_binds():
    traffic = made(host_traffic_bytes_per_device=160 * 10**9)
    assert roofline(traffic, TABLE["v6e"], SETTINGS).binds == "host link"
    exchanged = made(collectives=(Collective("all-to-all", ("expert",), 400 * 10**9),))
    assert roofline(exchanged, TABLE["v6e"], SETTINGS).binds == "interconnect"
    read = roofline(made(device_traffic_by_part={"weights": 10**12}), TABLE["v6e"], SETTINGS)
    assert (read.binds, read.step_seconds) == ("device memory", pytest.approx(2.5))
    assert read.mfu == pytest.approx(0.2)


def test_the_compiled_engine_borrows_what_it_does_not_know():
    compiled = made(engine="compiled", model_flops_per_device=None, device_traffic_by_part=None)
    alone = roofline(compiled, TABLE["v6e"], SETTINGS)
    assert (alone.mfu, alone.device_memory) == (None, None)
    assert list(alone.times) == ["compute", "interconnect", "host link"]
    times = roofline(compiled, TABLE["v6e"], SETTINGS, made())
    assert (times.mfu, times.device_memory) == (pytest.approx(0.25), pytest.approx(1.5))


def test_a_step_that_does_nothing_takes_no_time():
    idle = made(
        flops_per_device=0,
        device_traffic_by_part={},
        host_traffic_bytes_per_device=0,
        collectives=(),
    )
    times = roofline(idle, TABLE["v6e"], SETTINGS)
    assert (times.step_seconds, times.positions_per_second, times.mfu) == (0, 0, None)


def test_cost_by_hand():
    settings = PlanSettings(watts_per_device=500.0, carbon_g_per_kwh=400.0, overhead_of_power=1.2)
    spent = cost(86_400 * 1000, positions_per_second=500, devices=10, settings=settings)
    assert spent.days == pytest.approx(2)
    assert spent.device_hours == pytest.approx(480)
    assert spent.energy_kwh == pytest.approx(480 * 0.5 * 1.2)
    assert spent.co2_kg == pytest.approx(288 * 0.4)
    lines = describe_cost(spent, settings)
    assert lines[0] == "86,400,000 tokens, without padding: 2 days, 480 device-hours"
    assert lines[1] == "energy: 288 kWh (500 W a device, site x 1.2)"
    assert lines[2] == "CO2: 115 kg (400 g a kWh)"


@pytest.mark.parametrize(
    ("given", "energy", "carbon"),
    [
        (
            {},
            "energy: set PlanSettings.watts_per_device",
            "CO2: set PlanSettings.watts_per_device and PlanSettings.carbon_g_per_kwh",
        ),
        (
            {"watts_per_device": 100.0},
            "energy: 2.4 kWh (100 W a device, site x 1)",
            "CO2: set PlanSettings.carbon_g_per_kwh",
        ),
    ],
)
def test_what_is_not_given_is_asked_for(given, energy, carbon):
    settings = PlanSettings(**given)
    spent = cost(86_400, positions_per_second=1, devices=1, settings=settings)
    assert describe_cost(spent, settings)[1:] == [energy, carbon]
    assert spent.to_json()["co2_kg"] is None


def test_fit_says_by_how_much_it_does_not():
    room = fit(made(), TABLE["v6e"], usable=0.95)
    assert room.fits
    assert room.lines()[0] == "fits     25.00 of 30.40 GB of device memory (95% of 32 GB)"
    tight = fit(made(), TABLE["v6e"], usable=0.5)
    assert not tight.fits
    assert (tight.hbm_over, tight.host_over) == (9 * 10**9, 10 * 10**9)
    assert tight.lines()[0] == (
        "over     25.00 of 16.00 GB of device memory (50% of 32 GB): 9.00 GB too much"
    )
    assert tight.to_json()["fits"] is False
    nothing_there = fit(made(host=Memory()), TABLE["v6e"], usable=0.95)
    assert len(nothing_there.lines()) == 1
