"""Trees of parameters in which every number says whose it is."""

import jax.numpy as jnp

from m6jax.layouts import Layout


def tree(unit=2):
    """Layer i of `w` is full of i, of `norm/scale` of 10 + i; `count` is i."""
    numbers = jnp.arange(unit, dtype=jnp.float32)
    return {
        "head": jnp.full((3,), 7.0),
        "layers": {
            "count": jnp.arange(unit),
            "norm": {"scale": 10 + numbers[:, None] * jnp.ones((unit, 2))},
            "w": numbers[:, None, None] * jnp.ones((unit, 2, 3)),
        },
    }


def units(unit, *parts):
    return Layout(depth=12, unit=unit, parts=parts)
