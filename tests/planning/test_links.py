"""Seconds of collectives by the links that they use, by hand."""

import importlib.util

import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.planning import topologies
from m6jax.planning.estimate import Collective
from m6jax.planning.hardware import TABLE
from m6jax.planning.links import Links, even_sides

GB = 10**9


def mesh(data=1, expert=1, model=1):
    return {"data": data, "expert": expert, "model": model}


def seconds(links, kind, axes, size=8 * GB):
    return links.seconds(Collective(kind, axes, size))


class TestMachines:
    """H100: 450 GB/s inside a machine of 8, 50 GB/s a GPU between machines."""

    def test_inner_axes_stay_inside(self):
        links = Links(TABLE["H100"], mesh(data=2, expert=8), None)
        # Of 8 GB each of 8 GPUs keeps its own eighth.
        inside = 7 / 450
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(inside)
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(inside)
        assert seconds(links, "all-reduce", ("expert",)) == pytest.approx(2 * inside)
        # The other member is in the other machine: half of 8 GB, twice.
        assert seconds(links, "all-reduce", ("data",)) == pytest.approx(2 * 4 / 50)
        assert seconds(links, "collective-permute", ("data",)) == pytest.approx(8 / 50)
        assert seconds(links, "collective-permute", ("expert",)) == pytest.approx(8 / 450)
        assert links.describe(("expert",)) == "inside a machine of 8, 450 GB/s"
        assert links.describe(("data",)) == "between 2 machines, 50 GB/s"

    def test_an_axis_over_both(self):
        links = Links(TABLE["H100"], mesh(expert=16), None)
        # Half of the rows go to the other machine, each GPU's over its own card.
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(4 / 50)
        # An eighth of what the other machine has, for each of its 8 GPUs.
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(max(7 / 450, 0.5 / 50))
        assert links.describe(("expert",)) == (
            "inside a machine of 8, 450 GB/s and between 2 machines, 50 GB/s"
        )

    def test_more_gpus_are_no_cliff_for_experts_of_one_machine(self):
        """The same exchange on 8 and on 16 GPUs, as long as the axis is 8 long."""
        one, two = (Links(TABLE["H100"], mesh(data=n, expert=8), None) for n in (1, 2))
        exchanged = [seconds(links, "all-to-all", ("expert",)) for links in (one, two)]
        assert exchanged[0] == exchanged[1]

    def test_one_device_sends_nothing(self):
        assert seconds(Links(TABLE["H100"], mesh(), None), "all-reduce", ("data",)) == 0


class TestTori:
    """v6e: 400 GB/s a chip over two sides, rings from 16 chips. v5p: 600 GB/s, three, from 4."""

    def test_rings_along_both_sides(self):
        links = Links(TABLE["v6e"], mesh(expert=256), "v6e:16x16")
        # A ring of 16 at 200 GB/s: half of the rows cross its middle over two links.
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(8 * 4 / 200)
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(8 * 255 / 256 / 400)

    def test_a_line_is_half_as_fast_as_a_ring(self):
        links = Links(TABLE["v6e"], mesh(expert=128), "v6e:8x16")
        # The line of 8 is as busy as the ring of 16.
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(8 * 4 / 200)
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(8 * 127 / 128 / 300)
        small = Links(TABLE["v6e"], mesh(expert=4), "v6e:2x2")
        assert seconds(small, "all-to-all", ("expert",)) == pytest.approx(8 / 200)
        assert small.describe(("expert",)) == "line of 2 and line of 2 of the torus 2x2, 400 GB/s"

    def test_an_axis_along_one_side_has_its_links_alone(self):
        links = Links(TABLE["v6e"], mesh(data=16, expert=16), "v6e:16x16")
        for axis in ("data", "expert"):
            assert seconds(links, "all-gather", (axis,)) == pytest.approx(8 * 15 / 16 / 200)
            assert links.describe((axis,)) == "ring of 16 of the torus 16x16, 200 GB/s"
        assert seconds(links, "collective-permute", ("data",)) == pytest.approx(8 / 100)

    def test_groups_that_lie_between_each_other_share_links(self):
        links = Links(TABLE["v6e"], mesh(data=4, expert=64), "v6e:16x16")
        # 64 = a side of 16 and 4 neighbours of the other, a line; data is every fourth of a side.
        assert links.describe(("data",)) == "ring of 16 of the torus 16x16, 200 GB/s"
        assert seconds(links, "all-gather", ("data",)) == pytest.approx(8 * 3 / 4 / (200 / 4))
        both = 8 * 63 / 64 / (200 + 100)
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(both)

    def test_three_sides(self):
        links = Links(TABLE["v5p"], mesh(expert=512), "v5p:8x8x8")
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(8 * 2 / 200)

    def test_sides_are_even_where_no_slice_is_named(self):
        assert even_sides(128, 2) == (8, 16)
        assert even_sides(512, 3) == (8, 8, 8)
        assert even_sides(7, 2) == (1, 7)
        links = Links(TABLE["v6e"], mesh(expert=256), None)
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(8 * 4 / 200)

    def test_slices_are_joined_by_the_network_of_the_data_center(self):
        """Two slices of 16 x 16 chips: `data` goes between them, `expert` stays inside."""
        links = Links(TABLE["v6e"], mesh(data=2, expert=256), "2*v6e:16x16")
        assert links.describe(("data",)) == "between 2 slices, 12.5 GB/s"
        assert seconds(links, "all-reduce", ("data",)) == pytest.approx(2 * 8 / 2 / 12.5)
        assert seconds(links, "collective-permute", ("data",)) == pytest.approx(8 / 12.5)
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(8 * 4 / 200)
        assert "slices" not in links.describe(("expert",))

    def test_an_axis_that_no_slice_holds_goes_between(self):
        links = Links(TABLE["v6e"], mesh(expert=512), "2*v6e:16x16")
        assert links.describe(("expert",)) == (
            "ring of 16 and ring of 16 of the torus 16x16, 400 GB/s and between 2 slices, 12.5 GB/s"
        )
        # Half of the rows leave; a 256th of what is gathered comes to each chip from outside.
        assert seconds(links, "all-to-all", ("expert",)) == pytest.approx(4 / 12.5)
        inside = 8 * 255 / 256 / 400
        assert seconds(links, "all-gather", ("expert",)) == pytest.approx(inside)
        assert inside > 8 / 256 / 2 / 12.5

    @pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
    @pytest.mark.parametrize("sizes", [mesh(1, 128), mesh(8, 16), mesh(2, 16, 4)])
    def test_chips_that_are_not_here_lie_as_real_ones(self, sizes):
        devices = topologies.devices_of(topologies.parse("v6e:8x16"))
        real = Partitioning(**sizes).make_mesh(devices)
        coordinates = np.array([chip.coords[:2] for chip in real.devices.flat])
        links = Links(TABLE["v6e"], dict(real.shape), "v6e:8x16")
        np.testing.assert_array_equal(links.places.reshape(-1, 3)[:, 1:], coordinates)
