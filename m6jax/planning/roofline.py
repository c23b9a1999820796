"""How fast a step could be: the three times that each part of a device would need alone.

    compute        executed FLOPs / (peak x efficiency)
    interconnect   bytes on the links / (bandwidth x efficiency)
    host link      bytes between host and device / (bandwidth x efficiency)

All three are taken to go on at once, so that the longest is the step's time, and binds it. It is a
bound from below under stated efficiencies, not a forecast; time in device memory is not counted.

An all-reduce sends its bytes twice. A row of an all-to-all crosses several links of a torus, and
keeps each busy: on 16 x 16 chips 8 on average, so that an all-to-all takes 8 times as long as its
bytes over the links of one chip. That is of the whole torus, also where a mesh axis is a part of
it. Bytes to and from the host share the bandwidth of one direction.

>>> roofline(estimate, find("v6e"), settings).binds
'host link'
"""

import dataclasses
from typing import Any

from m6jax.planning.estimate import Estimate
from m6jax.planning.hardware import Hardware
from m6jax.planning.settings import PlanSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times of a step in seconds, and what follows from them.

    Attributes:
      compute: for the matrix products.
      interconnect: for the collectives.
      host_link: for the copies between host and device.
      tokens_per_second: of all devices.
      mfu: share of the peak that the model's own FLOPs are; None if these are unknown.
      assumptions: what was assumed, one line each.
    """

    compute: float
    interconnect: float
    host_link: float
    tokens_per_second: float
    mfu: float | None
    assumptions: tuple[str, ...]

    @property
    def times(self) -> dict[str, float]:
        """The three times by name."""
        return {
            "compute": self.compute,
            "interconnect": self.interconnect,
            "host link": self.host_link,
        }

    @property
    def binds(self) -> str:
        """The name of the longest."""
        return max(self.times, key=self.times.__getitem__)

    @property
    def step_seconds(self) -> float:
        """The longest of the three."""
        return self.times[self.binds]

    def to_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds of it."""
        derived = {"binds": self.binds, "step_seconds": self.step_seconds}
        return dataclasses.asdict(self) | derived | {"assumptions": list(self.assumptions)}


def roofline(
    estimate: Estimate,
    hardware: Hardware,
    settings: PlanSettings,
    model_flops_per_device: float | None = None,
) -> Roofline:
    """Returns the times of a step.

    Args:
      estimate: what the step needs.
      hardware: of every device.
      settings: efficiencies, and the topology that says how far an all-to-all goes.
      model_flops_per_device: what MFU counts; None: as in the estimate. The analytic engine knows
        it, the compiled one does not.
    """
    hops = hardware.mean_hops(settings.topology, estimate.devices)
    links = hardware.interconnect(estimate.devices) * settings.interconnect_efficiency
    sent = sum(_sent(kind, size, hops) for kind, size in estimate.collectives.items())
    host = hardware.host_link.value * settings.host_link_efficiency
    compute = estimate.flops_per_device / (hardware.flops * settings.compute_efficiency)
    times = compute, sent / links, estimate.host_traffic_bytes_per_device / host
    seconds = max(times)
    asked = model_flops_per_device or estimate.model_flops_per_device
    return Roofline(
        compute=times[0],
        interconnect=times[1],
        host_link=times[2],
        tokens_per_second=estimate.tokens_per_step / seconds if seconds else 0.0,
        mfu=asked / (hardware.flops * seconds) if asked and seconds else None,
        assumptions=_assumptions(hardware, settings, estimate.devices, hops),
    )


def _sent(kind: str, size: float, hops: float) -> float:
    """Returns the bytes that a collective puts on the links of one device."""
    return size * {"all-reduce": 2.0, "all-to-all": hops}.get(kind, 1.0)


def _assumptions(
    hardware: Hardware, settings: PlanSettings, devices: int, hops: float
) -> tuple[str, ...]:
    links = hardware.interconnect(devices)
    return (
        f"compute: {hardware.flops / 1e12:,.0f} TFLOP/s x {settings.compute_efficiency:g}"
        f" ({hardware.peak_flops.source})",
        f"interconnect: {links / 1e9:,.4g} GB/s x {settings.interconnect_efficiency:g}, an"
        f" all-to-all over {hops:.2g} links on average ({hardware.network.bandwidth.source})",
        f"host link: {hardware.host_link.value / 1e9:,.0f} GB/s x"
        f" {settings.host_link_efficiency:g} ({hardware.host_link.source})",
        "all three go on at once: the step takes as long as the longest; time in device memory is"
        " not counted",
    )
