"""One layer of a leaf is taken and put back by its number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from m6jax.layouts import layer_slices, offload

LEAF = np.arange(12.0, dtype=np.float32).reshape(4, 3)


def leaf(memory):
    return jax.device_put(LEAF, SingleDeviceSharding(jax.devices()[0], memory_kind=memory))


@pytest.mark.parametrize("memory", [offload.DEVICE, offload.HOST])
def test_a_use_takes_its_layer_where_it_rests(memory):
    take = jax.jit(layer_slices.take, static_argnames="as_stack")
    for use in range(8):
        np.testing.assert_array_equal(take(leaf(memory), use), LEAF[use % 4])
    one = take(leaf(memory), 6, as_stack=True)
    np.testing.assert_array_equal(one, LEAF[2:3])
    assert jax.jit(lambda x: offload.on_host(layer_slices.take(x, 0)))(leaf(memory)) == (
        memory == offload.HOST
    )


@pytest.mark.parametrize("memory", [offload.DEVICE, offload.HOST])
@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_a_layer_is_put_where_the_stack_rests(memory, shape):
    put = jax.jit(layer_slices.put, out_shardings=leaf(memory).sharding)
    new = put(leaf(memory), jnp.full(shape, 7.0), 2)
    np.testing.assert_array_equal(new, np.where(np.arange(4)[:, None] == 2, 7.0, LEAF))
    assert offload.on_host(new) == (memory == offload.HOST)
