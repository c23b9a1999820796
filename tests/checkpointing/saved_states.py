"""A small state of several types on a mesh, for the tests of checkpoints."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
HOST = "pinned_host"
DESCRIPTION = {"stage": "pseudo", "layout": {"unit": 1}, "config": "train.steps = 10\n词 = 1"}


class State(NamedTuple):
    step: jax.Array
    params: dict
    rng: jax.Array


def placed(value, *spec, memory=None):
    return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec), memory_kind=memory))


def make_state(offset=0.0, memory=None):
    weight = np.arange(8 * 6, dtype=np.float32).reshape(8, 6) / 7 + offset
    return State(
        step=placed(jnp.int32(5)),
        params={
            "head": placed(weight, "a", "b", memory=memory),
            "gate": placed(weight.astype(jnp.bfloat16), "b", memory=memory),
        },
        rng=placed(jax.random.key_data(jax.random.key(2**31 + 3))),
    )


def described(tree, *spec, memory=None):
    """The same shapes and types on another sharding; scalars and vectors are replicated."""

    def describe(leaf):
        placement = PartitionSpec(*spec) if leaf.ndim == 2 else PartitionSpec()
        sharding = NamedSharding(MESH, placement, memory_kind=memory if leaf.ndim == 2 else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, tree)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def save(checkpoints, step, offset=0.0, **options):
    checkpoints.save(step, make_state(offset), {"position": step}, DESCRIPTION, **options)
