"""Image patches as a part of the sequence, before the text (M6, arXiv 2103.00823).

A row has slots for patches: `patch_mask` says at which positions of T they stand, `patches` holds
their features in the same order. With T = 5 and `patch_mask` 1 1 0 0 0 the first two positions are
the two patches of a picture, the rest is its text.

Axis letters: B rows, T length, M width (embed), I patches of a row, F features of a patch.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from m6jax.foundation.partitioning import declare
from m6jax.modeling.layers import matrix_init


class PatchEmbedder(nn.Module):
    """Projects patch features to the width of the model and puts them in their positions.

    Attributes:
      init_scale: factor on the initial standard deviation 1 / sqrt(F).
      dtype: type of the arithmetic.
      param_dtype: type of the matrix.
    """

    init_scale: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        patches: Float[Array, "B I F"],
        patch_mask: Int[Array, "B T"],
    ) -> Float[Array, "B T M"]:
        """Replaces the positions that hold patches.

        Args:
          x: [B, T, M], embedded tokens.
          patches: float32[B, I, F].
          patch_mask: int32[B, T], 1 where a patch stands; at most I in a row.
        """
        kernel = self.param(
            "kernel",
            declare(matrix_init(self.init_scale), (None, "embed")),
            (patches.shape[-1], x.shape[-1]),
            self.param_dtype,
        )
        embedded = jnp.einsum("bif,fm->bim", patches.astype(self.dtype), kernel.astype(self.dtype))
        number = jnp.cumsum(patch_mask, axis=1) - 1  # [B, T], which patch stands here
        placed = jnp.take_along_axis(embedded, number[..., None], axis=1, mode="clip")
        return jnp.where(patch_mask[..., None] > 0, placed, x)
