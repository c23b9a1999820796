"""Changes of layout: pure functions on trees of arrays or of descriptions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m6jax.foundation.pytrees import Tree, differences, flatten_named, map_named
from m6jax.layouts.layout import Form, Layout, LayoutError
from m6jax.layouts.leaf_name import STACK, LeafName, layer_names


def expand(tree: Tree, old: Layout, new: Layout) -> Tree:
    """Delinks: of U distinct layers become more, layer i a copy of layer i mod U.

    Args:
      tree: STACKED tree in the layout `old`.
      old: units before.
      new: units after; no part's is smaller, at least one is larger.

    Raises:
      LayoutError: the tree has not the layout, or a new unit is not a multiple of the old one.
    """
    grown = [
        _factor(name, old.unit_of(name), new.unit_of(name), "expand", "larger multiple")
        for name in _stack_names(tree)
    ]
    if grown and max(grown) == 1:
        raise LayoutError(
            f"a unit of {old.unit} layers cannot expand to {new.unit}: not a larger multiple"
        )

    def copy(name: str, leaf: Any) -> Any:
        return _tile(leaf, new.unit_of(name) // old.unit_of(name))

    return _map_stack(tree, old, copy, f"expand {old.unit} to {new.unit}")


def link(tree: Tree, old: Layout, new: Layout, average: bool = False) -> Tree:
    """The inverse of `expand`: layers i, i + U, ... become one.

    Args:
      tree: STACKED tree in the layout `old`.
      old: units before.
      new: units after; no part's is larger, at least one is smaller.
      average: take the mean of layers that differ instead of refusing them.

    Raises:
      LayoutError: layers differ and `average` is not set, or the units do not fit.
    """
    shrunk = [
        _factor(name, new.unit_of(name), old.unit_of(name), "link", "smaller divisor")
        for name in _stack_names(tree)
    ]
    if shrunk and max(shrunk) == 1:
        raise LayoutError(
            f"a unit of {old.unit} layers cannot link to {new.unit}: not a smaller divisor"
        )

    def merge(name: str, leaf: Any) -> Any:
        unit = new.unit_of(name)
        if not average:
            _refuse_different_copies(name, leaf, unit)
        return _merge(leaf, unit)

    return _map_stack(tree, old, merge, f"link {old.unit} to {new.unit}")


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
        depth = sum(map(_is_layer, node))
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


def cut(tree: Tree, layout: Layout) -> Tree:
    """Cuts a whole stack in the runs of a layout: leaf [L, ...] becomes [n, ...] for each of them.

    Raises:
      LayoutError: the tree has no stack of L distinct layers.
    """

    def divide(node: dict[str, Any]) -> dict[str, Any]:
        _check_axes(node[STACK], layout.whole, "cut")
        runs = {
            run.key: jax.tree.map(lambda leaf, run=run: _slice(leaf, run.layers), node[STACK])
            for run in layout.runs
        }
        return node | {STACK: runs}

    return _map_dicts(tree, lambda node: STACK in node, divide, f"no `{STACK}` to cut")


def mend(tree: Tree, layout: Layout) -> Tree:
    """The inverse of `cut`.

    Raises:
      LayoutError: the stack is not cut in the runs of the layout.
    """
    keys = [run.key for run in layout.runs]

    def unite(node: dict[str, Any]) -> dict[str, Any]:
        if sorted(node[STACK]) != sorted(keys):
            raise LayoutError(
                f"`{STACK}` has {', '.join(node[STACK])} where the runs {', '.join(keys)} are"
                " expected"
            )
        runs = [node[STACK][key] for key in keys]
        return node | {STACK: jax.tree.map(lambda *leaves: _concatenate(leaves), *runs)}

    return _map_dicts(tree, lambda node: STACK in node, unite, f"no `{STACK}` to mend")


def convert(tree: Tree, old: Layout, new: Layout) -> Tree:
    """Takes a tree from one layout to another of equal or more distinct layers.

    Raises:
      LayoutError: depths differ, or the new layout has fewer distinct layers.
    """
    if old.depth != new.depth:
        raise LayoutError(f"a stack of depth {old.depth} cannot become one of depth {new.depth}")
    if old.borders and old.borders != new.borders:
        tree, old = mend(tree, old), old.whole
    if old.form is Form.UNROLLED and new.form is Form.STACKED:
        tree = stack(tree)
    names = _stack_names(tree)
    grows = any(old.unit_of(name) != new.unit_of(name) for name in names)
    if grows or (not names and old.unit != new.unit):  # `expand` says what is wrong with no names
        tree = expand(tree, old, new)
    if new.form is Form.UNROLLED and old.form is Form.STACKED:
        tree = unstack(tree)
    return cut(tree, new) if new.borders and old.borders != new.borders else tree


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


def _is_layer(key: Any) -> bool:
    """Whether a key is of one layer of the UNROLLED form."""
    return isinstance(key, str) and LeafName.of(key).number is not None


def _map_stack(tree: Tree, layout: Layout, fn: Callable[[str, Any], Any], task: str) -> Tree:
    """Applies `fn` to every stacked leaf (name inside of the layer, leaf), its axis checked."""

    def apply(node: dict[str, Any]) -> dict[str, Any]:
        _check_axes(node[STACK], layout, task)
        return node | {STACK: map_named(fn, {STACK: node[STACK]})[STACK]}

    unrolled = any(LeafName.of(name).number is not None for name, _ in flatten_named(tree))
    hint = " (it is unrolled: each layer already has its own parameters)" if unrolled else ""
    return _map_dicts(tree, lambda node: STACK in node, apply, f"no `{STACK}` to {task}{hint}")


def _check_axes(layers: Tree, layout: Layout, task: str) -> None:
    for name, leaf in flatten_named(layers):
        unit = layout.unit_of(f"{STACK}/{name}")
        if leaf.ndim < 1 or leaf.shape[0] != unit:
            raise LayoutError(
                f"{STACK}/{name} has shape {leaf.shape}: cannot {task}, a leading axis of {unit} is"
                " wanted"
            )


def _stack_names(tree: Tree) -> list[str]:
    return [name for name, _ in flatten_named(tree) if LeafName.of(name).stacked]


def _factor(name: str, small: int, large: int, task: str, wanted: str) -> int:
    """Returns how many layers one becomes, or how many become one."""
    if large < small or large % small:
        pair = (small, large) if task == "expand" else (large, small)
        raise LayoutError(
            f"{name}: a unit of {pair[0]} layers cannot {task} to {pair[1]}: not a {wanted}"
        )
    return large // small


def _common_unit(layers: Tree) -> int:
    sizes = {leaf.shape[:1]: name for name, leaf in flatten_named(layers)}
    if len(sizes) != 1 or () in sizes:
        raise LayoutError(f"leading axes of `{STACK}` differ: {sizes}")
    return next(iter(sizes))[0]


def _refuse_different_copies(name: str, leaf: Any, new_unit: int) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return
    if isinstance(leaf, jax.core.Tracer):
        raise LayoutError(
            f"{name}: whether layers differ cannot be seen while tracing (link outside of jit, or"
            " with average=True)"
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


def _slice(leaf: Any, layers: slice) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        length = layers.stop - layers.start
        return _struct(leaf, (length, *leaf.shape[1:]), lambda spec: spec)
    return leaf[layers]


def _concatenate(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        length = sum(leaf.shape[0] for leaf in leaves)
        return _struct(leaves[0], (length, *leaves[0].shape[1:]), lambda spec: spec)
    return jnp.concatenate(leaves)


def _stack(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        shape = (len(leaves), *leaves[0].shape)
        return _struct(leaves[0], shape, lambda spec: (None, *spec))
    return jnp.stack(leaves)
