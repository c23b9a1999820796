"""What PlanSettings refuses."""

import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.planning.settings import Engines, PlanSettings


def test_an_engine_is_named():
    assert PlanSettings(engines="ANALYTIC").engines is Engines.ANALYTIC


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "PlanSettings.devices: 0 is not greater than 0"),
        ({"tokens": -1}, "PlanSettings.tokens: -1"),
        ({"watts_per_device": 0.0}, "PlanSettings.watts_per_device: 0.0"),
        ({"search_results": 0}, "PlanSettings.search_results: 0"),
        ({"carbon_g_per_kwh": -5.0}, "PlanSettings.carbon_g_per_kwh: -5.0 is negative"),
        ({"overhead_of_power": 0.9}, "a site needs at least what its machines do"),
        ({"compute_efficiency": 1.5}, r"compute_efficiency: 1.5 is not in \(0, 1\]"),
        ({"device_memory_efficiency": 0.0}, r"device_memory_efficiency: 0.0 is not in \(0, 1\]"),
        ({"usable_memory": 0.0}, r"usable_memory: 0.0 is not in \(0, 1\]"),
        ({"search_microbatches": ()}, "numbers from 1 are needed"),
        ({"search_microbatches": (1, 0)}, "numbers from 1 are needed"),
        ({"topology": "v6e:2x4", "devices": 8}, "PlanSettings.devices: 8 beside topology"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        PlanSettings(**changes)
