import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m6jax.checkpointing import CheckpointError, arrays, damage

MESH = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 3}, "step: expected a jax array, got int"),
        ({"rng": jax.random.key(0)}, "rng: is a random key, give its jax.random.key_data"),
        ({"a": [jnp.zeros((0, 3))]}, r"a/0: an array of shape \(0, 3\) cannot be saved"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "a/b: two leaves of the state have this"),
    ],
)
def test_what_cannot_be_saved_is_named(state, message):
    with pytest.raises(CheckpointError, match=message):
        arrays.by_name(state)


@pytest.mark.parametrize(("memory", "expected"), [("pinned_host", True), ("device", False)])
def test_leaves_on_the_host_are_saved_in_place(memory, expected):
    sharding = NamedSharding(MESH, PartitionSpec("a"), memory_kind=memory)
    assert arrays.saved_in_place(jax.device_put(jnp.ones(8), sharding)) is expected


def test_what_the_library_says_is_dropped_and_what_others_say_is_not(caplog):
    from absl import logging as absl_logging
    from orbax.checkpoint import utils

    exec(compile("say('noise')", utils.__file__, "exec"), {"say": absl_logging.error})
    assert caplog.messages == []
    absl_logging.error("of use")
    assert caplog.messages == ["of use"]


class Storage:
    """As orbax describes an array of float32[64, 1000000] that was saved in pieces."""

    dtype = np.dtype(np.float32)

    class storage:  # noqa: N801
        chunk_shape = (16, 250_000)


@pytest.mark.parametrize(
    ("spec", "gigabytes"),
    [
        # 8 of 64 rows: at most 2 pieces of 16 rows (32), all columns: 128 MB; the least is 8 GB.
        (PartitionSpec("a"), 8),
        (PartitionSpec(), 8),
    ],
)
def test_small_reads_have_room_for_all(spec, gigabytes):
    leaf = jax.ShapeDtypeStruct((64, 1_000_000), np.float32, sharding=NamedSharding(MESH, spec))
    assert arrays.read_gigabytes({"x": leaf}, {"x": Storage}) == gigabytes


def test_large_read_has_room_for_the_pieces_its_largest_shard_touches():
    # Read by columns: 8e9 / 8 columns touch pieces of 250,000: 4001 of them, in all 4 rows of
    # pieces: 4001 * 250,000 * 64 * 4 bytes = 256.06 GB.
    shape = (64, 8_000_000_000)
    leaf = jax.ShapeDtypeStruct(
        shape, np.float32, sharding=NamedSharding(MESH, PartitionSpec(None, "a"))
    )
    assert arrays.read_gigabytes({"x": leaf}, {"x": Storage}) == 258


def test_network_paths_are_not_asked_for_sizes():
    assert damage.find(epath.Path("gs://bucket/run/checkpoints/1/state")) is None
