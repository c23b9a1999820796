"""Every change of layout on arrays, on descriptions with shardings, on whole states."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numbered import tree, units

from m6jax import layouts
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import differences
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, LayoutError
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.training import train_state

SHARED = Layout(depth=4, unit=1)
PAIRS = Layout(depth=4, unit=2)
SCANNED = Layout(depth=4, unit=4)
UNROLLED = Layout(depth=4, unit=4, form=Form.UNROLLED)
GROWING = [
    (SHARED, PAIRS),
    (SHARED, SCANNED),
    (SHARED, UNROLLED),
    (PAIRS, SCANNED),
    (PAIRS, UNROLLED),
    (SCANNED, UNROLLED),
    (UNROLLED, SCANNED),
    (PAIRS, PAIRS),
    (UNROLLED, UNROLLED),
]


def mesh():
    return Partitioning(expert=2, model=2).make_mesh()


def specs(tree):
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


@functools.cache
def describe_state(layout, optimizer):
    model = Transformer(models.tiny(num_layers=4))
    partitioning = Partitioning(expert=2, model=2, fully_sharded=True)
    return train_state.abstract_state(model, layout, optimizer, partitioning, mesh(), averaged=True)


class TestLayout:
    def test_repeats_is_how_often_the_unit_is_applied(self):
        assert [layout.repeats for layout in (SHARED, PAIRS, SCANNED, UNROLLED)] == [4, 2, 1, 1]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"depth": 0, "unit": 1}, "Layout.depth: 0 layers; at least 1"),
            (
                {"depth": 6, "unit": 4},
                r"unit: 4 does not divide the depth of 6 .*choices: 1, 2, 3, 6",
            ),
            ({"depth": 6, "unit": 0}, "Layout.unit: 0 does not divide"),
            ({"depth": 6, "unit": 12}, "Layout.unit: 12 does not divide"),
            (
                {"depth": 6, "unit": 3, "form": "UNROLLED"},
                "UNROLLED needs a unit of all 6 layers, not 3",
            ),
        ],
    )
    def test_refuses_what_cannot_be(self, settings, message):
        """B9 (vii): a unit that does not divide the depth."""
        with pytest.raises(ConfigError, match=message):
            Layout(**settings)


class TestExpand:
    def test_layer_i_is_a_copy_of_layer_i_mod_unit(self):
        """B15: equal copies after delinking; 0 1 becomes 0 1 0 1."""
        real = layouts.expand(tree(2), units(2), units(4))
        np.testing.assert_array_equal(real["layers"]["w"][:, 0, 0], [0, 1, 0, 1])
        np.testing.assert_array_equal(real["layers"]["norm"]["scale"][:, 1], [10, 11, 10, 11])
        np.testing.assert_array_equal(real["layers"]["count"], [0, 1, 0, 1])
        assert real["layers"]["count"].dtype == tree()["layers"]["count"].dtype
        np.testing.assert_array_equal(real["head"], tree(2)["head"])

    def test_in_steps_is_in_one_go(self):
        steps = layouts.expand(layouts.expand(tree(1), units(1), units(2)), units(2), units(4))
        models.assert_equal(steps, layouts.expand(tree(1), units(1), units(4)))

    def test_does_not_change_its_argument(self):
        before = tree(2)
        layouts.expand(before, units(2), units(4))
        models.assert_equal(before, tree(2))

    @pytest.mark.parametrize(("unit", "new_unit"), [(2, 3), (2, 2), (4, 2)])
    def test_refuses_units_that_are_no_larger_multiple(self, unit, new_unit):
        """B15: a unit that does not divide."""
        with pytest.raises(LayoutError, match=f"{unit} layers cannot expand to {new_unit}"):
            layouts.expand(tree(unit), units(unit), units(new_unit))

    def test_refuses_a_tree_that_is_already_delinked(self):
        """B15: delinking twice."""
        real = layouts.expand(tree(1), units(1), units(4))
        with pytest.raises(LayoutError, match=r"layers/count has shape \(4,\).* 1 to 4.* of 1 is"):
            layouts.expand(real, units(1), units(4))

    def test_refuses_an_unrolled_tree(self):
        """B15: a tree that is already delinked."""
        with pytest.raises(LayoutError, match=r"no `layers` to expand 1 to 4 \(it is unrolled"):
            layouts.expand(layouts.unstack(tree(4)), units(1), units(4))

    def test_refuses_a_tree_without_layers(self):
        with pytest.raises(LayoutError, match=r"no `layers` to expand 1 to 2$"):
            layouts.expand({"head": jnp.ones(3)}, units(1), units(2))

    def test_refuses_a_leaf_without_leading_axis(self):
        with pytest.raises(LayoutError, match=r"layers/w has shape \(\)"):
            layouts.expand({"layers": {"w": jnp.float32(1)}}, units(1), units(2))


class TestLink:
    @pytest.mark.parametrize(("unit", "new_unit"), [(1, 2), (1, 4), (2, 4), (2, 6)])
    def test_is_the_inverse_of_expand(self, unit, new_unit):
        real = layouts.expand(tree(unit), units(unit), units(new_unit))
        models.assert_equal(layouts.link(real, units(new_unit), units(unit)), tree(unit))

    def test_refuses_layers_that_differ(self):
        with pytest.raises(LayoutError, match=r"layers/norm/scale: the layers .* differ"):
            layouts.link({"layers": {"norm": {"scale": jnp.arange(4.0)}}}, units(4), units(2))

    def test_averages_if_told_to(self):
        linked = layouts.link(tree(4), units(4), units(2), average=True)  # 0 and 2, 1 and 3
        np.testing.assert_array_equal(linked["layers"]["w"][:, 0, 0], [1, 2])
        np.testing.assert_array_equal(linked["layers"]["norm"]["scale"][:, 0], [11, 12])

    def test_equal_layers_come_back_bit_for_bit(self):
        value = jnp.full((1, 2), 0.1, jnp.float32)  # three times 0.1 divided by 3 is not 0.1
        real = layouts.expand({"layers": {"w": value}}, units(1), units(3))
        models.assert_equal(
            layouts.link(real, units(3), units(1), average=True), {"layers": {"w": value}}
        )

    def test_averages_in_bfloat16_stay_bfloat16(self):
        layers = {"layers": {"w": jnp.array([1.0, 3.0], jnp.bfloat16)}}
        linked = layouts.link(layers, units(2), units(1), average=True)["layers"]["w"]
        assert linked.dtype == jnp.bfloat16
        assert float(linked[0]) == 2.0

    @pytest.mark.parametrize(("unit", "new_unit"), [(4, 3), (2, 2), (2, 4)])
    def test_refuses_units_that_are_no_smaller_divisor(self, unit, new_unit):
        with pytest.raises(LayoutError, match=f"{unit} layers cannot link to {new_unit}"):
            layouts.link(tree(unit), units(unit), units(new_unit))

    def test_refuses_another_unit_than_the_trees(self):
        with pytest.raises(LayoutError, match=r"layers/count has shape \(4,\): cannot link 2 to 1"):
            layouts.link(tree(4), units(2), units(1), average=True)


class TestUnstack:
    def test_gives_each_layer_leaves_of_its_own(self):
        apart = layouts.unstack(tree(3))
        assert sorted(apart) == ["head", "layers_0", "layers_1", "layers_2"]
        np.testing.assert_array_equal(apart["layers_2"]["w"], jnp.full((2, 3), 2.0))
        np.testing.assert_array_equal(apart["layers_1"]["norm"]["scale"], [11, 11])
        assert apart["layers_1"]["count"].shape == ()

    def test_stack_is_its_inverse(self):
        models.assert_equal(layouts.stack(layouts.unstack(tree(3))), tree(3))

    def test_layers_are_in_order_of_numbers_beyond_ten(self):
        models.assert_equal(layouts.stack(layouts.unstack(tree(12))), tree(12))

    def test_refuses_a_tree_without_layers(self):
        with pytest.raises(LayoutError, match="no `layers` to unstack"):
            layouts.unstack(layouts.unstack(tree(2)))

    def test_refuses_leading_axes_that_differ(self):
        with pytest.raises(LayoutError, match="leading axes of `layers` differ"):
            layouts.unstack({"layers": {"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}})


class TestLinkWhileTracing:
    def test_layers_cannot_be_compared_but_averaged(self):
        with pytest.raises(LayoutError, match="cannot be seen while tracing"):
            jax.eval_shape(lambda t: layouts.link(t, units(2), units(1)), tree(2))
        shapes = jax.eval_shape(
            lambda t: layouts.link(t, units(2), units(1), average=True), tree(2)
        )
        assert {leaf.shape[0] for leaf in jax.tree.leaves(shapes["layers"])} == {1}


class TestStack:
    def test_refuses_a_tree_without_layers(self):
        with pytest.raises(LayoutError, match="no `layers_i` to stack"):
            layouts.stack(tree(2))

    def test_refuses_a_missing_number(self):
        apart = layouts.unstack(tree(3))
        del apart["layers_1"]
        with pytest.raises(LayoutError, match="layers_1 is missing among 2 unrolled layers"):
            layouts.stack(apart)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"w": jnp.ones((2, 2))}, r"layers_0 and layers_1 differ: w: .*\[2,3\] .*\[2,2\]"),
            ({"v": jnp.ones((2, 3))}, "layers_0 and layers_1 differ: v: nothing against"),
            (
                {"w": jnp.ones((2, 3)), "z": jnp.ones(1)},
                "layers_0 and layers_1 differ: z: nothing against",
            ),
            ({}, "layers_0 and layers_1 differ: w: .* against nothing"),
            ({"w": jnp.ones((2, 3), jnp.bfloat16)}, "layers_0 and layers_1 differ: .*bfloat16"),
        ],
        ids=["shape", "name", "another leaf", "no leaf", "type"],
    )
    def test_refuses_layers_of_different_structure_shapes_or_types(self, other, message):
        with pytest.raises(LayoutError, match=message):
            layouts.stack({"layers_0": {"w": jnp.ones((2, 3))}, "layers_1": other})


class TestConvert:
    @pytest.mark.parametrize(("old", "new"), GROWING)
    def test_use_i_has_the_parameters_that_it_had(self, old, new):
        before = tree(old.unit)
        before = layouts.unstack(before) if old.form is Form.UNROLLED else before
        after = layouts.convert(before, old, new)
        if new.form is Form.UNROLLED:
            after = layouts.stack(after)
        uses = np.arange(4) % new.unit
        np.testing.assert_array_equal(after["layers"]["w"][uses, 0, 0], np.arange(4) % old.unit)

    def test_refuses_another_depth(self):
        with pytest.raises(LayoutError, match="depth 4 cannot become one of depth 6"):
            layouts.convert(tree(2), PAIRS, Layout(depth=6, unit=2))

    @pytest.mark.parametrize("old", [SCANNED, UNROLLED])
    def test_refuses_fewer_layers(self, old):
        before = layouts.unstack(tree(4)) if old is UNROLLED else tree(4)
        with pytest.raises(LayoutError, match="4 layers cannot expand to 2"):
            layouts.convert(before, old, PAIRS)

    @pytest.mark.parametrize(("old", "new"), GROWING)
    @pytest.mark.parametrize(
        "optimizer",
        [AdamW(), Adafactor(min_dim_size_to_factor=4, b1=0.9)],
        ids=["adamw", "adafactor"],
    )
    def test_of_a_described_state_is_the_description_of_the_new_layout(self, old, new, optimizer):
        """Parameters, moments, counts and averages: shapes, types and shardings."""
        converted = layouts.convert(describe_state(old, optimizer), old, new)
        wanted = describe_state(new, optimizer)
        assert differences(converted, wanted) == []
        for got, expected in zip(jax.tree.leaves(converted), jax.tree.leaves(wanted), strict=True):
            assert got.sharding.is_equivalent_to(expected.sharding, expected.ndim)

    def test_runs_under_jit_with_the_targets_shardings(self):
        target = NamedSharding(mesh(), PartitionSpec(None, "data"))
        real = jax.jit(lambda x: layouts.convert(x, PAIRS, SCANNED), out_shardings=target)(
            {"layers": {"w": jnp.arange(8.0).reshape(2, 4)}}
        )["layers"]["w"]
        assert real.sharding.is_equivalent_to(target, 2)
        np.testing.assert_array_equal(real[2:], real[:2])


class TestDescriptions:
    """ShapeDtypeStructs with shardings go through the same functions as arrays."""

    def described(self, unit):
        def leaf(x):
            spec = PartitionSpec(None, *("expert",) * (x.ndim > 1), *("model",) * (x.ndim > 2))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh(), spec))

        return jax.tree.map(leaf, tree(unit))

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: layouts.expand(t, units(2), units(4)),
            lambda t: layouts.link(t, units(2), units(1), average=True),
            layouts.unstack,
            lambda t: layouts.stack(layouts.unstack(t)),
        ],
        ids=["expand", "link", "unstack", "stack"],
    )
    def test_shapes_are_those_of_the_arrays(self, change):
        arrays = {"head": jnp.ones(3), "layers": {"w": jnp.ones((2, 4, 6))}}
        struct = jax.eval_shape(lambda: arrays)
        assert differences(change(struct), change(arrays)) == []
        assert differences(jax.eval_shape(change, arrays), change(arrays)) == []

    def test_expand_and_link_keep_shardings(self):
        before = self.described(2)
        assert specs(layouts.expand(before, units(2), units(4))) == specs(before)
        assert specs(layouts.link(before, units(2), units(1))) == specs(before)

    def test_unstack_drops_the_entry_of_the_layers(self):
        layer = layouts.unstack(self.described(2))["layers_1"]
        assert layer["w"].sharding.spec == PartitionSpec("expert", "model")
        assert layer["count"].sharding.spec == PartitionSpec()

    def test_stack_puts_it_back(self):
        again = layouts.stack(layouts.unstack(self.described(2)))
        assert again["layers"]["w"].sharding.spec == PartitionSpec(None, "expert", "model")
        assert again["layers"]["w"].sharding.mesh == mesh()

    def test_without_shardings_there_are_none(self):
        struct = jax.eval_shape(lambda: tree(2))
        assert layouts.unstack(struct)["layers_0"]["w"].sharding is None


@pytest.mark.parametrize("layout", [PAIRS, SCANNED, UNROLLED])
def test_split_and_join_are_inverses(layout):
    whole = tree(layout.unit)
    whole = layouts.unstack(whole) if layout.form is Form.UNROLLED else whole
    rest, stacked = layouts.split_stack(whole, layout)
    assert sorted(rest) == ["head"]
    models.assert_equal(layouts.join_stack(rest, stacked, layout), whole)


def test_split_of_unrolled_layers_is_in_order():
    layout = Layout(depth=12, unit=12, form=Form.UNROLLED)
    _, layers = layouts.split_stack(layouts.unstack(tree(12)), layout)
    assert [int(layer["count"]) for layer in layers] == list(range(12))
