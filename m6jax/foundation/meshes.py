"""In which order devices make a mesh: what talks most lies next to each other.

The axes of a shape are ordered from the one that talks least to the one that talks most, so the
last ones get the fastest links:

    machines of 8 GPUs    (2, 8, 1): the axis of 8 inside a machine, the axis of 2 between machines
    a slice of TPUs       each axis along sides of the torus, as jax's own `mesh_utils` lays it
    several slices        the first axes are cut over the slices, the rest lies inside of one

A machine (or slice) is what jax calls `slice_index`. The planner gives chips and GPUs that are not
here, see `planning.links`.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh

from m6jax.foundation.validated import ConfigError


def arranged(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices as an array of a shape.

    Args:
      shape: sizes of the mesh axes, whose product is the number of devices.
      devices: jax's, or what has `platform`, `id`, perhaps `slice_index`, and as TPUs `coords`.

    Raises:
      ConfigError: slices of TPUs have different numbers of chips.
    """
    if any(device.platform == "tpu" for device in devices):
        return _on_tori(shape, devices)
    # In the order of machines the last axes stay inside of one by themselves.
    order = sorted(devices, key=lambda device: (machine_of(device), device.id))
    return np.asarray(order).reshape(shape)


def machine_of(device: Any) -> int:
    """Returns the number of the machine, or slice, that a device is in."""
    return getattr(device, "slice_index", 0) or 0


def crossing(devices: np.ndarray, axes: Sequence[str]) -> Mapping[str, int]:
    """Returns over how many machines each axis of a mesh goes, for those over more than one.

    Args:
      devices: of the mesh, an axis for each name.
      axes: names.
    """
    machines = np.vectorize(machine_of, otypes=[int])(devices)
    found = {}
    for number, axis in enumerate(axes):
        lines = np.moveaxis(machines, number, -1).reshape(-1, machines.shape[number])
        found[axis] = max(len(set(line)) for line in lines.tolist())
    return {axis: most for axis, most in found.items() if most > 1}


def over_machines(shape: Sequence[int], machines: int) -> tuple[int, ...]:
    """Returns in how many parts each axis is cut over so many machines, the first axes first.

    >>> over_machines((2, 64, 1), 4)
    (2, 2, 1)
    """
    parts = []
    for size in shape:
        parts.append(math.gcd(size, machines))
        machines //= parts[-1]
    return tuple(parts)


def _on_tori(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Returns TPUs as an array; `allow_split_physical_axes` lays any mesh that fits."""
    chips = collections.Counter(machine_of(device) for device in devices)
    if len(chips) == 1:
        return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if len(set(chips.values())) > 1:
        raise ConfigError(
            f"Partitioning: the slices have {', '.join(str(n) for _, n in sorted(chips.items()))}"
            " chips; a mesh is made of slices of one size"
        )
    parts = over_machines(shape, len(chips))
    inside = [size // part for size, part in zip(shape, parts, strict=True)]
    return create_hybrid_device_mesh(inside, parts, devices, allow_split_physical_axes=True)
