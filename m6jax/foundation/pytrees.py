"""Trees by path: every leaf has a name such as `layers/attention/query`.

Names join the keys of dictionaries, the fields of structs and the indices of tuples with `/`.

>>> names({"head": 1, "layers": {"norm": {"scale": 2}}})
['head', 'layers/norm/scale']
"""

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
Tree = Any


def name_of(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf from its path as jax gives it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten_named(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[str, Any]]:
    """Returns (name, leaf) of every leaf, in the order of jax.tree.leaves."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(name_of(path), leaf) for path, leaf in pairs]


def names(tree: Tree) -> list[str]:
    """Returns the name of every leaf, in the order of jax.tree.leaves."""
    return [name for name, _ in flatten_named(tree)]


def map_named(
    fn: Callable[..., Any],
    tree: Tree,
    *rest: Tree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Tree:
    """Like jax.tree.map, but `fn` gets the leaf's name first."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(name_of(path), *leaves), tree, *rest, is_leaf=is_leaf
    )


def key_of(name: str, key: jax.Array) -> jax.Array:
    """Returns a leaf's own random key: `key` with the leaf's name folded in."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def first_match(rules: Sequence[tuple[str, T]], name: str, default: T) -> T:
    """Returns the value of the first rule whose pattern is found in `name` (re.search)."""
    for pattern, value in rules:
        if re.search(pattern, name):
            return value
    return default


def differences(left: Tree, right: Tree) -> list[str]:
    """Compares two trees of arrays or ShapeDtypeStructs by name, shape and type.

    Returns:
      One line for each leaf that is missing on one side or differs, in order of names; empty when
      the trees are alike.
    """
    ours, theirs = dict(flatten_named(left)), dict(flatten_named(right))
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            lines.append(f"{name}: {_shape_text(ours[name])} against nothing")
        elif name not in ours:
            lines.append(f"{name}: nothing against {_shape_text(theirs[name])}")
        elif _shape_text(ours[name]) != _shape_text(theirs[name]):
            lines.append(f"{name}: {_shape_text(ours[name])} against {_shape_text(theirs[name])}")
    return lines


def all_finite(*trees: Tree) -> jax.Array:
    """Returns bool[], whether every number of some trees of arrays is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(trees)]).all()


def size(tree: Tree) -> int:
    """Returns the number of elements of all leaves together."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _shape_text(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
