"""The two passes over the layers, forward and back with updates, for stacked and unrolled layers.

Axis letters: B rows, T length, M width (embed), U distinct layers, L uses.
"""

import abc
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import layouts, offload
from m6jax.layouts import Layout
from m6jax.modeling.config import Remat
from m6jax.modeling.stack import rematerialize
from m6jax.pytrees import Tree
from m6jax.streaming.trained import Trained, join, pick

Block = Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Any]]
UpdatePart = Callable[[Trained, Tree], tuple[Trained, jax.Array]]


@struct.dataclass
class ForwardPass:
    """What the forward pass hands to the backward pass.

    Attributes:
      x: [B, T, M], output of the last layer.
      inputs: [B, T, M] of every use, stacked to [L, B, T, M] where the layers are.
      reports: what every use reports, leading axes L.
      fetched: what is on the device already of the layer that the backward pass begins with.
    """

    x: jax.Array
    inputs: Any
    reports: Any
    fetched: Any


class Layers(abc.ABC):
    """The two passes over the layers of a form."""

    def __init__(
        self, block: Block, remat: Remat, layout: Layout, mean: bool, inputs_on_host: bool
    ):
        self._layout = layout
        self._share = 1 / layout.repeats if mean else 1.0
        self._inputs_on_host = inputs_on_host
        self._block = block
        # In the scan as well: forward and backward of a layer are in one body here.
        recomputed = rematerialize(
            lambda layer, x, use, _: block(layer, x, use), remat, in_scan=False
        )
        self._recomputed = lambda layer, x, use: recomputed(layer, x, use, None)

    @abc.abstractmethod
    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """Applies all layers to x [B, T, M]."""

    @abc.abstractmethod
    def backward(
        self,
        stack: Trained,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Trained, jax.Array, jax.Array]:
        """Updates all layers.

        Args:
          stack: parameters, optimizer's state and averages of all layers.
          forward: from `forward`.
          x_grad: gradient by its output.
          report_grads: gradient by its reports.
          update_part: updates one layer.

        Returns:
          The new stack, the gradient by the first layer's input, and the sum over the distinct
          layers of their gradients' squares.
        """

    def _keep(self, x: jax.Array) -> jax.Array:
        return offload.to_host(x) if self._inputs_on_host else x

    def _gradients(
        self, layer: Tree, x: jax.Array, use: Any, x_grad: jax.Array, report_grad: Any
    ) -> tuple[Tree, jax.Array]:
        """Returns the gradients by a layer's parameters and input."""
        _, vjp = jax.vjp(lambda layer, x: self._recomputed(layer, x, use), layer, x)
        return vjp((x_grad, report_grad))


class Stacked(Layers):
    """Layers sliced out of stacks, in scans."""

    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """See `Layers.forward`."""
        depth, unit = self._layout.depth, self._layout.unit

        def one_use(carry: Any, use: jax.Array) -> tuple[Any, Any]:
            x, fetched = carry
            # Before the layer's work, so that the copy goes on beside it. The last one is the
            # layer that the backward pass begins with.
            following = _fetch(params, jnp.minimum(use + 1, depth - 1) % unit)
            y, report = self._block(_layer(params, use % unit, fetched), x, use)
            return (y, following), (self._keep(x), report)

        uses = jnp.arange(depth, dtype=jnp.int32)
        begin = (x, _fetch(params, 0))
        (x, fetched), (inputs, reports) = jax.lax.scan(
            one_use, begin, uses, unroll=_unroll(begin[1])
        )
        return ForwardPass(x, inputs, reports, fetched)

    def backward(
        self,
        stack: Trained,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Trained, jax.Array, jax.Array]:
        """See `Layers.backward`."""
        unit = self._layout.unit
        uses = jnp.arange(self._layout.depth, dtype=jnp.int32)
        by_use = (uses, forward.inputs, report_grads)
        earlier = jax.tree.map(lambda leaf: leaf[:unit], by_use)
        x_grad, fetched, sums = self._sum_of_later_uses(stack.params, forward, x_grad, by_use)

        def one_layer(carry: Any, inputs: Any) -> tuple[Any, jax.Array]:
            x_grad, fetched, stack = carry
            (use, x, report_grad), later = inputs
            following = _fetch(stack.params, jnp.maximum(use - 1, 0))
            params = _layer(stack.params, use, fetched)
            x = offload.to_device(x)
            grads, x_grad = self._gradients(params, x, use, x_grad, report_grad)
            if later is not None:
                grads = jax.tree.map(lambda g, sum_: (g + sum_) * self._share, grads, later)
            rest = (stack.opt_state, stack.averaged)
            opt_state, averaged = _layer(rest, use, _fetch(rest, use))
            layer, square = update_part(Trained(params, opt_state, averaged), grads)
            stack = jax.tree.map(lambda leaf, new: _write(leaf, new, use), stack, layer)
            return (x_grad, following, stack), square

        carry, squares = jax.lax.scan(
            one_layer,
            (x_grad, fetched, stack),
            (earlier, sums),
            reverse=True,
            unroll=_unroll(fetched),
        )
        return carry[2], carry[0], squares.sum()

    def _sum_of_later_uses(
        self, params: Tree, forward: ForwardPass, x_grad: jax.Array, by_use: Any
    ) -> tuple[jax.Array, Any, Tree | None]:
        """Goes back to the first repeat, and adds up the gradients of a layer's later uses.

        Returns:
          The gradient by the input of use U, what is fetched of layer U - 1, and the sums on the
          device, float32, leading axes U; None where every layer has one use.
        """
        unit = self._layout.unit
        if self._layout.repeats == 1:
            return x_grad, forward.fetched, None

        def one_use(carry: Any, inputs: Any) -> tuple[Any, None]:
            x_grad, fetched, sums = carry
            use, x, report_grad = inputs
            following = _fetch(params, (use - 1) % unit)
            layer = _layer(params, use % unit, fetched)
            grads, x_grad = self._gradients(layer, offload.to_device(x), use, x_grad, report_grad)
            sums = jax.tree.map(lambda s, g: s.at[use % unit].add(g), sums, grads)
            return (x_grad, following, sums), None

        later = jax.tree.map(lambda leaf: leaf[unit:], by_use)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        carry, _ = jax.lax.scan(
            one_use,
            (x_grad, forward.fetched, sums),
            later,
            reverse=True,
            unroll=_unroll(forward.fetched),
        )
        return carry


class Unrolled(Layers):
    """Layers with leaves of their own, in a loop."""

    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """See `Layers.forward`."""
        names = layouts.layer_names(self._layout.depth)
        inputs, reports = [], []
        layer, x = _fetch_after({names[0]: params[names[0]]}, x)
        for i in range(len(names)):
            following = names[min(i + 1, len(names) - 1)]
            fetched, x = _fetch_after({following: params[following]}, x)
            inputs.append(self._keep(x))
            x, report = self._block(layer, x, jnp.int32(i))
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
        names = layouts.layer_names(self._layout.depth)
        params, parts, squares = forward.fetched, [], jnp.float32(0)
        for i in reversed(range(len(names))):
            fetched = None
            if i > 0:
                fetched, x_grad = _fetch_after({names[i - 1]: stack.params[names[i - 1]]}, x_grad)
            report_grad = jax.tree.map(lambda leaf, i=i: leaf[i], report_grads)
            x = offload.to_device(forward.inputs[i])
            grads, x_grad = self._gradients(params, x, jnp.int32(i), x_grad, report_grad)
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


def _fetch(stacks: Tree, i: Any) -> list[jax.Array]:
    """Copies the slices i of all leaves on the host to the device."""
    return [
        offload.to_device(_slice(leaf, i))
        for leaf in jax.tree.leaves(stacks)
        if offload.on_host(leaf)
    ]


def _unroll(fetched: list[jax.Array]) -> int:
    """Returns how many layers a scan's body has: two where copies are made ahead.

    A carried array has one buffer. With one layer in the body, the copy of the next layer would
    wait for that buffer until the current layer is done, and nothing would go on beside anything;
    with two, the copies take turns between two buffers.
    """
    return 2 if fetched else 1


def _layer(stacks: Tree, i: Any, fetched: list[jax.Array]) -> Tree:
    """Returns layer i: what was fetched, and slices of the leaves on the device."""
    ready = iter(fetched)
    return jax.tree.map(
        lambda leaf: next(ready) if offload.on_host(leaf) else _slice(leaf, i), stacks
    )


def _slice(leaf: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False)


def _write(leaf: jax.Array, new: jax.Array, i: Any) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, offload.like(new, leaf), i, 0)
