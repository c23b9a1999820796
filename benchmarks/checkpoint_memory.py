"""Host memory that saving and restoring a state in host memory takes besides the state itself.

    python benchmarks/checkpoint_memory.py --megabytes 512

Prints one JSON line: the peak of a process's resident memory while it saves a state on the host (a
stack of 16 layers in 8 leaves, float32), above what it held before; and the peak while another
process restores it, above what it held before and the state. In megabytes of a million bytes.
Needs Linux (/proc).
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m6jax.checkpointing import Checkpoints
from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Layout
from m6jax.layouts.offload import OffloadPlan
from m6jax.training import train_state
from m6jax.training.train_state import Extra, TrainState

LAYERS, WIDTH, MATRICES = 16, 1024, 4
PLAN = OffloadPlan(weights=("",), optimizer_state=True, min_bytes=0)
SMALL = 2  # megabytes of a state with which everything is done once before


def describe(megabytes: int) -> TrainState:
    """Describes weights, and moments of the same size, that fill so many megabytes."""
    rows = megabytes * 10**6 // (2 * MATRICES * LAYERS * WIDTH * 4)
    mesh = Partitioning().make_mesh(jax.devices()[:1])
    whole = Partitioning().batch_sharding(mesh).update(spec=jax.sharding.PartitionSpec())

    def leaf(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    matrices = {f"w{i}": leaf(jnp.float32, LAYERS, rows, WIDTH) for i in range(MATRICES)}
    stack = {"layers": matrices}
    plain = TrainState(leaf(jnp.int32), stack, {"mu": stack}, leaf(jnp.uint32, 2), Extra())
    return PLAN.place(plain, Layout(depth=LAYERS, unit=LAYERS))


def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Makes an array where it is described, shard by shard."""

    def shard(index: Any) -> np.ndarray:
        shape = leaf.sharding.shard_shape(leaf.shape)  # type: ignore[union-attr]
        return np.ones(shape, leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


def memory_mb(what: str) -> float:
    """Returns VmRSS, what is resident, or VmHWM, its peak."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{what}:\s*(\d+) kB", status)
    assert found
    return int(found[1]) * 1024 / 1e6


def start_peak() -> float:
    """Forgets the peak so far; returns what is resident now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_mb("VmRSS")


def save(directory: str, megabytes: int) -> float:
    """Saves a state; returns the megabytes that this took besides."""
    state = jax.tree.map(fill, describe(megabytes))
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, jax.tree.map(fill, describe(SMALL)), {}, {}, wait=True)
        before = start_peak()
        checkpoints.save(2, state, {}, {}, wait=True)
        return memory_mb("VmHWM") - before


def restore(directory: str, megabytes: int) -> float:
    """Restores the state; returns the megabytes that this took besides."""
    abstract = describe(megabytes)
    with Checkpoints(directory) as checkpoints:
        checkpoints.restore(1, describe(SMALL))
        before = start_peak()
        state = checkpoints.restore(2, abstract)
        assert train_state.shardings_of(state) == train_state.shardings_of(abstract)
        own = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
        return memory_mb("VmHWM") - before - own


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512, help="of the state")
    parser.add_argument("--part", choices=("save", "restore"), help="only this, here")
    parser.add_argument("--directory", help="for checkpoints, with --part")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.part:
        print({"save": save, "restore": restore}[args.part](args.directory, args.megabytes))
        return
    result = {"state_mb": args.megabytes}
    with tempfile.TemporaryDirectory() as directory:
        for part in ("save", "restore"):
            command = [sys.executable, __file__, "--megabytes", str(args.megabytes)]
            command += ["--part", part, "--directory", directory]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result[f"{part}_extra_mb"] = round(float(output.split()[-1]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
