import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from m6jax.foundation import pytrees


@struct.dataclass
class State:
    step: int
    moments: tuple


TREE = {"layers": {"norm": {"scale": 2}, "moe": {"up": 1}}, "head": 3}


def test_names_join_keys_fields_and_indices():
    state = State(step=0, moments=({"w": 1}, [2, 3]))
    assert pytrees.names(state) == ["step", "moments/0/w", "moments/1/0", "moments/1/1"]


def test_names_follow_the_order_of_leaves():
    assert pytrees.flatten_named(TREE) == [
        ("head", 3),
        ("layers/moe/up", 1),
        ("layers/norm/scale", 2),
    ]
    assert [leaf for _, leaf in pytrees.flatten_named(TREE)] == jax.tree.leaves(TREE)


def test_flatten_named_stops_at_leaves_of_ones_own():
    pairs = pytrees.flatten_named({"a": (1, 2)}, is_leaf=lambda node: isinstance(node, tuple))
    assert pairs == [("a", (1, 2))]


def test_map_named_gives_name_and_leaves_of_all_trees():
    result = pytrees.map_named(
        lambda name, x, y: f"{name}:{x + y}", {"a": {"b": 1}}, {"a": {"b": 2}}
    )
    assert result == {"a": {"b": "a/b:3"}}


def test_map_named_stops_at_leaves_of_ones_own():
    result = pytrees.map_named(
        lambda name, axes: (name, len(axes)),
        {"w": ("embed", "mlp")},
        is_leaf=lambda node: isinstance(node, tuple),
    )
    assert result == {"w": ("w", 2)}


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers/moe/up", "experts"), ("layers/attention/query", "stack"), ("head/kernel", "none")],
)
def test_the_first_rule_that_matches_wins(name, value):
    rules = [("moe/(up|down)$", "experts"), ("^layers/", "stack"), ("moe", "never")]
    assert pytrees.first_match(rules, name, "none") == value


def test_no_differences_between_arrays_and_their_description():
    tree = {"w": jnp.ones((2, 3)), "n": np.zeros(4, np.int32)}
    assert pytrees.differences(tree, jax.eval_shape(lambda: tree)) == []


def test_differences_name_leaf_and_both_sides():
    left = {"a": jnp.ones(2), "b": jnp.ones((2, 3)), "d": jnp.ones(1)}
    right = {
        "a": jnp.ones(2),
        "b": jnp.ones((3, 2)),
        "c": jnp.int32(0),
        "d": jnp.ones(1, jnp.bfloat16),
    }
    assert pytrees.differences(left, right) == [
        "b: float32[2,3] against float32[3,2]",
        "c: nothing against int32[]",
        "d: float32[1] against bfloat16[1]",
    ]
    assert pytrees.differences(right, left)[1] == "c: int32[] against nothing"


def test_size_counts_all_elements():
    assert pytrees.size({"a": jnp.ones((2, 3)), "b": jax.ShapeDtypeStruct((4,), jnp.int32)}) == 10
    assert pytrees.size({}) == 0
