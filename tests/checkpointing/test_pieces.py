"""Leaves that are written and read in pieces, and arrays that are made shard by shard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from saved_states import HOST, MESH, assert_same_bits, described, make_state, placed

from m6jax.checkpointing import (
    CheckpointError,
    Checkpoints,
    SavedLeaf,
    Streamed,
    arrays,
    piece_bytes,
    pieces,
)

MB = 2**20


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path) as opened:
        yield opened


def streamed(value, *piece):
    return Streamed(value.shape, value.dtype, piece, lambda index: value[index])


def test_pieces_cover_a_leaf_once_and_the_last_are_smaller():
    values = np.arange(12.0).reshape(3, 4)
    leaf = streamed(values, 2, 3)
    parts = list(leaf.parts())
    assert [index for index, _ in parts] == [
        (slice(0, 2), slice(0, 3)),
        (slice(0, 2), slice(3, 4)),
        (slice(2, 3), slice(0, 3)),
        (slice(2, 3), slice(3, 4)),
    ]
    for index, part in parts:
        np.testing.assert_array_equal(part, values[index])
    assert (leaf.size, leaf.nbytes) == (12, 96)
    assert list(streamed(np.float32(1)).parts()) == [((), 1.0)]


def test_streamed_leaves_are_restored_like_arrays(checkpoints):
    values = jax.tree.map(np.asarray, make_state()._asdict())
    cut = jax.tree.map(lambda x: streamed(x, *(2 if n > 2 else n for n in x.shape)), values)
    checkpoints.save(1, cut, {}, {}, wait=True)

    whole = checkpoints.restore(1, checkpoints.metadata(1))
    placed_again = checkpoints.restore(1, described(values, None, "b", memory=HOST))

    assert_same_bits(whole, values)
    assert_same_bits(placed_again, values)


def test_streamed_leaves_and_arrays_lie_in_one_checkpoint(checkpoints):
    x = np.arange(6, dtype=np.float32)
    checkpoints.save(1, {"a": placed(x), "b": streamed(x + 1, 4)}, {}, {}, wait=True)
    restored = checkpoints.restore(1, checkpoints.metadata(1))
    assert_same_bits(restored, {"a": x, "b": x + 1})


def test_a_piece_that_cannot_be_made_fails_the_save(checkpoints):
    def fail(index):
        raise ValueError("no such value")

    leaf = Streamed((2,), np.dtype(np.float32), (2,), fail)
    with pytest.raises(CheckpointError, match="ValueError: no such value"):
        checkpoints.save(1, {"x": leaf}, {}, {}, wait=True)
    assert checkpoints.steps() == []
    checkpoints.remove_unfinished()


def test_unfinished_saves_are_removed_when_asked(checkpoints, tmp_path):
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    checkpoints.remove_unfinished()
    assert list(tmp_path.iterdir()) == []


def test_a_reader_knows_and_reads_parts(checkpoints):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    checkpoints.save(1, {"a": streamed(x, 1, 3), "b": placed(jnp.int32(5))}, {}, {}, wait=True)

    reader = checkpoints.pieces(1)

    assert reader.leaves() == {
        "a": SavedLeaf((4, 6), np.dtype(np.float32), (1, 3)),
        "b": SavedLeaf((), np.dtype(np.int32), ()),
    }
    assert reader.leaf("a").nbytes == 96
    np.testing.assert_array_equal(reader.read("a", (slice(1, 3), slice(2, 5))), x[1:3, 2:5])
    assert reader.read("b", ()) == 5


def test_a_reader_names_what_it_cannot_read(checkpoints, tmp_path):
    checkpoints.save(1, {"a": streamed(np.ones(2**12, np.float32), 2**12)}, {}, {}, wait=True)
    reader = checkpoints.pieces(1)
    for file in (tmp_path / "1" / "state").rglob("d/*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"1/state: a cannot be read: "):
        reader.read("a", (slice(0, 5),))
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.pieces(1)


@pytest.mark.parametrize("memory", [None, HOST])
def test_an_array_is_made_where_it_rests_and_equal_shards_once(memory):
    x = np.arange(48, dtype=np.float32).reshape(8, 6)
    sharding = NamedSharding(MESH, PartitionSpec("a"), memory_kind=memory)
    asked = []

    def read(index):
        asked.append(index[0])
        return x[index]

    leaf = pieces.assemble(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), read)

    assert leaf.sharding == sharding
    np.testing.assert_array_equal(leaf, x)
    assert asked == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]


def test_arrays_are_built_by_name_or_not_at_all(checkpoints):
    sharding = NamedSharding(MESH, PartitionSpec())
    leaves = {"a": jax.ShapeDtypeStruct((3,), np.float32, sharding=sharding)}
    built = checkpoints.build(1, leaves, lambda name, index: np.full(3, ord(name), np.float32))
    np.testing.assert_array_equal(built["a"], [97, 97, 97])

    def fail(name, index):
        raise CheckpointError("gone")

    with pytest.raises(CheckpointError, match="checkpoint 1: gone"):
        checkpoints.build(1, leaves, fail)


class Sized:
    """A leaf of megabytes."""

    def __init__(self, *shape):
        self.shape, self.nbytes = shape, int(np.prod(shape)) * MB


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ({"params/layers/w": Sized(12, 80)}, 5 * MB),  # a sixteenth of a layer
        ({"params/layers_3/w": Sized(80)}, 5 * MB),
        ({"params/layers/w": Sized(12, 80), "head": Sized(4000)}, 5 * MB),
        ({"params/layers/w": Sized(12, 1)}, MB),
        ({"params/layers/w": Sized(12, 8000)}, 64 * MB),
        ({"head": Sized(1)}, 64 * MB),
    ],
)
def test_pieces_are_a_share_of_the_largest_layer(leaves, expected):
    assert piece_bytes(leaves) == expected


def test_large_stacks_are_cut_between_layers_and_small_ones_are_whole():
    leaves = {
        "layers/w": placed(np.zeros((4, 2**17), np.float32)),  # 2 MB, in pieces of 1 MB
        "layers/norm": placed(np.zeros((4, 2), np.float32)),
        "head": placed(np.zeros((4, 2), np.float32)),
    }
    saved = arrays.save_args(leaves).save_args
    assert {name: args.shard_axes for name, args in saved.items()} == {
        "layers/w": (0,),
        "layers/norm": (),
        "head": (),
    }
    assert {args.chunk_byte_size for args in saved.values()} == {MB}
