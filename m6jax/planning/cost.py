"""What a token budget costs: days, device-hours, energy, CO2.

>>> cost(tokens=7_200_000, positions_per_second=1000.0, devices=2, settings=settings).device_hours
4.0

Padding costs as much as tokens do, so that data with padding costs more by its share.
Energy needs `PlanSettings.watts_per_device`, CO2 also `PlanSettings.carbon_g_per_kwh`: where one is
missing, the line says so.
"""

import dataclasses
from typing import Any

from m6jax.planning.settings import PlanSettings

_SECONDS_A_DAY = 86_400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a token budget costs.

    Attributes:
      tokens: the budget.
      days: time.
      device_hours: time of all devices.
      energy_kwh: None without watts_per_device.
      co2_kg: None without watts_per_device and carbon_g_per_kwh.
    """

    tokens: int
    days: float
    device_hours: float
    energy_kwh: float | None
    co2_kg: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds of it."""
        return dataclasses.asdict(self)


def cost(tokens: int, positions_per_second: float, devices: int, settings: PlanSettings) -> Cost:
    """Returns what so many tokens cost at a speed.

    Args:
      tokens: the budget.
      positions_per_second: of all devices.
      devices: number of devices.
      settings: power and carbon intensity.
    """
    seconds = tokens / positions_per_second
    hours = seconds / 3600 * devices
    energy = carbon = None
    if settings.watts_per_device is not None:
        energy = hours * settings.watts_per_device * settings.overhead_of_power / 1000
        if settings.carbon_g_per_kwh is not None:
            carbon = energy * settings.carbon_g_per_kwh / 1000
    return Cost(
        tokens=tokens,
        days=seconds / _SECONDS_A_DAY,
        device_hours=hours,
        energy_kwh=energy,
        co2_kg=carbon,
    )


def describe_cost(cost: Cost, settings: PlanSettings) -> list[str]:
    """Returns the lines about a cost, each with its assumption or the setting that is missing."""
    days, hours = _number(cost.days), _number(cost.device_hours)
    lines = [f"{cost.tokens:,} tokens, without padding: {days} days, {hours} device-hours"]
    if cost.energy_kwh is None:
        lines.append("energy: set PlanSettings.watts_per_device")
    else:
        power = f"{settings.watts_per_device:g} W a device, site x {settings.overhead_of_power:g}"
        lines.append(f"energy: {_number(cost.energy_kwh)} kWh ({power})")
    if cost.co2_kg is not None:
        lines.append(f"CO2: {_number(cost.co2_kg)} kg ({settings.carbon_g_per_kwh:g} g a kWh)")
        return lines
    missing = [
        f"PlanSettings.{name}"
        for name in ("watts_per_device", "carbon_g_per_kwh")
        if getattr(settings, name) is None
    ]
    return [*lines, f"CO2: set {' and '.join(missing)}"]


def _number(value: float) -> str:
    """Returns three digits at least, and never an exponent where there is a comma."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
