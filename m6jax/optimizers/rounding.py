"""How weights of few bits take small updates.

Near 1 the values of bfloat16 are 1/128 apart. An update of 1/1024, rounded to the nearest value, is
lost, and so are all that follow it. Rounded up one time in eight and down the other seven, it is
there on average:

>>> stochastic(jnp.full(8000, 1 + 1 / 1024), key)     # about 1000 times 1 + 1/128, else 1

The random bits of a weight depend on the step, on the weight's path and on the number of its layer,
so that stacked, unrolled and streamed layers round alike, on every mesh.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import STACK, LeafName

_PURPOSE = 0x526F756E  # keeps these keys apart from those of dropout and jitter


class Rounding(enum.Enum):
    """How weights that are kept in fewer bits than float32 are rounded after an update.

    STOCHASTIC: up or down at random, right on average; for bfloat16. MASTER: to the nearest, from
    float32 masters that are kept beside the optimizer's state and take the updates. NEAREST: to the
    nearest, which loses small updates. Weights in float32 are never rounded.
    """

    STOCHASTIC = "stochastic"
    MASTER = "master"
    NEAREST = "nearest"


def check_rounding(rounding: Rounding, param_dtype: str) -> None:
    """Raises ConfigError for a rounding that weights of a type cannot have."""
    if rounding is Rounding.STOCHASTIC and param_dtype == "float16":
        raise ConfigError(
            "Update.rounding: STOCHASTIC is for bfloat16, not for ModelConfig.param_dtype ="
            " 'float16' (set Update.rounding = 'MASTER' or 'NEAREST', or the type 'bfloat16')"
        )
    if rounding is Rounding.MASTER and param_dtype == "float32":
        raise ConfigError(
            "Update.rounding: MASTER keeps float32 copies of weights that are float32 already"
            " (leave Update.rounding at 'STOCHASTIC', which does not touch them, or set"
            " ModelConfig.param_dtype = 'bfloat16')"
        )


def stochastic(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two bfloat16 neighbours, to the nearer the more often.

    The expected value is `x`; what bfloat16 has comes back as it is.

    Args:
      x: float32, of any shape.
      key: random key.
    """
    # bfloat16 is the upper half of float32. Adding to the lower half carries over to the upper with
    # the probability that the lower half stands for.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) >> 16
    rounded = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def leaf_keys(key: jax.Array, params: Tree) -> Tree | None:
    """Returns the raw keys of all weights for one step.

    Args:
      key: of the step.
      params: parameters in any layout.

    Returns:
      A tree like the parameters of uint32[2], with a leading axis [U] in a stack; None where no
      leaf is bfloat16.
    """
    if all(leaf.dtype != jnp.bfloat16 for leaf in jax.tree.leaves(params)):
        return None
    key = jax.random.fold_in(key, _PURPOSE)

    def of_leaf(name: str, leaf: Any) -> jax.Array:
        own = LeafName.of(name)
        path_key = pytrees.key_of(f"{STACK}/{own.inside}" if own.in_stack else name, key)

        def of_layer(number: Any) -> jax.Array:
            return jax.random.key_data(jax.random.fold_in(path_key, number))

        if own.stacked:
            return jax.vmap(of_layer)(own.first + jnp.arange(leaf.shape[0]))
        return of_layer(own.first)

    return pytrees.map_named(of_leaf, params)


def to_types(values: Tree, like: Tree, keys: Tree | None, purpose: int = 0) -> Tree:
    """Rounds float32 values to the types of other arrays.

    Args:
      values: float32.
      like: arrays of the same shapes in the types that are wanted.
      keys: see `leaf_keys`, for stochastic rounding to bfloat16; None: to the nearest.
      purpose: another number gives other random bits with the same keys.
    """
    if keys is None:
        return jax.tree.map(lambda x, old: x.astype(old.dtype), values, like)

    def round_one(x: jax.Array, data: jax.Array) -> jax.Array:
        return stochastic(x, jax.random.fold_in(jax.random.wrap_key_data(data), purpose))

    def round_leaf(x: jax.Array, old: jax.Array, data: jax.Array) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return x.astype(old.dtype)
        return round_one(x, data) if data.ndim == 1 else jax.vmap(round_one)(x, data)

    return jax.tree.map(round_leaf, values, like, keys)
