"""Which device lies where in a mesh."""

import dataclasses

import numpy as np
import pytest

from m6jax.foundation.meshes import arranged, over_machines


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    platform: str
    slice_index: int
    coords: tuple[int, int, int] = (0, 0, 0)
    device_kind: str = ""
    core_on_chip: int = 0
    process_index: int = 0


def test_inner_axes_stay_inside_a_machine():
    """Processes that were started in turns on two machines have ids of both in turns."""
    gpus = [Device(id=i, platform="gpu", slice_index=i % 2) for i in range(16)]
    machines = np.vectorize(lambda gpu: gpu.slice_index)(arranged((2, 4, 2), gpus))
    assert (machines[0] == 0).all()
    assert (machines[1] == 1).all()
    ids = np.vectorize(lambda gpu: gpu.id)(arranged((16,), gpus))
    assert ids.tolist() == [*range(0, 16, 2), *range(1, 16, 2)]


def test_devices_of_one_machine_stay_in_their_order():
    cpus = [Device(id=i, platform="cpu", slice_index=0) for i in (3, 1, 2, 0)]
    assert [cpu.id for cpu in arranged((2, 2), cpus).flat] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((2, 8, 1), (2, 1, 1)), ((1, 16, 1), (1, 2, 1)), ((4, 4, 1), (2, 1, 1))],
)
def test_the_first_axes_are_cut_over_slices(shape, parts):
    """Two slices of 2 x 4 chips."""
    chips = [
        Device(id=8 * s + i, platform="tpu", slice_index=s, coords=(i % 2, i // 2, 0))
        for s in range(2)
        for i in range(8)
    ]
    assert over_machines(shape, 2) == parts
    placed = arranged(shape, chips)
    assert placed.shape == shape
    assert {chip.id for chip in placed.flat} == set(range(16))
    for block in np.split(placed, 2, axis=parts.index(2)):
        assert len({chip.slice_index for chip in block.flat}) == 1


def test_machines_that_no_single_axis_takes():
    assert over_machines((2, 64, 1), 4) == (2, 2, 1)
    assert over_machines((1, 1, 8), 2) == (1, 1, 2)
