"""How long collectives take: by the links that lie between the devices of their mesh axes.

Devices are laid on the mesh as the run lays them (`foundation.meshes`), and where the members of a
collective then lie says what it may use:

    GPUs    g members share a machine's fast switch, m machines are joined by their network cards.
            On 16 GPUs in machines of 8, an axis `expert` of 8 stays inside (g 8, m 1), an axis
            `data` of 2 goes between (g 1, m 2).
    TPUs    chips on a torus have two links along each of its sides, whose ends meet only where a
            side is as long as the slice and long enough. A mesh axis along one side of two has
            half of the chip's bandwidth. The data center's network joins slices.

Bytes S of a collective of n devices (the larger of operand and result) take, at bandwidth b of a
chip, by its busiest link:

    all-gather, reduce-scatter   S (n - 1) / n / b; inside and between machines (or slices)
                                 S (g - 1) / g of the one and S / g (m - 1) / m of the other, since
                                 each member of a machine fetches a part. On d sides of a torus each
                                 side in use carries b / d, half of that where its ends do not meet
    all-reduce                   twice that
    all-to-all                   S (g - 1) / n inside, S (m - 1) / m between. On a torus half of the
                                 rows that stay in the slice, S / m, cross the middle of a side:
                                 S d s / 4 / m / b for a ring of s chips, twice that for a line
    collective-permute           S / b, by the slowest link that it uses; on a torus one link of 2 d
                                 carries it

Collectives take turns. Where members of several groups lie between each other on a side of a torus,
they share its links.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from m6jax.foundation import meshes
from m6jax.planning import topologies
from m6jax.planning.estimate import Collective
from m6jax.planning.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class _Place:
    """A device that need not be here, as far as `meshes.arranged` looks at it.

    It has no kind, so that jax's own orders of at most 16 chips of some kinds are left out.
    """

    id: int
    platform: str
    device_kind: str = ""
    coords: tuple[int, ...] = (0, 0, 0)
    slice_index: int = 0
    core_on_chip: int = 0


@dataclasses.dataclass(frozen=True)
class Side:
    """The members of a collective along one side of a torus.

    Attributes:
      reach: chips of the side from the first to the last, with those between that are no members.
      shared: groups that lie between each other, and share the links.
      ring: whether its ends meet.
    """

    reach: int
    shared: int
    ring: bool


class Links:
    """The links of a mesh of one kind of devices.

    Attributes:
      places: where every device of the mesh is, with a last axis: number of its slice and
        coordinates on the torus there, or number of its machine.
    """

    def __init__(self, hardware: Hardware, mesh: Mapping[str, int], topology: str | None):
        """Lays devices on a mesh.

        Args:
          hardware: of every device.
          mesh: sizes of the mesh axes.
          topology: name with the sides of the torus, 'v6e:8x16'; None: as even as can be.
        """
        self._network = hardware.network
        self._mesh = dict(mesh)
        self._sides: tuple[int, ...] = ()
        shape, devices = tuple(mesh.values()), math.prod(mesh.values())
        if self._network.dimensions:
            self._sides = topologies.sides_of(topology) or even_sides(
                devices, self._network.dimensions
            )
            self.places = _on_tori(shape, topologies.slices_of(topology), self._sides)
        else:
            self.places = _in_machines(shape, self._network.group or devices)

    def seconds(self, collective: Collective, efficiency: float = 1.0) -> float:
        """Returns how long a collective takes at a share of the links' bandwidth."""
        members = self._members(collective.axes)
        if len(members) == 1:
            return 0.0
        kind, size, network = collective.kind, float(collective.bytes), self._network
        inside, machines = _split(members)
        near, far = size, size / len(inside) * (machines - 1) / machines
        if kind == "all-to-all":
            near, far = size / machines, size * (machines - 1) / machines
        elif kind == "collective-permute" and machines > 1:
            near, far = 0.0, size
        of = self._torus_seconds if self._sides else self._switched_seconds
        beyond = network.beyond or network.bandwidth
        slowest = max(of(kind, near, inside), far / beyond.value)
        return (2.0 if kind == "all-reduce" else 1.0) * slowest / efficiency

    def describe(self, axes: tuple[str, ...]) -> str:
        """Returns which links mesh axes use, such as 'inside a machine of 8, 450 GB/s'."""
        members = self._members(axes)
        inside, machines = _split(members)
        network, group = self._network, self._network.group
        words = []
        if self._sides and len(inside) > 1:
            found = _sides_of(inside, self._sides, network.wraps_from)
            whole = "x".join(map(str, self._sides))
            share = len(found) / len(self._sides) * network.bandwidth.value
            lines = " and ".join(f"{'ring' if s.ring else 'line'} of {s.reach}" for s in found)
            words.append(f"{lines} of the torus {whole}, {share / 1e9:,.4g} GB/s")
        elif len(inside) > 1:
            where = f"inside a machine of {group}" if group else "one switch"
            words.append(f"{where}, {network.bandwidth.value / 1e9:,.4g} GB/s")
        if machines > 1 and network.beyond is not None:
            what = "slices" if self._sides else "machines"
            words.append(f"between {machines} {what}, {network.beyond.value / 1e9:,.4g} GB/s")
        return " and ".join(words)

    def _members(self, axes: tuple[str, ...]) -> np.ndarray:
        """Returns the places of the first group over these axes, [devices, numbers of a place]."""
        index = tuple(slice(None) if axis in axes else 0 for axis in self._mesh)
        return self.places[index].reshape(-1, self.places.shape[-1])

    def _switched_seconds(self, kind: str, size: float, members: np.ndarray) -> float:
        """Returns the seconds within a machine."""
        if kind != "collective-permute":
            size *= (len(members) - 1) / len(members)
        return size / self._network.bandwidth.value

    def _torus_seconds(self, kind: str, size: float, members: np.ndarray) -> float:
        """Returns the seconds within a slice."""
        if len(members) == 1:
            return 0.0
        dimensions = len(self._sides)
        side_rate = self._network.bandwidth.value / dimensions  # of two links
        sides = _sides_of(members, self._sides, self._network.wraps_from)
        if kind == "collective-permute":
            return size / (side_rate / 2)
        if kind == "all-to-all":
            return max(size * side.reach / (4 if side.ring else 2) for side in sides) / side_rate
        rates = (side_rate / side.shared * (1.0 if side.ring else 0.5) for side in sides)
        return size * (len(members) - 1) / len(members) / sum(rates)


def even_sides(devices: int, dimensions: int) -> tuple[int, ...]:
    """Returns the sides of a torus of so many chips, as even as whole numbers can be.

    >>> even_sides(128, 2), even_sides(512, 3)
    ((8, 16), (8, 8, 8))
    """
    sides: list[int] = []
    for left in range(dimensions, 0, -1):
        most = round(devices ** (1 / left))
        sides.append(next(n for n in range(most, 0, -1) if devices % n == 0))
        devices //= sides[-1]
    return tuple(sides)


@functools.cache
def _on_tori(shape: tuple[int, ...], slices: int, sides: tuple[int, ...]) -> np.ndarray:
    """Returns slice and coordinates of the chip at every place of a mesh, [*shape, 1 + sides]."""
    padded = (*sides, 1, 1)[:3]
    places = [(i, coords[::-1]) for i in range(slices) for coords in np.ndindex(padded[::-1])]
    chips = [
        _Place(id=number, platform="tpu", coords=coords, slice_index=i)
        for number, (i, coords) in enumerate(places)
    ]
    placed = meshes.arranged(shape, chips)
    return _numbers(placed, lambda chip: (meshes.machine_of(chip), *chip.coords[: len(sides)]))


@functools.cache
def _in_machines(shape: tuple[int, ...], group: int) -> np.ndarray:
    """Returns the number of the machine at every place of a mesh, [*shape, 1]."""
    gpus = [_Place(id=i, platform="gpu", slice_index=i // group) for i in range(math.prod(shape))]
    return _numbers(meshes.arranged(shape, gpus), lambda gpu: (meshes.machine_of(gpu),))


def _numbers(placed: np.ndarray, numbers: Any) -> np.ndarray:
    return np.array([numbers(place) for place in placed.flat]).reshape(*placed.shape, -1)


def _split(members: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the members in the first one's machine, or slice, and the number of machines."""
    numbers = members[:, 0]
    return members[numbers == numbers[0]], len(np.unique(numbers))


def _sides_of(members: np.ndarray, sides: tuple[int, ...], wraps_from: int) -> list[Side]:
    """Returns the sides of a torus along which members lie apart."""
    found = []
    for numbers, side in zip(members.T[1:], sides, strict=True):
        places = np.unique(numbers)
        if len(places) == 1:
            continue
        apart = max(1, round((places[-1] - places[0]) / (len(places) - 1)))
        reach = min(side, len(places) * apart)
        ring = bool(wraps_from) and side >= wraps_from and reach == side
        found.append(Side(reach, apart, ring))
    return found
