"""Leaves on the host: saved and restored in place, with little memory besides."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from saved_states import HOST, assert_same_bits, described, make_state, placed, save

from m6jax.checkpointing import CheckpointError, Checkpoints, Streamed
from m6jax.checkpointing.host_leaves import HostLeaf, piece_of

ROOT = pathlib.Path(__file__).parents[2]


def test_a_state_on_the_host_needs_no_second_copy():
    """Of 512 MB: what is under way, and one of eight leaves where it is restored."""
    command = [sys.executable, "benchmarks/checkpoint_memory.py", "--megabytes", "512"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(output.stdout)
    assert measured["save_extra_mb"] < 256
    assert measured["restore_extra_mb"] < 256


class TestPieces:
    """8 x 6 float32 over a = 4 and b = 2: shards of [2, 3]; elements have 4 bytes."""

    ARRAY = placed(np.arange(48, dtype=np.float32).reshape(8, 6), "a", "b", memory=HOST)

    @pytest.mark.parametrize(
        ("size", "by_layer", "piece"),
        [(24, False, (2, 3)), (12, False, (1, 3)), (8, False, (1, 1)), (24, True, (1, 3))],
    )
    def test_divide_a_shard(self, size, by_layer, piece):
        assert piece_of(self.ARRAY, size, by_layer) == piece

    def test_cover_every_element_once(self):
        seen = np.zeros((8, 6), np.int32)
        for index, values in HostLeaf(self.ARRAY, (1, 3)).parts():
            np.testing.assert_array_equal(values, np.asarray(self.ARRAY)[index])
            seen[index] += 1
        assert (seen == 1).all()

    def test_copies_are_written_once(self):
        array = placed(np.ones((8, 6), np.float32), None, "b", memory=HOST)
        assert len(list(HostLeaf(array, (8, 3)).parts())) == 2

    def test_scalars_are_one_piece(self):
        array = placed(np.float32(3), memory=HOST)
        assert [(index, float(v)) for index, v in HostLeaf(array, ()).parts()] == [((), 3.0)]


class TestSavingAgain:
    def test_what_is_there_stays_until_the_new_one_is_complete(self, tmp_path):
        def fail(index):
            raise ValueError("no such value")

        broken = {"x": Streamed((2,), np.dtype(np.float32), (2,), fail)}
        with Checkpoints(tmp_path) as checkpoints:
            save(checkpoints, 1, wait=True)
            with pytest.raises(CheckpointError, match="no such value"):
                checkpoints.save(1, broken, {}, {}, wait=True)
            assert checkpoints.steps() == [1]
            restored = checkpoints.restore(1, described(make_state()))
        assert_same_bits(restored, make_state())

    def test_the_newest_is_taken_and_the_older_removed(self, tmp_path):
        with Checkpoints(tmp_path) as checkpoints:
            for offset in (0.0, 1.0, 2.0):
                save(checkpoints, 1, offset=offset, wait=True)
                assert checkpoints.steps() == [1]
                restored = checkpoints.restore(1, described(make_state()))
                assert_same_bits(restored, make_state(offset))
        assert [path.name for path in tmp_path.iterdir()] == ["1.2"]

    def test_of_two_complete_ones_the_newer_is_taken(self, tmp_path):
        """The machine died after the new one was written, before the old one was removed."""
        with Checkpoints(tmp_path) as checkpoints:
            save(checkpoints, 1, wait=True)
            (tmp_path / "1").rename(tmp_path / "kept")
            save(checkpoints, 1, offset=1.0, wait=True)
            (tmp_path / "1").rename(tmp_path / "1.10")
            (tmp_path / "kept").rename(tmp_path / "1.9")
            assert checkpoints.latest() == 1
            restored = checkpoints.restore(1, described(make_state()))
        assert_same_bits(restored, make_state(1.0))
