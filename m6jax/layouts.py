"""How the layers of a stack lie in the parameter tree, and how to go from one layout to another.

A stack of depth L holds U distinct layers (the *unit*), applied in a cycle R = L / U times. With
L = 6, U = 2 the layers are 0 1 0 1 0 1. The tree has one of two forms:

* STACKED: the key `layers`, each leaf with a leading axis of size U;
* UNROLLED: the keys `layers_0` ... `layers_{L-1}` (U = L), each layer with leaves of its own.

`expand` is *delinking*: the Pseudo Giant (U = 1) becomes the Real Giant (U = L) by copying.

>>> pseudo = {"head": h, "layers": {"w": w}}                   # w: [1, M, H]
>>> real = expand(pseudo, unit=1, new_unit=3)                  # layers/w: [3, M, H]
>>> sorted(unstack(real))
['head', 'layers_0', 'layers_1', 'layers_2']

The functions work on any tree that has such dictionaries somewhere inside: parameters, the state of
any optimizer that keeps parameter-shaped trees, a whole train state. They are pure, total and alike
on arrays and on ShapeDtypeStructs with shardings. This is the only file that knows layer names.
"""

import enum
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m6jax.pytrees import Tree, differences, flatten_named
from m6jax.validated import ConfigError, validated

STACK = "layers"
_LAYER = re.compile(rf"{STACK}_(\d+)")


class Form(enum.Enum):
    """Whether layers share one stacked leaf or have leaves of their own."""

    STACKED = "stacked"
    UNROLLED = "unrolled"


class LayoutError(ValueError):
    """A tree that does not have the layout it was said to have."""


@validated
class Layout:
    """Depth, unit and form of a stack.

    Attributes:
      depth: L, the number of layers that a token passes.
      unit: U, the number of distinct layers; divides depth.
      form: STACKED for every unit, UNROLLED for U = L alone.
    """

    depth: int
    unit: int
    form: Form = Form.STACKED

    def check(self) -> None:
        """Raises ConfigError for a unit or form that cannot be."""
        if self.depth < 1:
            raise ConfigError(f"Layout.depth: {self.depth} layers; at least 1 is needed")
        if self.unit < 1 or self.depth % self.unit:
            divisors = [u for u in range(1, self.depth + 1) if self.depth % u == 0]
            raise ConfigError(
                f"Layout.unit: {self.unit} does not divide the depth of {self.depth} layers"
                f" (choices: {', '.join(map(str, divisors))})"
            )
        if self.form is Form.UNROLLED and self.unit != self.depth:
            raise ConfigError(
                f"Layout.form: UNROLLED needs a unit of all {self.depth} layers, not {self.unit}"
                " (use STACKED, or unit = depth)"
            )

    @property
    def repeats(self) -> int:
        """R, how often the unit is applied."""
        return self.depth // self.unit


def stack_key(name: str) -> str | None:
    """Returns the part of a leaf's name that says it is in the stack, or None for other leaves."""
    for part in name.split("/"):
        if part == STACK or _LAYER.fullmatch(part):
            return part
    return None


def layer_names(depth: int) -> list[str]:
    """Returns the keys of the UNROLLED form in order."""
    return [f"{STACK}_{i}" for i in range(depth)]


def expand(tree: Tree, unit: int, new_unit: int) -> Tree:
    """Delinks: `unit` distinct layers become `new_unit`, layer i a copy of layer i mod unit.

    Args:
      tree: STACKED tree whose leaves under `layers` have a leading axis of `unit`.
      unit: U before.
      new_unit: U after, a multiple of `unit`.

    Raises:
      LayoutError: the tree has no stack of `unit` layers, or `new_unit` is not a larger multiple.
    """
    if new_unit <= unit or new_unit % unit:
        raise LayoutError(
            f"a unit of {unit} layers cannot expand to {new_unit}: not a larger multiple"
        )
    copies = new_unit // unit
    return _map_stack(tree, unit, lambda leaf: _tile(leaf, copies), f"expand {unit} to {new_unit}")


def link(tree: Tree, unit: int, new_unit: int, average: bool = False) -> Tree:
    """The inverse of `expand`: layers i, i + new_unit, ... become one.

    Args:
      tree: STACKED tree whose leaves under `layers` have a leading axis of `unit`.
      unit: U before.
      new_unit: U after, a divisor of `unit`.
      average: take the mean of layers that differ instead of refusing them.

    Raises:
      LayoutError: layers differ and `average` is not set, or the units do not fit.
    """
    if new_unit >= unit or unit % new_unit:
        raise LayoutError(
            f"a unit of {unit} layers cannot link to {new_unit}: not a smaller divisor"
        )
    if not average:
        _refuse_different_copies(tree, new_unit)
    return _map_stack(tree, unit, lambda leaf: _merge(leaf, new_unit), f"link {unit} to {new_unit}")


def unstack(tree: Tree) -> Tree:
    """STACKED with U = L to UNROLLED: leaf [L, ...] of `layers` becomes L leaves [...]."""

    def split(node: dict[str, Any]) -> dict[str, Any]:
        depth = _common_unit(node[STACK])
        layers = {
            name: jax.tree.map(lambda x, i=i: _take(x, i), node[STACK])
            for i, name in enumerate(layer_names(depth))
        }
        return {key: value for key, value in node.items() if key != STACK} | layers

    return _map_dicts(tree, lambda node: STACK in node, split, f"no `{STACK}` to unstack")


def stack(tree: Tree) -> Tree:
    """UNROLLED to STACKED, the inverse of `unstack`.

    Raises:
      LayoutError: no `layers_i`, a number missing, or layers of different structure or shapes.
    """

    def join(node: dict[str, Any]) -> dict[str, Any]:
        depth = sum(_is_layer(key) for key in node)
        missing = [name for name in layer_names(depth) if name not in node]
        if missing:
            raise LayoutError(f"{missing[0]} is missing among {depth} unrolled layers")
        layers = [node[name] for name in layer_names(depth)]
        for i, layer in enumerate(layers):
            odd = differences(layers[0], layer)
            if odd:
                raise LayoutError(f"{STACK}_0 and {STACK}_{i} differ: {odd[0]}")
        rest = {key: value for key, value in node.items() if not _is_layer(key)}
        return rest | {STACK: jax.tree.map(lambda *xs: _stack(xs), *layers)}

    return _map_dicts(
        tree, lambda node: any(map(_is_layer, node)), join, f"no `{STACK}_i` to stack"
    )


def convert(tree: Tree, old: Layout, new: Layout) -> Tree:
    """Takes a tree from one layout to another of equal or more distinct layers.

    Raises:
      LayoutError: depths differ, or the new layout has fewer distinct layers.
    """
    if old.depth != new.depth:
        raise LayoutError(f"a stack of depth {old.depth} cannot become one of depth {new.depth}")
    if old.form is Form.UNROLLED and new.form is Form.STACKED:
        tree = stack(tree)
    if old.unit != new.unit:
        tree = expand(tree, old.unit, new.unit)
    if new.form is Form.UNROLLED and old.form is Form.STACKED:
        tree = unstack(tree)
    return tree


def add_layer_axis(tree: Tree, unit: int) -> Tree:
    """Returns the ShapeDtypeStructs of `unit` layers from those of one."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((unit, *x.shape), x.dtype), tree)


def assemble(rest: dict[str, Any], layers: list[Any], layout: Layout) -> dict[str, Any]:
    """Puts per-layer trees into the tree: the unrolled keys, or one stack by jnp.stack."""
    unrolled = rest | dict(zip(layer_names(len(layers)), layers, strict=True))
    return unrolled if layout.form is Form.UNROLLED else stack(unrolled)


def split_stack(params: dict[str, Any], layout: Layout) -> tuple[dict[str, Any], Any]:
    """Separates the stack from the other parameters.

    Returns:
      The other top-level entries, and the stack: for STACKED the tree with leading axes U, for
      UNROLLED the list of L per-layer trees.
    """
    rest = {key: value for key, value in params.items() if stack_key(key) is None}
    if layout.form is Form.STACKED:
        return rest, params[STACK]
    return rest, [params[name] for name in layer_names(layout.depth)]


def join_stack(rest: dict[str, Any], stacked: Any, layout: Layout) -> dict[str, Any]:
    """The inverse of `split_stack`."""
    if layout.form is Form.STACKED:
        return rest | {STACK: stacked}
    return rest | dict(zip(layer_names(layout.depth), stacked, strict=True))


def _is_layer(key: Any) -> bool:
    return isinstance(key, str) and _LAYER.fullmatch(key) is not None


def _map_dicts(
    tree: Tree,
    wanted: Callable[[dict[str, Any]], bool],
    fn: Callable[[dict[str, Any]], dict[str, Any]],
    complaint: str,
) -> Tree:
    """Applies `fn` to every dictionary that is `wanted`, wherever it sits in `tree`."""
    found = []

    def is_leaf(node: Any) -> bool:
        return isinstance(node, dict) and wanted(node)

    def apply(node: Any) -> Any:
        if not is_leaf(node):
            return node
        found.append(node)
        return fn(node)

    result = jax.tree.map(apply, tree, is_leaf=is_leaf)
    if not found:
        raise LayoutError(complaint)
    return result


def _map_stack(tree: Tree, unit: int, fn: Callable[[Any], Any], task: str) -> Tree:
    """Applies `fn` to every stacked leaf after checking its leading axis."""

    def apply(node: dict[str, Any]) -> dict[str, Any]:
        for name, leaf in flatten_named(node[STACK]):
            if leaf.ndim < 1 or leaf.shape[0] != unit:
                raise LayoutError(
                    f"{STACK}/{name} has shape {leaf.shape}: cannot {task}, a leading axis of"
                    f" {unit} is wanted"
                )
        return node | {STACK: jax.tree.map(fn, node[STACK])}

    unrolled = any(stack_key(name) not in (None, STACK) for name, _ in flatten_named(tree))
    hint = " (it is unrolled: each layer already has its own parameters)" if unrolled else ""
    return _map_dicts(tree, lambda node: STACK in node, apply, f"no `{STACK}` to {task}{hint}")


def _common_unit(layers: Tree) -> int:
    sizes = {leaf.shape[:1]: name for name, leaf in flatten_named(layers)}
    if len(sizes) != 1 or () in sizes:
        raise LayoutError(f"leading axes of `{STACK}` differ: {sizes}")
    return next(iter(sizes))[0]


def _refuse_different_copies(tree: Tree, new_unit: int) -> None:
    for name, leaf in flatten_named(tree):
        if stack_key(name) == STACK and not isinstance(leaf, jax.ShapeDtypeStruct):
            if isinstance(leaf, jax.core.Tracer):
                raise LayoutError(
                    f"{name}: whether layers differ cannot be seen while tracing (link outside of"
                    " jit, or with average=True)"
                )
            copies = np.asarray(leaf).reshape(-1, new_unit, *leaf.shape[1:])
            if (copies != copies[:1]).any():
                raise LayoutError(
                    f"{name}: the layers to be linked differ (average them to link all the same)"
                )


def _struct(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...], spec: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*spec(tuple(sharding.spec))))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _tile(leaf: Any, copies: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _struct(leaf, (leaf.shape[0] * copies, *leaf.shape[1:]), lambda spec: spec)
    return jnp.tile(leaf, (copies,) + (1,) * (leaf.ndim - 1))


def _merge(leaf: Any, new_unit: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _struct(leaf, (new_unit, *leaf.shape[1:]), lambda spec: spec)
    copies = leaf.reshape(-1, new_unit, *leaf.shape[1:])  # [copies, new_unit, ...]
    # Equal copies come back bit for bit; integers (step counts) have no mean.
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return copies[0]
    return jnp.where((copies == copies[:1]).all(0), copies[0], copies.mean(0).astype(leaf.dtype))


def _take(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _struct(leaf, leaf.shape[1:], lambda spec: spec[1:])
    return leaf[i]


def _stack(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        shape = (len(leaves), *leaves[0].shape)
        return _struct(leaves[0], shape, lambda spec: (None, *spec))
    return jnp.stack(leaves)
