"""A batch in parts, which go through a layer one after another while it is on the device.

    for each part:      y = layer(x)                        results lie beside each other, [N, ...]
    for each part:      gradients of the layer              add up in float32

The compiled program has one part's work in it, whatever N. One part is no loop, and has no axis N.

Axis letters: N parts, B rows of the batch, T length, M width (embed).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax.foundation.partitioning import constrain
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.block import Batch, Context
from m6jax.modeling.transformer import Transformer
from m6jax.training.train_step import cut_rows


@struct.dataclass
class Part:
    """A part of a batch.

    Attributes:
      batch: its rows, [B / N, ...].
      context: what every layer gets with them.
    """

    batch: Batch
    context: Context


class Parts:
    """The parts of a batch.

    Attributes:
      batch: all rows, in the order in which `by_part` takes them.
    """

    def __init__(self, model: Transformer, batch: Batch, count: int, key: jax.Array | None):
        """Cuts a batch in equal contiguous parts.

        Args:
          model: makes the parts' contexts.
          batch: see `Transformer.apply`; arrays with leading axis B.
          count: N.
          key: of the step, None without randomness; where N > 1, the number of a part is folded in.

        Raises:
          ConfigError: N does not divide B, or routing groups do not divide the rows of a part.
        """
        rows, length = batch["tokens"].shape
        moe = model.config.moe
        group_size = (moe and moe.group_size) or length
        if rows % count:
            raise ConfigError(
                f"Update.microbatches: {count} do not divide a batch of {rows} rows (choose a"
                " divisor)"
            )
        if count > 1 and (rows // count * length) % group_size:
            raise ConfigError(
                f"MoEConfig.group_size: a part of {rows // count} rows of {length} tokens is no"
                f" whole number of groups of {group_size} tokens (choose Update.microbatches <"
                f" {count} or smaller groups)"
            )
        self._count, self._model, self._key = count, model, key
        self.batch: Batch = batch
        if count == 1:
            self._whole = Part(batch, model.context(batch, key))
            return
        self._parts = jax.tree.map(lambda x: cut_rows(x, count), dict(batch)), jnp.arange(count)

        # Rows are put together so that each stays on its device.
        def together(x: jax.Array) -> jax.Array:
            x = x.swapaxes(0, 1).reshape(rows, *x.shape[2:])
            return constrain(x, ("batch", *(None,) * (x.ndim - 1)))

        self.batch = jax.tree.map(together, self._parts[0])

    def by_part(self, x: jax.Array) -> jax.Array:
        """Returns [N, B / N, ...] of values of all rows, [B, ...] in the order of `batch`."""
        if self._count == 1:
            return x
        x = x.reshape(-1, self._count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, (None, "batch", *(None,) * (x.ndim - 2)))

    def swapped(self, tree: Tree) -> Tree:
        """Exchanges the axes of parts and of uses, [N, L, ...] and [L, N, ...]."""
        return tree if self._count == 1 else jax.tree.map(lambda x: x.swapaxes(0, 1), tree)

    def each(self, work: Callable[..., Tree], *arguments: Tree) -> Tree:
        """Returns what `work` gives for every part, with a leading axis N.

        Args:
          work: function of (part, its arguments).
          *arguments: with a leading axis N.
        """
        return self.total(lambda *args: (None, work(*args)), *arguments)[1]

    def total(self, work: Callable[..., tuple[Tree, Tree]], *arguments: Tree) -> tuple[Tree, Tree]:
        """Does what `each` does, where `work` also gives numbers that add up over the parts.

        Args:
          work: function of (part, its arguments) -> (what adds up, what stays apart).
          *arguments: with a leading axis N.

        Returns:
          The sums, in float32 where N > 1, and what stays apart with a leading axis N.
        """
        if self._count == 1:
            return work(self._whole, *arguments)

        def on_part(inputs: Any) -> tuple[Tree, Tree]:
            (batch, number), own = inputs
            key = None if self._key is None else jax.random.fold_in(self._key, number)
            return work(Part(batch, self._model.context(batch, key)), *own)

        def add(sums: Tree, inputs: Any) -> tuple[Tree, Tree]:
            added, apart = on_part(inputs)
            return jax.tree.map(jnp.add, sums, added), apart

        inputs = (self._parts, arguments)
        first = jax.eval_shape(lambda: on_part(jax.tree.map(lambda x: x[0], inputs))[0])
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), first)
        return jax.lax.scan(add, sums, inputs)
