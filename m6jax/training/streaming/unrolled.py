"""The two passes over layers with leaves of their own, in a loop.

Axis letters: B rows, T length, M width (embed).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from m6jax import layouts
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import offload
from m6jax.optimizers.weight_update import Weights
from m6jax.training.streaming.parts import Seen, join, layer_squares, norm_of, pick
from m6jax.training.streaming.passes import ForwardPass, Layers, UpdatePart


class Unrolled(Layers):
    """Layers with leaves of their own, in a loop."""

    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """See `Layers.forward`."""
        names = layouts.layer_names(self.layout.depth)
        inputs, reports = [], []
        layer = offload.to_device({names[0]: params[names[0]]})
        for i, following in enumerate([*names[1:], names[-1]]):
            # The last layer stays, for the backward pass begins with it.
            own = params if i + 1 < len(names) else layer
            apply = functools.partial(self.apply, use=jnp.int32(i))
            fetched, (y, report, choices) = self._fetch_beside(
                own[following], None, apply, layer, x
            )
            inputs.append(self.wait(x, choices))
            reports.append(report)
            x, layer = y, {following: fetched}
        reports = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)
        return ForwardPass(x, inputs, reports, layer)

    def backward(
        self,
        stack: Weights,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Weights, jax.Array, Seen]:
        """See `Layers.backward`."""
        names = layouts.layer_names(self.layout.depth)
        params, parts = forward.fetched, []
        seen = Seen({}, {})
        written = None
        for i in reversed(range(len(names))):
            report_grad = jax.tree.map(lambda leaf, i=i: leaf[i], report_grads)
            old = pick(stack, functools.partial(operator.eq, names[i]))
            before = {names[i - 1]: stack.params[names[i - 1]]} if i > 0 else None
            (following, rest), (grads, x_grad) = self._fetch_beside(
                (before, old.replace(params=None)),  # type: ignore[attr-defined]
                written,
                functools.partial(self.gradients, use=jnp.int32(i)),
                params,
                forward.inputs[i],
                x_grad,
                report_grad,
            )
            square = layer_squares(grads)
            finite = jnp.isfinite(norm_of(square))
            new, all_finite = update_part(rest.replace(params=params), grads, square, finite)
            x_grad = self.spread(finite, x_grad)
            parts.append(jax.tree.map(offload.like, new, old))
            seen = Seen(seen.squares | square, seen.finite | all_finite)
            written = parts[-1]
            params = following
        return join(*parts), x_grad, seen

    def _fetch_beside(
        self, tree: Tree, written: Tree | None, work: Callable[..., Any], *arguments: Any
    ) -> tuple[Tree, Any]:
        """Copies what rests on the host to the device, and works meanwhile.

        Left to itself, a compiler would copy all layers at once, keep the forward pass's copies for
        the backward pass, and update and write back all layers at the very end. What is inside of a
        branch it leaves there; so copies and work are in a branch that is always taken, which the
        compiler does not know. The other branch asks for what was written before, which therefore
        has to be there by then.

        Args:
          tree: to be copied.
          written: what the layer before in the pass has become, like `tree`; None at the beginning.
          work: what to do; its results are on the device.
          *arguments: of `work`.

        Returns:
          The tree, all on the device, and what `work` returns.
        """
        leaves, treedef = jax.tree.flatten(tree)
        moved = [leaf for leaf in leaves if offload.on_host(leaf)]
        if not moved:
            return tree, work(*arguments)
        described = jax.eval_shape(work, *arguments)

        def taken(moved: list[jax.Array], _: Any, *arguments: Any) -> Any:
            return [offload.to_device(leaf) for leaf in moved], work(*arguments)

        def not_taken(moved: list[jax.Array], written: Tree | None, *_: Any) -> Any:
            done = offload.to_device(jax.tree.leaves(written))
            anything = sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in done)
            return jax.tree.map(
                lambda leaf: jnp.full(leaf.shape, anything, leaf.dtype), (moved, described)
            )

        # The barrier keeps what follows out of the branches.
        copies, result = jax.lax.optimization_barrier(
            jax.lax.cond(self.always, taken, not_taken, moved, written, *arguments)
        )
        ready = iter(copies)
        every = [next(ready) if offload.on_host(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(treedef, every), result
