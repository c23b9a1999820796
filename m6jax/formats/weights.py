"""The leaves of a model by name, each made when it is needed.

Layers are delinked: of U distinct layers every use has a leaf of its own. With L = 4 and U = 2

    layers/moe/up [2, E, M, H]   ->   layers.0.moe.up, ..., layers.3.moe.up   [E, M, H]

Axis letters: L layers, U distinct layers, E experts, M width (embed), H FFN width (mlp).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Form, Layout, LeafName, join_stack
from m6jax.modeling.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor that is made when it is written.

    Attributes:
      shape: of the tensor.
      dtype: of its elements.
      make: returns it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def map(self, fn: Callable[[Any], Any]) -> "Weight":
        """Returns what a function of arrays makes of the tensor."""
        changed = jax.eval_shape(fn, jax.ShapeDtypeStruct(self.shape, self.dtype))
        return Weight(changed.shape, np.dtype(changed.dtype), lambda: np.asarray(fn(self.make())))

    def astype(self, dtype: str) -> "Weight":
        """Returns the tensor in another floating-point type."""
        return Weight(self.shape, np.dtype(dtype), lambda: self.make().astype(dtype))


Weights = dict[str, Weight]


def delinked(params: Tree, config: ModelConfig, layout: Layout) -> Weights:
    """Returns the leaves of a model, those of a layer called `layers.{number}.{name}`.

    Args:
      params: parameters, joined with biases of routers if there are any.
      config: the model.
      layout: how the stack lies.
    """
    weights: Weights = {}
    host = _Host()
    for name, leaf in pytrees.flatten_named(params):
        whole = functools.partial(host.whole, leaf)
        dtype = np.dtype(leaf.dtype)
        held = layout.layers_of(name)
        if not held:
            weights[name.replace("/", ".")] = Weight(leaf.shape, dtype, whole)
            continue
        inside = LeafName.of(name).inside
        for position, first in enumerate(held):
            for block in range(first, layout.depth, layout.unit_of(name)):
                stacked = layout.form is Form.STACKED
                weights[_layer_name(config, block, inside)] = Weight(
                    leaf.shape[1:] if stacked else leaf.shape,
                    dtype,
                    functools.partial(_layer, whole, position) if stacked else whole,
                )
    return weights


def layer_weights(name: str, weights: Weights, config: ModelConfig, layout: Layout) -> list[Weight]:
    """Returns what a leaf of a tree is made of: one for each layer that it holds, or one.

    Args:
      name: of the leaf, as 'layers/0to3/moe/up' or 'embedder/table'.
      weights: of single layers, see `delinked`.
      config: the model.
      layout: of the tree; all its layers are distinct.
    """
    held = layout.layers_of(name)
    if not held:
        return [weights[name.replace("/", ".")]]
    inside = LeafName.of(name).inside
    return [weights[_layer_name(config, block, inside)] for block in held]


def unrolled(weights: Mapping[str, Any], config: ModelConfig) -> Tree:
    """Returns the UNROLLED tree of leaves by name, the inverse of `delinked`.

    Args:
      weights: arrays, or anything else, by name.
      config: the model.
    """
    layout = config.layout(config.num_layers, Form.UNROLLED)
    rest: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = [{} for _ in range(layout.depth)]
    for name, weight in weights.items():
        first, *others = name.split(".")
        node, path = rest, [first, *others]
        if first == "layers":
            block, kind = divmod(int(others[0]), len(config.pattern))
            node, path = blocks[block], others[1:]
            if len(config.pattern) > 1:
                path = [config.layer_name(kind), *path]
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = weight
    return join_stack(rest, blocks, layout)


def _layer_name(config: ModelConfig, block: int, inside: str) -> str:
    """Returns `layers.{number}.{name}` of a leaf of a round of the pattern."""
    kind = 0
    if len(config.pattern) > 1:
        first, inside = inside.split("/", 1)
        kind = [config.layer_name(i) for i in range(len(config.pattern))].index(first)
    return f"layers.{block * len(config.pattern) + kind}.{inside.replace('/', '.')}"


def _layer(whole: Callable[[], np.ndarray], position: int) -> np.ndarray:
    return whole()[position]


class _Host:
    """Copies of leaves in host memory; only the newest is kept, for the layers that it holds."""

    def __init__(self) -> None:
        self._newest: tuple[Any, np.ndarray] | None = None

    def whole(self, leaf: Any) -> np.ndarray:
        if self._newest is None or self._newest[0] is not leaf:
            self._newest = leaf, np.asarray(jax.device_get(leaf))
        return self._newest[1]


def floating(dtype: np.dtype) -> bool:
    """Whether a type is of floating-point numbers, bfloat16 included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))
