"""Which device lies where in a mesh."""

import dataclasses

import numpy as np
import pytest

from m6jax.foundation import meshes
from m6jax.foundation.meshes import arranged, over_machines
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError


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


def chips(*numbers):
    """Chips of slices with so many each, in lines."""
    return [
        Device(id=100 * s + i, platform="tpu", slice_index=s, coords=(i, 0, 0))
        for s, number in enumerate(numbers)
        for i in range(number)
    ]


@pytest.mark.parametrize(
    ("slices", "where", "over"),
    [
        (1, Partitioning(expert=4), {}),
        (2, Partitioning(expert=4), {"data": 2}),
        (4, Partitioning(expert=4, model=2), {"data": 4}),
        (4, Partitioning(data=2, expert=16), {"data": 2, "expert": 2}),
        (2, Partitioning(data=1, expert=-1), {"expert": 2}),
    ],
)
def test_a_mesh_over_slices_cuts_data_and_keeps_the_rest_inside(slices, where, over):
    """Slices of eight chips; experts leave a slice only where there is no more data to cut."""
    mesh = where.make_mesh(chips(*[8] * slices))
    assert meshes.crossing(mesh.devices, mesh.axis_names) == over


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match="the slices have 8, 4 chips; a mesh is made of slices"):
        Partitioning(expert=4).make_mesh(chips(8, 4))


def test_machines_that_no_single_axis_takes():
    assert over_machines((2, 64, 1), 4) == (2, 2, 1)
    assert over_machines((1, 1, 8), 2) == (1, 1, 2)
