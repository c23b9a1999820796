"""Arrays on disk by name, through orbax.

A state is stored as a flat dictionary from the names of its leaves to their global arrays, so
neither the kinds of containers nor the mesh, the memory or the number of processes that wrote it
matter to who reads it:

>>> by_name({"params": {"head": head}, "step": step})
{'params/head': head, 'step': step}

Arrays are stored uncompressed: compressing holds a second copy of the whole state in host memory
(seen: 481 MB for 512 MB, against 6 MB), takes three times as long and saves a tenth of the space.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from m6jax.checkpointing import host_leaves, piece_writing
from m6jax.checkpointing.pieces import Streamed
from m6jax.checkpointing.steps import CheckpointError
from m6jax.foundation import pytrees
from m6jax.layouts import LeafName, offload

Leaf = jax.Array | Streamed

# A saved piece of an array is at most this large, so that a reader with another sharding need not
# read a whole shard of the writer. It is at most a sixteenth of the largest layer's part of a leaf
# as well, so that a reader that goes from piece to piece holds much less than a layer. Pieces of
# less than a megabyte cost more than they save.
_LARGEST_PIECE, _SMALLEST_PIECE = 64 * 2**20, 2**20
_PIECES_OF_A_LAYER = 16
# orbax refuses a shard larger than what may be in flight. An uncompressed write takes no memory of
# its own, so that nothing is held back; a read does, and gets what its largest shard needs.
_WRITE_GIGABYTES = 10**6
_READ_GIGABYTES = 8


class _WithoutOrbax(logging.Filter):
    """Drops what orbax says about every step of its work; its failures arrive as exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


logging.getLogger("absl").addFilter(_WithoutOrbax())


def handler(read_gigabytes: int = _READ_GIGABYTES) -> ocp.PyTreeCheckpointHandler:
    """Returns what writes and reads arrays, with at most so much of them in memory twice."""
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        type_handler_registry=piece_writing.registry(),
        save_concurrent_gb=_WRITE_GIGABYTES,
        restore_concurrent_gb=read_gigabytes,
    )


def save_args(leaves: dict[str, Leaf]) -> ocp.args.PyTreeSave:
    """Returns the arguments with which orbax writes `leaves`."""
    size = piece_bytes(leaves)

    def args(name: str, leaf: Leaf) -> ocp.SaveArgs:
        # A piece of one layer need not be read for another one.
        by_layer = LeafName.of(name).stacked and leaf.nbytes > size
        return ocp.SaveArgs(chunk_byte_size=size, shard_axes=(0,) if by_layer else ())

    def in_place(name: str, leaf: Leaf) -> Any:
        if not saved_in_place(leaf):
            return leaf
        return host_leaves.HostLeaf(
            leaf, host_leaves.piece_of(leaf, size, LeafName.of(name).stacked)
        )

    return ocp.args.PyTreeSave(
        {name: in_place(name, leaf) for name, leaf in leaves.items()},
        save_args={name: args(name, leaf) for name, leaf in leaves.items()},
    )


def piece_bytes(leaves: Mapping[str, Any]) -> int:
    """Returns how large the pieces are in which leaves are saved.

    Args:
      leaves: By name, what has a shape and a number of bytes.
    """
    layers = (
        leaf.nbytes // (leaf.shape[0] if LeafName.of(name).stacked else 1)
        for name, leaf in leaves.items()
        if LeafName.of(name).in_stack
    )
    share = max(layers, default=_LARGEST_PIECE * _PIECES_OF_A_LAYER) // _PIECES_OF_A_LAYER
    return min(max(share, _SMALLEST_PIECE), _LARGEST_PIECE)


def by_name(state: Any) -> dict[str, Leaf]:
    """Returns the leaves of `state` by name; raises CheckpointError for what cannot be saved."""
    leaves: dict[str, Leaf] = {}
    for name, leaf in pytrees.flatten_named(state):
        if not isinstance(leaf, Leaf):
            raise CheckpointError(f"{name}: expected a jax array, got {type(leaf).__name__}")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise CheckpointError(f"{name}: is a random key, give its jax.random.key_data")
        if leaf.size == 0:
            raise CheckpointError(f"{name}: an array of shape {leaf.shape} cannot be saved")
        if name in leaves:
            raise CheckpointError(f"{name}: two leaves of the state have this name")
        leaves[name] = leaf
    return leaves


def saved_in_place(leaf: Leaf) -> TypeGuard[jax.Array]:
    """Whether a leaf is written from its host memory, and not in the background.

    The next step would change it there.
    """
    return isinstance(leaf, jax.Array) and offload.on_host(leaf)


def saved_arrays(path: epath.Path) -> dict[str, Any]:
    """Returns what orbax knows of each array in `path`, by name: shape, dtype, storage."""
    return handler().metadata(path).tree


def wider(
    saved: dict[str, Any], wanted: dict[str, Any], widen: Callable[[str], bool]
) -> dict[str, str]:
    """Returns the leaves that get more bits than they were saved with, which changes no number.

    Args:
      saved: What is there by name, with shapes and types.
      wanted: What is asked for, likewise.
      widen: Whether a leaf of a name may be widened.

    Returns:
      By name, a line that says so.
    """

    def widens(old: Any, new: Any) -> bool:
        floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (old, new))
        return (
            floating
            and old.shape == new.shape
            and old.dtype != new.dtype == jnp.promote_types(old.dtype, new.dtype)
        )

    return {
        name: f"{name}: {saved[name].dtype} to {leaf.dtype}"
        for name, leaf in wanted.items()
        if name in saved and widen(name) and widens(saved[name], leaf)
    }


def read_arrays(
    path: epath.Path, wanted: dict[str, Any], saved: dict[str, Any]
) -> dict[str, jax.Array | np.ndarray]:
    """Reads arrays from `path`; every process its own shards, without waiting for the others.

    Args:
      path: Where `save_args` were written.
      wanted: By name, ShapeDtypeStructs or arrays of the saved shapes and types. Their shardings
        and memory kinds are those of the result; without a sharding it is a numpy array.
      saved: From `saved_arrays`.
    """
    there = {name: leaf for name, leaf in wanted.items() if offload.on_host(leaf)}
    on_host = host_leaves.read_host_leaves(path, there, {name: saved[name] for name in there})
    wanted = {name: leaf for name, leaf in wanted.items() if name not in there}
    if not wanted:
        return on_host
    arguments = ocp.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0),
        restore_args={name: _restore_args(leaf) for name, leaf in wanted.items()},
        partial_restore=True,
    )
    return on_host | handler(read_gigabytes(wanted, saved)).restore(path, args=arguments)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if getattr(leaf, "sharding", None) is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)


def read_gigabytes(wanted: dict[str, Any], saved: dict[str, Any]) -> int:
    """Returns how much may be in flight: enough for the shard that touches most saved pieces.

    Args:
      wanted: As for `read_arrays`.
      saved: From `saved_arrays`.
    """
    largest = 0
    for name, leaf in wanted.items():
        sharding = getattr(leaf, "sharding", None)
        shard = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        pieces = saved[name].storage.chunk_shape
        touched = saved[name].dtype.itemsize
        for length, part, piece in zip(leaf.shape, shard, pieces, strict=True):
            touched *= piece * min(math.ceil(length / piece), math.ceil(part / piece) + 1)
        largest = max(largest, touched)
    return max(_READ_GIGABYTES, math.ceil(largest / 1e9) + 1)
