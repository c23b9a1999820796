"""The two passes over layers with leaves of their own, in a loop.

Axis letters: B rows, T length, M width (embed).
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from m6jax import layouts, offload
from m6jax.pytrees import Tree
from m6jax.streaming.passes import ForwardPass, Layers, UpdatePart
from m6jax.streaming.trained import Trained, join, pick


class Unrolled(Layers):
    """Layers with leaves of their own, in a loop."""

    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """See `Layers.forward`."""
        names = layouts.layer_names(self.layout.depth)
        inputs, reports = [], []
        layer, x = _fetch_after({names[0]: params[names[0]]}, x)
        for i in range(len(names)):
            following = names[min(i + 1, len(names) - 1)]
            fetched, x = _fetch_after({following: params[following]}, x)
            x, report, kept = self.apply(layer, x, jnp.int32(i))
            inputs.append(kept)
            reports.append(report)
            layer = fetched
        reports = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)
        return ForwardPass(x, inputs, reports, layer)

    def backward(
        self,
        stack: Trained,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Trained, jax.Array, jax.Array]:
        """See `Layers.backward`."""
        names = layouts.layer_names(self.layout.depth)
        params, parts, squares = forward.fetched, [], jnp.float32(0)
        for i in reversed(range(len(names))):
            fetched = None
            if i > 0:
                fetched, x_grad = _fetch_after({names[i - 1]: stack.params[names[i - 1]]}, x_grad)
            report_grad = jax.tree.map(lambda leaf, i=i: leaf[i], report_grads)
            inputs = forward.inputs[i]
            grads, x_grad = self.gradients(params, inputs, jnp.int32(i), x_grad, report_grad)
            old = pick(stack, functools.partial(operator.eq, names[i]))
            now = Trained(params, *offload.to_device((old.opt_state, old.averaged)))
            new, square = update_part(now, grads)
            parts.append(jax.tree.map(offload.like, new, old))
            squares += square
            params = fetched
        return join(*parts), x_grad, squares


def _fetch_after(layer: Tree, x: jax.Array) -> tuple[Tree, jax.Array]:
    """Copies a layer to the device, not before `x` is there; returns both.

    Without the bond the compiler would copy all layers at once, or keep the forward pass's copies
    (and all that was computed with them) for the backward pass.
    """
    layer, x = jax.lax.optimization_barrier((layer, x))
    return offload.to_device(layer), x
