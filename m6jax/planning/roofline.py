"""How fast a step could be: the times that each part of a device would need alone.

    compute         executed FLOPs / (peak x efficiency)
    device memory   bytes read and written there / (bandwidth x efficiency)
    interconnect    bytes on the links / (bandwidth x efficiency)
    host link       bytes between host and device / (bandwidth x efficiency)

All are taken to go on at once, so that the longest is the step's time, and binds it. It is a bound
from below under stated efficiencies, not a forecast.

Which links a collective uses follows from where the devices of its mesh axes lie, see `links`:
inside a machine, between machines, along sides of a torus. Bytes to and from the host share the
bandwidth of one direction.

>>> roofline(estimate, find("v6e"), settings).binds
'host link'
"""

import dataclasses
from typing import Any

from m6jax.planning import topologies
from m6jax.planning.estimate import Estimate
from m6jax.planning.hardware import Hardware
from m6jax.planning.links import Links
from m6jax.planning.settings import PlanSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times of a step in seconds, and what follows from them.

    Attributes:
      compute: for the matrix products.
      device_memory: for what is read from it and written to it; None if that is unknown.
      interconnect: for the collectives.
      host_link: for the copies between host and device.
      positions_per_second: of all devices.
      mfu: share of the peak that the model's own FLOPs are; None if these are unknown.
      collectives: seconds of each collective by its name; they take turns.
      links: which links the collectives over each choice of mesh axes use, in words.
      assumptions: what was assumed, one line each.
    """

    compute: float
    device_memory: float | None
    interconnect: float
    host_link: float
    positions_per_second: float
    mfu: float | None
    collectives: dict[str, float]
    links: dict[str, str]
    assumptions: tuple[str, ...]

    @property
    def times(self) -> dict[str, float]:
        """The times that are known, by name."""
        times = {
            "compute": self.compute,
            "device memory": self.device_memory,
            "interconnect": self.interconnect,
            "host link": self.host_link,
        }
        return {name: seconds for name, seconds in times.items() if seconds is not None}

    @property
    def binds(self) -> str:
        """The name of the longest."""
        return max(self.times, key=self.times.__getitem__)

    @property
    def step_seconds(self) -> float:
        """The longest of them."""
        return self.times[self.binds]

    def to_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds of it."""
        derived = {"binds": self.binds, "step_seconds": self.step_seconds}
        return dataclasses.asdict(self) | derived | {"assumptions": list(self.assumptions)}


def roofline(
    estimate: Estimate,
    hardware: Hardware,
    settings: PlanSettings,
    analytic: Estimate | None = None,
) -> Roofline:
    """Returns the times of a step.

    Args:
      estimate: what the step needs.
      hardware: of every device.
      settings: efficiencies, and the topology that has the sides of the torus.
      analytic: of the same step; it knows what MFU counts and what device memory moves, which the
        compiled engine does not.
    """
    known = analytic or estimate
    links = Links(hardware, estimate.mesh, settings.topology)
    efficiency = settings.interconnect_efficiency
    sending = {c.name: links.seconds(c, efficiency) for c in estimate.collectives}
    host = hardware.host_link.value * settings.host_link_efficiency
    memory = hardware.hbm_bandwidth.value * settings.device_memory_efficiency
    moved = known.device_traffic_bytes_per_device
    times = (
        estimate.flops_per_device / (hardware.flops * settings.compute_efficiency),
        None if moved is None else moved / memory,
        sum(sending.values()),
        estimate.host_traffic_bytes_per_device / host,
    )
    seconds = max(time for time in times if time is not None)
    asked = known.model_flops_per_device
    return Roofline(
        compute=times[0],
        device_memory=times[1],
        interconnect=times[2],
        host_link=times[3],
        positions_per_second=estimate.positions_per_step / seconds if seconds else 0.0,
        mfu=asked / (hardware.flops * seconds) if asked and seconds else None,
        collectives=sending,
        links={" x ".join(axes): links.describe(axes) for axes in _axes(estimate)},
        assumptions=_assumptions(hardware, settings),
    )


def _axes(estimate: Estimate) -> list[tuple[str, ...]]:
    """Returns every choice of mesh axes over which there is a collective."""
    return sorted({collective.axes for collective in estimate.collectives})


def _assumptions(hardware: Hardware, settings: PlanSettings) -> tuple[str, ...]:
    network = hardware.network
    several = network.group is not None or topologies.slices_of(settings.topology) > 1
    beyond = ""
    if several and network.beyond is not None:
        what = "machines" if network.group else "slices"
        beyond = f"; between {what}: {network.beyond.source}"
    return (
        f"compute: {hardware.flops / 1e12:,.0f} TFLOP/s x {settings.compute_efficiency:g}"
        f" ({hardware.peak_flops.source})",
        f"device memory: {hardware.hbm_bandwidth.value / 1e9:,.0f} GB/s x"
        f" {settings.device_memory_efficiency:g} ({hardware.hbm_bandwidth.source})",
        f"interconnect: {network.bandwidth.value / 1e9:,.4g} GB/s a chip x"
        f" {settings.interconnect_efficiency:g} ({network.bandwidth.source}{beyond})",
        f"host link: {hardware.host_link.value / 1e9:,.0f} GB/s x"
        f" {settings.host_link_efficiency:g} ({hardware.host_link.source})",
        "all go on at once: the step takes as long as the longest",
    )
