"""What to plan: the devices, the engines, and the assumptions that a prediction rests on.

>>> PlanSettings(topology="v6e:16x16", tokens=300_000_000_000, watts_per_device=300.0)

Every number here is printed with what follows from it. Power and carbon intensity differ by a
factor of ten between places, so that they have no default: where they are missing, the report says
which setting to give.
"""

import enum

from m6jax.foundation.validated import ConfigError, validated


class Engines(enum.Enum):
    """Who answers: ANALYTIC from shapes in seconds, COMPILED by compiling the step, or BOTH."""

    ANALYTIC = "analytic"
    COMPILED = "compiled"
    BOTH = "both"


@validated
class PlanSettings:
    """Settings of a plan.

    Attributes:
      topology: named devices to plan for, such as 'v6e:16x16', '2*v6e:16x16' or 'cpu:8'; None: the
        devices that are here.
      devices: number of devices of a plan without a topology; None: as many as there are here.
      hardware: name in `hardware.TABLE`; None: that of the topology. Without a known one nothing is
        said of time, MFU and cost.
      engines: who answers.
      stages: names of the stages to plan; () for all.
      rows_per_device: rows of a batch for each device; None: the batch sizes of the run.
      patches: image patches of a row, for a model that takes them; None: as many as the run's rows
        have room for, or, where no source has pictures, 16 as in M6.
      tokens: tokens to be trained on, for days and device-hours; None: no such lines.
      watts_per_device: power of a device and its share of the host, for energy.
      carbon_g_per_kwh: grams of CO2 a kilowatt-hour, for CO2.
      overhead_of_power: power of the whole site relative to that of its machines (PUE).
      compute_efficiency: share of peak FLOP/s that matrix products reach.
      interconnect_efficiency: share of the links' bandwidth that collectives reach.
      device_memory_efficiency: share of the device memory's bandwidth that a step reaches.
      host_link_efficiency: share of the host link's bandwidth that copies reach.
      usable_memory: share of device and host memory that a program can have.
      search: also try other meshes, units, offload plans and microbatches.
      search_results: how many of the best are printed.
      search_microbatches: numbers of microbatches to try.
    """

    topology: str | None = None
    devices: int | None = None
    hardware: str | None = None
    engines: Engines = Engines.BOTH
    stages: tuple[str, ...] = ()
    rows_per_device: int | None = None
    patches: int | None = None
    tokens: int | None = None
    watts_per_device: float | None = None
    carbon_g_per_kwh: float | None = None
    overhead_of_power: float = 1.0
    compute_efficiency: float = 0.5
    interconnect_efficiency: float = 0.7
    device_memory_efficiency: float = 0.8
    host_link_efficiency: float = 0.7
    usable_memory: float = 0.95
    search: bool = False
    search_results: int = 5
    search_microbatches: tuple[int, ...] = (1, 2, 4, 8)

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be."""
        for field in (
            *("devices", "rows_per_device", "patches", "tokens", "watts_per_device"),
            "search_results",
        ):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"PlanSettings.{field}: {value} is not greater than 0")
        if self.carbon_g_per_kwh is not None and self.carbon_g_per_kwh < 0:
            raise ConfigError(f"PlanSettings.carbon_g_per_kwh: {self.carbon_g_per_kwh} is negative")
        if self.overhead_of_power < 1:
            raise ConfigError(
                f"PlanSettings.overhead_of_power: {self.overhead_of_power}; a site needs at least"
                " what its machines do, 1.0"
            )
        for field in (
            *("compute_efficiency", "interconnect_efficiency", "device_memory_efficiency"),
            *("host_link_efficiency", "usable_memory"),
        ):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(f"PlanSettings.{field}: {getattr(self, field)} is not in (0, 1]")
        if not self.search_microbatches or min(self.search_microbatches) < 1:
            raise ConfigError(
                f"PlanSettings.search_microbatches: {self.search_microbatches}; numbers from 1 are"
                " needed"
            )
        if self.topology is not None and self.devices is not None:
            raise ConfigError(
                f"PlanSettings.devices: {self.devices} beside topology = {self.topology!r}, which"
                " says how many there are (leave one of them out)"
            )
