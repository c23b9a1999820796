"""One layer of a stacked leaf, by its number, inside of a compiled function.

>>> take(stack, 5).shape                # of [4, M, H]: layer 5 % 4 = 1, where the stack rests
(M, H)
>>> put(stack, layer, 1).shape          # written in place where `stack` is donated or carried
(4, M, H)
"""

from typing import Any

import jax

from m6jax.layouts import offload


def take(leaf: jax.Array, use: Any, as_stack: bool = False) -> jax.Array:
    """Returns the layer that a use takes; it rests where the leaf does.

    Args:
      leaf: [U, ...].
      use: int32[], its number, counted over all repeats of the U layers.
      as_stack: keep a leading axis of 1.
    """
    return jax.lax.dynamic_index_in_dim(leaf, use % leaf.shape[0], 0, keepdims=as_stack)


def put(leaf: jax.Array, layer: jax.Array, i: Any) -> jax.Array:
    """Returns a leaf with another layer i, resting where it did.

    Args:
      leaf: [U, ...].
      layer: [...], or [1, ...].
      i: int32[], less than U.
    """
    return jax.lax.dynamic_update_index_in_dim(leaf, offload.like(layer, leaf), i, 0)
