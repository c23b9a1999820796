"""Second moments for layers that are about to have gradients of their own.

The second moments of a shared layer are those of a mean over its uses, in which the noise of the
uses has averaged out. A layer of its own sees larger gradients, and nobody has seen them yet. So
they are measured: for a few batches the step of the new stage is made with an optimizer that moves
nothing and writes down the squares that it sees.

>>> state = delink(state, old, new, Policy.COPY)
>>> for number, batch in enumerate(batches):        # second moments of the mean of the squares
...   observer = Observer(optimizer, old, new, number)
...   state, _ = train_step(state, batch, tx=observer.build(axes), learning_rate=zero, ...)

Being the stage's own step it sees what training will see, clipped and scaled alike, in the memory
of a training step; streamed, one layer's gradient at a time, and the moments are written where they
rest.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout, LeafName
from m6jax.optimizers import Optimizer

_OF_SQUARES = 2  # the power in GRADIENT_POWERS of what is measured


@dataclasses.dataclass(frozen=True)
class Observer(Optimizer):
    """Moves nothing; makes second moments of the squares that it sees.

    Attributes:
      optimizer: whose state it is.
      old: the layout that was delinked.
      new: the layout of now; what has the same unit in both keeps its moments.
      number: int32[], how many batches were seen before this one; at 0 old moments are forgotten.
    """

    optimizer: Optimizer
    old: Layout
    new: Layout
    number: Any

    def build(self, axes: Tree) -> optax.GradientTransformation:
        """See `Optimizer.build`."""

        def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            squares = jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)), grads)
            seen = self.optimizer.with_second_moments(state, squares, axes)
            fields = {
                field: pytrees.map_named(self._mean, getattr(state, field), getattr(seen, field))
                for field, power in state.GRADIENT_POWERS.items()
                if power == _OF_SQUARES
            }
            still = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            return still, state.replace(**fields)

        return optax.GradientTransformation(self.optimizer.build(axes).init, update)

    def state_axes(self, axes: Tree, params: Tree) -> Any:
        """See `Optimizer.state_axes`."""
        return self.optimizer.state_axes(axes, params)

    def with_second_moments(self, state: Any, squares: Tree, axes: Tree) -> Any:
        """See `Optimizer.with_second_moments`."""
        return self.optimizer.with_second_moments(state, squares, axes)

    def _mean(self, name: str, so_far: jax.Array, seen: jax.Array) -> jax.Array:
        if not LeafName.of(name).in_stack or self.old.unit_of(name) == self.new.unit_of(name):
            return so_far
        return (so_far * self.number + seen) / (self.number + 1)
