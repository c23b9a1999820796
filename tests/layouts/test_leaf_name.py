"""Every fact that a leaf's name says of the stack, for every way in which it may lie."""

import pytest

from m6jax.layouts import LeafName, Run, has_layers

STACKED = LeafName("opt_state/mu/", "layers", None, None, "moe/up")
CUT = LeafName("opt_state/mu/", "layers", None, Run(1, 2), "moe/up")
UNROLLED = LeafName("params/", "layers_12", 12, None, "moe/up")
OUTSIDE = LeafName("", None, None, None, "params/embedder/table")


@pytest.mark.parametrize(
    ("path", "leaf"),
    [
        ("opt_state/mu/layers/moe/up", STACKED),
        ("opt_state/mu/layers/1to2/moe/up", CUT),
        ("params/layers_12/moe/up", UNROLLED),
        ("params/embedder/table", OUTSIDE),
        ("layers", LeafName("", "layers", None, None, "")),
        ("layers_1/2to3/up", LeafName("", "layers_1", 1, None, "2to3/up")),
        ("layers/2to/up", LeafName("", "layers", None, None, "2to/up")),
        ("my_layers/w", LeafName("", None, None, None, "my_layers/w")),
        ("layers_x/w", LeafName("", None, None, None, "layers_x/w")),
    ],
)
def test_parts_of_a_path(path, leaf):
    assert LeafName.of(path) == leaf


@pytest.mark.parametrize(
    ("leaf", "in_stack", "stacked", "first", "layers"),
    [
        (STACKED, True, True, 0, range(4)),
        (CUT, True, True, 1, range(1, 5)),
        (UNROLLED, True, False, 12, range(12, 13)),
        (OUTSIDE, False, False, 0, range(0)),
    ],
)
def test_layers_of_a_leaf(leaf, in_stack, stacked, first, layers):
    assert (leaf.in_stack, leaf.stacked, leaf.first) == (in_stack, stacked, first)
    assert leaf.layers((4, 16)) == layers


@pytest.mark.parametrize(
    ("leaf", "whole", "of_any_layer", "in_layer", "layer_key"),
    [
        (STACKED, "opt_state/mu/layers/moe/up", None, "opt_state/mu/layers_3/moe/up", "layers"),
        (CUT, "opt_state/mu/layers/moe/up", None, "opt_state/mu/layers_3/moe/up", "layers/1to2"),
        (
            UNROLLED,
            "params/layers_12/moe/up",
            "params/layers_*/moe/up",
            "params/layers_3/moe/up",
            "layers_12",
        ),
        (OUTSIDE, "params/embedder/table", None, "params/embedder/table", None),
    ],
)
def test_other_paths(leaf, whole, of_any_layer, in_layer, layer_key):
    assert (leaf.whole, leaf.layer_key) == (whole, layer_key)
    assert leaf.of_any_layer == (of_any_layer or whole)
    assert leaf.in_layer(3) == in_layer


def test_a_path_that_ends_with_the_key_stays_as_it_is():
    assert LeafName.of("params/layers").whole == "params/layers"


@pytest.mark.parametrize(
    ("node", "has"),
    [({"layers": 1}, True), ({"head": 1, "layers_0": 2}, True), ({"head": 1}, False), (3, False)],
)
def test_dictionaries_with_layers(node, has):
    assert has_layers(node) is has
