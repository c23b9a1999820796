"""What leaves are made of, by hand."""

import jax
import models
import numpy as np
import pytest
import source_runs
from source_runs import experiment, layout

from m6jax.converting.recipes import Direction, Origin, Recipe, recipes
from m6jax.converting.source_checkpoint import expected_state
from m6jax.converting.values import make
from m6jax.layouts import Form, LayoutError, Part
from m6jax.pseudo_to_real.delinking import Policy

QUERY = "layers/attention/query"
UNROLLED = layout(4, Form.UNROLLED)


def made(old, new, policy=Policy.COPY, direction=Direction.MORE):
    run = experiment("/nowhere")
    return recipes(expected_state(run, old), old, expected_state(run, new), new, policy, direction)


def test_delinking_two_layers_into_four():
    """Layers 0 1 0 1."""
    found = made(layout(2), layout(4), Policy.RESCALE)
    query = found[f"params/{QUERY}"]
    origins = tuple(Origin(f"params/{QUERY}", i) for i in (0, 1, 0, 1))
    assert (query.shape, query.stacked, query.copies) == ((4, 16, 8, 2), True, (origins,))
    assert query.factor == 1
    assert found[f"opt_state/mu/{QUERY}"].factor == 0.5
    assert found[f"opt_state/nu/{QUERY}"].factor == 0.25
    assert found["opt_state/nu/final_norm/scale"].factor == 1
    assert found["step"].copies == ((Origin("step", None),),)


def test_delinking_to_layers_of_their_own():
    found = made(layout(2), UNROLLED, Policy.RESET)
    name = "params/layers_3/attention/query"
    assert found[name].copies == ((Origin(f"params/{QUERY}", 1),),)
    assert not found[name].stacked
    assert found[name].sources() == [f"params/{QUERY}"]
    assert found["opt_state/mu/layers_3/attention/query"].factor == 0
    assert found["opt_state/count/layers_3/attention/query"].factor == 0


def test_linking_reads_delinking_backwards():
    """Of layers 0 to 3 the first and third become one, the second and fourth the other."""
    found = made(UNROLLED, layout(2), Policy.RESCALE, Direction.FEWER)
    own = [Origin(f"params/layers_{i}/attention/query", None) for i in range(4)]
    assert found[f"params/{QUERY}"].copies == ((own[0], own[1]), (own[2], own[3]))
    assert found[f"opt_state/nu/{QUERY}"].factor == 4


def test_parts_that_are_not_delinked_keep_their_moments():
    parts = (Part(pattern="attention"),)
    old, new = layout(1, parts=parts), layout(4)
    found = made(old, new, Policy.RESET)
    assert found[f"opt_state/mu/{QUERY}"].factor == 1
    assert found["opt_state/mu/layers/moe/up"].factor == 0


def test_more_than_nine_layers_are_linked_in_their_order():
    """Names sort 0, 1, 10, 11, 2, ...; layers do not."""
    run = experiment("/nowhere", model=models.tiny(num_layers=12))
    old = source_runs.Layout(depth=12, unit=12, form=Form.UNROLLED)
    new = source_runs.Layout(depth=12, unit=1)
    states = expected_state(run, old), expected_state(run, new)
    found = recipes(states[0], old, states[1], new, Policy.COPY, Direction.FEWER)
    names = [copy[0].name.split("/")[1] for copy in found[f"params/{QUERY}"].copies]
    assert names == [f"layers_{i}" for i in range(12)]


def test_states_that_are_not_of_one_model():
    run, other = (
        experiment("/nowhere"),
        experiment("/nowhere", model=models.tiny(num_layers=4, mlp_dim=32)),
    )
    states = expected_state(run, layout(1)), expected_state(other, layout(4))
    with pytest.raises(LayoutError, match=r"does not lead there; .*moe/down: float32\[4,8,16,16\]"):
        recipes(states[0], layout(1), states[1], layout(4), Policy.COPY)


class Reader:
    """Leaves in memory."""

    def __init__(self, **leaves):
        self.leaves = leaves

    def read(self, name, index):
        return self.leaves[name][index]


def stacked(name, copies, dtype, factor=1.0, shape=(2, 3)):
    origins = tuple(tuple(Origin(name, i) for i in layers) for layers in copies)
    return Recipe(name, shape, np.dtype(dtype), True, origins, factor)


def test_values_by_hand():
    w = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 9], [7, 5, 6]], np.float32)
    reader = Reader(w=w, n=np.array([3, 4, 5, 6], np.int32))
    index = (slice(0, 2), slice(1, 3))

    mean = make(stacked("w", [(0, 1), (2, 3)], np.float32, np.float32(2)), reader, index, True)
    np.testing.assert_array_equal(mean, [[4, 12], [10, 12]])
    count = make(stacked("n", [(0, 1), (2, 3)], np.int32, 1, (2,)), reader, index[:1], True)
    np.testing.assert_array_equal(count, [3, 4])
    cycle = make(stacked("w", [(3, 0)], jax.numpy.bfloat16), reader, index)
    np.testing.assert_array_equal(cycle, np.asarray([[5, 6], [2, 3]], jax.numpy.bfloat16))
    zeros = make(stacked("w", [(0, 1)], np.float32, 0), reader, index)
    np.testing.assert_array_equal(zeros, np.zeros((2, 2)))
    with pytest.raises(LayoutError, match="w: the layers to be linked differ"):
        make(stacked("w", [(0, 1), (2, 3)], np.float32), reader, index)
