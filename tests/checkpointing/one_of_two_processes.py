"""One of two processes with four devices each: PROCESS ADDRESS DIRECTORY SCENARIO."""

import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m6jax.checkpointing import CheckpointError, Checkpoints


def make_state(mesh):
    def place(value, spec, memory=None):
        sharding = NamedSharding(mesh, spec, memory_kind=memory)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "weight": place(weight, PartitionSpec("a")),
        "moment": place(weight + 0.5, PartitionSpec(None, "a"), "pinned_host"),
        "count": place(np.int32(3), PartitionSpec()),
    }


def main():
    process, address, directory, scenario = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(process))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    state = make_state(mesh)
    if scenario == "sleep" and process == "1":
        time.sleep(600)
    checkpoints = Checkpoints(directory, keep=1, timeout_seconds=4 if scenario == "sleep" else 60)
    try:
        checkpoints.save(1, state, {"position": 1}, {})
    except CheckpointError as error:
        print(error, flush=True)
        os._exit(3)
    checkpoints.save(2, jax.tree.map(lambda x: x + 1, state), {"position": 2}, {}, wait=True)
    assert checkpoints.latest() == 2
    restored = checkpoints.restore(2, state)
    for name, leaf in restored.items():
        assert leaf.sharding == state[name].sharding, name
        theirs = state[name].addressable_shards
        for ours, before in zip(leaf.addressable_shards, theirs, strict=True):
            assert jnp.array_equal(ours.data, before.data + 1), name
    if process == "0":
        files = pathlib.Path(directory, "2", "state").rglob("d/*")
        largest = max(files, key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:10])
    sync_global_devices("damaged")
    try:
        checkpoints.restore(2, state)
    except CheckpointError as error:
        print(error, flush=True)
    sync_global_devices("seen")
    checkpoints.save(3, jax.tree.map(lambda x: x + 2, state), {"position": 3}, {})
    checkpoints.close()


main()
