"""The two passes over the layers, forward and back with updates: what they have in common.

A batch in N parts goes through a layer part by part (see `microbatches`): then all that is said to
have a leading axis B has N and B / N instead, and what layers report has an axis N after L.

Axis letters: B rows, T length, M width (embed), U distinct layers, L uses, N parts.
"""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout, offload
from m6jax.modeling import routers
from m6jax.modeling.block import Context
from m6jax.modeling.config import Remat
from m6jax.modeling.stack import rematerialize
from m6jax.optimizers.weight_update import Weights
from m6jax.training.streaming.microbatches import Part, Parts
from m6jax.training.streaming.parts import Seen

Block = Callable[[Tree, jax.Array, jax.Array, Context], tuple[jax.Array, Any]]
Choices = tuple[jax.Array, ...]  # of a layer's routers
Input = tuple[jax.Array, Choices]  # of a layer
# (a part, the gradients by it, their squares, bool[] whether all is finite)
#   -> (the part, bool[] for every leaf, whether it is finite then)
UpdatePart = Callable[[Weights, Tree, Tree, jax.Array], tuple[Weights, Tree]]


@struct.dataclass
class ForwardPass:
    """What the forward pass hands to the backward pass.

    Attributes:
      x: [B, T, M], output of the last layer.
      inputs: `Input` of every use; stacked, with leading axes n, for every run of n layers of a
        stack.
      reports: what every use reports, leading axes L.
      fetched: what is on the device already of the layer that the backward pass begins with.
    """

    x: jax.Array
    inputs: Any
    reports: Any
    fetched: Any


class Layers(abc.ABC):
    """The two passes over the layers of a form.

    Attributes:
      block: applies a layer: (its parameters, x, number of the use, context) -> (x, report).
      layout: how the stack lies.
      mean: whether a shared layer's gradient is the mean over its uses.
      always: bool[], true, but not to a compiler's knowledge; see `Unrolled`.
    """

    def __init__(
        self,
        block: Block,
        parts: Parts,
        remat: Remat,
        layout: Layout,
        mean: bool,
        inputs_on_host: bool,
        always: jax.Array,
    ):
        self.always = always
        self.layout = layout
        self.mean = mean
        self._inputs_on_host = inputs_on_host
        self.block = block
        self._parts = parts
        self._remat = remat

    @abc.abstractmethod
    def forward(self, params: Tree, x: jax.Array) -> ForwardPass:
        """Applies all layers to x [B, T, M]."""

    @abc.abstractmethod
    def backward(
        self,
        stack: Weights,
        forward: ForwardPass,
        x_grad: jax.Array,
        report_grads: Any,
        update_part: UpdatePart,
    ) -> tuple[Weights, jax.Array, Seen]:
        """Updates all layers, but for those whose gradient is not finite and all below them.

        Args:
          stack: parameters, optimizer's state and averages of all layers.
          forward: from `forward`.
          x_grad: gradient by its output.
          report_grads: gradient by its reports.
          update_part: updates one layer.

        Returns:
          The new stack, the gradient by the first layer's input, and what was seen.
        """

    def apply(self, layer: Tree, x: jax.Array, use: Any) -> tuple[jax.Array, Any, Choices]:
        """Applies a layer.

        Returns:
          Its output, its report, and which experts were chosen.
        """

        def apply_to(part: Part, x: jax.Array) -> tuple[jax.Array, Any, Choices]:
            with routers.recorded() as choices:
                y, report = self.block(layer, x, use, part.context)
            return y, report, tuple(choices)

        return self._parts.each(apply_to, x)

    def spread(self, finite: jax.Array, x_grad: jax.Array) -> jax.Array:
        """Returns a gradient by a layer's input, NaN if the layer's own is not finite.

        So the gradients of all layers below are not finite either, and these stay as they were.
        """
        return jnp.where(finite, x_grad, jnp.nan)

    def wait(self, x: jax.Array, choices: Choices) -> Input:
        """Returns what waits for the backward pass: a layer's input, and its routers' choices.

        Scores of a recomputed layer, rounded otherwise, would choose other experts.
        """
        return (offload.to_host(x) if self._inputs_on_host else x), choices

    def gradients(
        self, layer: Tree, inputs: Input, x_grad: jax.Array, report_grad: Any, use: Any
    ) -> tuple[Tree, jax.Array]:
        """Returns the gradients by a layer's parameters, summed over the parts, and its input."""

        def gradients_of(
            part: Part, x: jax.Array, choices: Choices, *by_output: Any
        ) -> tuple[Tree, jax.Array]:
            def apply_again(layer: Tree, x: jax.Array) -> tuple[jax.Array, Any]:
                with routers.taken_over(choices):
                    return self.block(layer, x, use, part.context)

            # In the scan as well: forward and backward of a layer are in one body here.
            recomputed = rematerialize(apply_again, self._remat, in_scan=False)
            _, vjp = jax.vjp(recomputed, layer, x)
            return vjp(by_output)

        return self._parts.total(gradients_of, *offload.to_device(inputs), x_grad, report_grad)
