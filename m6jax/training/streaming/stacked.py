"""The two passes over layers that are sliced out of stacks, in scans.

A layer's gradient exists once its last use in the backward pass, the first in the forward pass, is
done. With leaves of 4, 2 and 1 layers in a stack of 8 (units of their own) there are four scans:

    uses 7 ... 4    all gradients are added up
    uses 3 2        leaves of 4 layers are updated, the others' gradients are added up
    use 1           leaves of 4 and of 2 are updated
    use 0           all are updated

Axis letters: B rows, T length, M width (embed), U distinct layers of a leaf, L uses.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Run
from m6jax.optimizers.weight_update import Weights
from m6jax.training.streaming import slices
from m6jax.training.streaming.parts import Seen, join_runs, layer_squares, norm_of, runs_of
from m6jax.training.streaming.passes import ForwardPass, Layers, UpdatePart


@struct.dataclass
class Way:
    """Where a backward pass stands, between two uses.

    Attributes:
      x_grad: [B, T, M], gradient by the input of the use before.
      fetched: what is on the device already of the layer that comes next.
      stack: what is updated, with None for leaves that are not concerned.
      sums: gradients added up over uses, float32, leading axes U; likewise.
    """

    x_grad: jax.Array
    fetched: list[jax.Array]
    stack: Weights
    sums: Tree


class Stacked(Layers):
    """Layers of a stack, or of one run of a stack after another."""

    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """See `Layers.forward`."""
        inputs, reports, fetched = [], [], None
        for run, own in zip(self.layout.runs, runs_of(params, self.layout), strict=True):
            forward = self._forward_run(own, run, x)
            x, fetched = forward.x, forward.fetched
            inputs.append(forward.inputs)
            reports.append(forward.reports)
        every = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *reports)
        return ForwardPass(x, inputs, every, fetched)

    def _forward_run(self, params: Tree, run: Run, x: jax.Array) -> ForwardPass:
        def one_use(carry: Any, i: jax.Array) -> tuple[Any, Any]:
            x, fetched = carry
            # Before the layer's work, so that the copy goes on beside it. The last one is the
            # layer that the backward pass begins with.
            following = slices.fetch(params, jnp.minimum(i + 1, run.length - 1))
            layer = slices.take(params, i, fetched)
            y, report, choices = self.apply(layer, x, run.first + i)
            return (y, following), (self.wait(x, choices), report)

        begin = x, slices.fetch(params, 0)
        if run.first > 0:
            begin = slices.fetch_after(params, 0, x)
        (x, fetched), (inputs, reports) = jax.lax.scan(
            one_use,
            begin,
            jnp.arange(run.length, dtype=jnp.int32),
            unroll=slices.layers_in_body(begin[1]),
        )
        return ForwardPass(x, inputs, reports, fetched)

    def backward(
        self,
        stack: Weights,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Weights, jax.Array, Seen]:
        """See `Layers.backward`."""
        parts: list[Weights] = []
        seen: list[Seen] = []
        fetched = forward.fetched
        runs = zip(self.layout.runs, runs_of(stack, self.layout), forward.inputs, strict=True)
        for run, own, inputs in reversed(list(runs)):
            if parts:
                x_grad, fetched = slices.fetch_after(own.params, run.length - 1, x_grad)
            reports = jax.tree.map(lambda leaf, run=run: leaf[run.layers], report_grads)
            by_use = (jnp.arange(run.length, dtype=jnp.int32), inputs, reports)
            sums = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, jnp.float32),
                slices.of_units(own.params, 0, run.length - 1),
            )
            way = Way(x_grad, fetched, own, sums)
            units = {leaf.shape[0] for leaf in jax.tree.leaves(own.params)}
            above = Seen(*(slices.nothing(own.params),) * 2)
            for span in reversed(list(itertools.pairwise(sorted({0, *units, run.length})))):
                way, lower = self._go_back(way, by_use, run, span, update_part)
                above = slices.map_present(lower, _append, above)
            seen.insert(0, above)
            parts.insert(0, way.stack)
            x_grad = way.x_grad
        return join_runs(parts, self.layout), x_grad, join_runs(seen, self.layout)

    def _go_back(
        self, way: Way, by_use: Any, run: Run, span: tuple[int, int], update_part: UpdatePart
    ) -> tuple[Way, Seen]:
        """Goes back through the uses from one unit to the next smaller one (or 0).

        Leaves of the smaller unit, and of yet smaller ones, are to be used again; all others are at
        their last use.

        Args:
          way: where the pass stands.
          by_use: numbers in the run, inputs and gradients by the reports of all uses.
          run: what is gone through.
          span: the smaller and the larger unit.
          update_part: updates a part of a layer.

        Returns:
          Where the pass stands then, and what was seen of the gradients used: [n] for n uses, None
          for leaves that are to be used again.
        """
        low, high = span
        again = slices.of_units(way.stack, 0, low)
        sums = slices.of_units(way.sums, high, run.length)
        inputs = jax.tree.map(lambda leaf: leaf[low:high], (by_use, sums))

        def one_use(way: Way, inputs: Any) -> tuple[Way, Seen]:
            (i, kept, report_grad), later = inputs
            params = slices.together(way.stack.params, again.params)
            following = slices.fetch(params, jnp.maximum(i - 1, 0))
            layer = slices.take(params, i, way.fetched)
            grads, x_grad = self.gradients(layer, kept, way.x_grad, report_grad, run.first + i)
            last = _LastUse(i, layer, grads, later)
            stack, seen = self._update(way.stack, last, run, update_part)
            x_grad = self.spread(jnp.isfinite(norm_of(seen.squares)), x_grad)
            added = slices.map_present(way.sums, lambda s, g: s.at[i % s.shape[0]].add(g), grads)
            return Way(x_grad, following, stack, added), seen

        start = Way(
            way.x_grad,
            way.fetched,
            slices.of_units(way.stack, high, run.length),
            slices.of_units(way.sums, 0, low),
        )
        unroll = slices.layers_in_body(way.fetched)
        way, seen = jax.lax.scan(one_use, start, inputs, reverse=True, unroll=unroll)
        stack, sums = slices.together(way.stack, again), slices.together(way.sums, sums)
        return Way(way.x_grad, way.fetched, stack, sums), seen

    def _update(
        self, stack: Weights, last: "_LastUse", run: Run, update_part: UpdatePart
    ) -> tuple[Weights, Seen]:
        """Updates a layer's leaves that are in `stack`, those of one unit at a time."""

        def summed(leaf: jax.Array, grad: jax.Array, later: Any) -> jax.Array:
            share = leaf.shape[0] / run.length if self.mean else 1.0
            return grad if later is None else (grad + later) * share

        all_grads = slices.map_present(stack.params, summed, last.grads, last.later)
        squares = layer_squares(all_grads)
        finite = jnp.isfinite(norm_of(squares))
        new_stack, all_finite = stack, slices.nothing(stack.params)
        for unit in sorted({leaf.shape[0] for leaf in jax.tree.leaves(stack.params)}):
            old = slices.of_units(stack, unit, unit)
            rest = old.replace(params=None)  # type: ignore[attr-defined]
            rest = slices.take(rest, last.number, slices.fetch(rest, last.number))
            params = slices.map_present(old.params, lambda _, leaf: leaf, last.params)
            grads, own = (
                slices.map_present(old.params, lambda _, leaf: leaf, tree)
                for tree in (all_grads, squares)
            )
            new, new_finite = update_part(rest.replace(params=params), grads, own, finite)
            new_stack = slices.together(slices.write(old, new, last.number), new_stack)
            all_finite = slices.together(new_finite, all_finite)
        return new_stack, Seen(squares, all_finite)


def _append(lower: jax.Array, upper: jax.Array | None) -> jax.Array:
    return lower if upper is None else jnp.concatenate([lower, upper])


@struct.dataclass
class _LastUse:
    """What a layer is updated with.

    Attributes:
      number: int32[], of the layer in its run.
      params: on the device.
      grads: by these.
      later: sums of the gradients of later uses, for leaves that have any.
    """

    number: jax.Array
    params: Tree
    grads: Tree
    later: Tree
