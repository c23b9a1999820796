"""Whether a step fits the memory of its devices and hosts, and by how much it does not.

>>> fit(estimate, find("v6e"), usable=0.95).lines()
['fits     11.80 of 30.40 GB of device memory (95 % of 32 GB)', ...]
"""

import dataclasses
from typing import Any

from m6jax.planning.estimate import Estimate
from m6jax.planning.hardware import Hardware

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What a step needs of each memory, and what there is; bytes of one device.

    Attributes:
      hbm: needed on the device.
      hbm_room: what a program can have there.
      host: needed on the host, for one device.
      host_room: what a program can have there.
      usable: share of the whole memory that the rooms are.
    """

    hbm: int
    hbm_room: float
    host: int
    host_room: float
    usable: float

    @property
    def hbm_over(self) -> int:
        """Bytes that are too many on the device."""
        return max(0, round(self.hbm - self.hbm_room))

    @property
    def host_over(self) -> int:
        """Bytes that are too many on the host."""
        return max(0, round(self.host - self.host_room))

    @property
    def fits(self) -> bool:
        """Whether nothing is too much."""
        return not self.hbm_over and not self.host_over

    def lines(self) -> list[str]:
        """Returns a line for each memory, for a person to read."""
        memories = [("device", self.hbm, self.hbm_room, self.hbm_over)]
        if self.host:
            memories.append(("host", self.host, self.host_room, self.host_over))
        return [
            f"{'over' if over else 'fits':9}{need / GB:,.2f} of {room / GB:,.2f} GB of {where}"
            f" memory ({self.usable:.0%} of {room / self.usable / GB:,.0f} GB)"
            + (f": {over / GB:,.2f} GB too much" if over else "")
            for where, need, room, over in memories
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds of it."""
        derived = {"fits": self.fits, "hbm_over": self.hbm_over, "host_over": self.host_over}
        return dataclasses.asdict(self) | derived


def fit(estimate: Estimate, hardware: Hardware, usable: float) -> Fit:
    """Compares needs and memories.

    Args:
      estimate: what the step needs.
      hardware: of every device.
      usable: share of a memory that a program can have.
    """
    return Fit(
        hbm=estimate.hbm_bytes_per_device,
        hbm_room=hardware.hbm_bytes.value * usable,
        host=estimate.host_bytes_per_device,
        host_room=hardware.host_bytes.value * usable,
        usable=usable,
    )
