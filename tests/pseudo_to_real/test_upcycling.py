"""A dense model becomes a sparse one that computes the same, whatever its layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from m6jax import layouts
from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.foundation.pytrees import differences, flatten_named, map_named
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Part
from m6jax.modeling.config import MoEConfig
from m6jax.modeling.routers import ExpertChoice, TokenHash, TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.pseudo_to_real.upcycling import (
    UpcyclingError,
    new_layout,
    total_weight,
    upcycle,
    upcycle_state,
)
from m6jax.training import train_state

KEY = jax.random.key(5)
BATCH = models.make_batch()
DENSE = models.tiny(pattern=("DENSE",), moe=None)
NORMALIZED = MoEConfig(
    num_experts=8,
    num_prototypes=2,
    num_selected_experts=2,
    normalize_weights=True,
    capacity_factor=None,
)


def sparse(source=DENSE, pattern=("SPARSE",), **moe):
    return dataclasses.replace(source, pattern=pattern, moe=dataclasses.replace(NORMALIZED, **moe))


@functools.cache
def run(config, layout):
    model = Transformer(config)
    return models.jit(lambda params: model.apply(params, BATCH, layout).logits)


def check_same_function(source, target, layout, tolerance=1e-5):
    params = models.draw(source, layout)
    upcycled = upcycle(params, source, target, layout, KEY)
    expected = run(source, layout)(params)
    got = run(target, new_layout(source, target, layout))(upcycled)
    real = BATCH["segment_ids"] > 0
    models.assert_close(got[real], expected[real], tolerance)
    return upcycled


class TestFunction:
    """The sparse model at step 0 is the dense one, to 1e-5."""

    SHARED = models.stacked(DENSE, 1)

    @pytest.mark.parametrize(
        ("moe", "weight"),
        [
            ({}, 2.0),  # two prototypes, of 1 each
            ({"num_shared_experts": 3, "num_prototypes": 1}, 4.0),  # and one for each shared
            ({"normalize_weights": False, "router": TokenHash()}, 4.0),  # 2 x K of 1 each
            ({"normalize_weights": False, "num_experts": 4}, 2.0),  # softmax over all that are
            ({"router": TopK(scores="SIGMOID", bias_rate=0.1), "capacity_factor": 4.0}, 2.0),
        ],
        ids=["normalized", "shared experts", "hash", "all chosen", "sigmoid"],
    )
    def test_is_kept(self, moe, weight):
        target = sparse(**moe)
        assert total_weight(target) == weight
        source, layout = DENSE, self.SHARED
        params = models.draw(source, layout)
        upcycled = upcycle(params, source, target, layout, KEY)
        biases = jax.tree.map(
            lambda p: jnp.zeros(p.value.shape),
            Transformer(target).router_bias(layout),
            is_leaf=is_parameter,
        )
        if biases is not None:
            upcycled["layers"]["moe"]["router"] |= biases["layers"]["moe"]["router"]
        real = BATCH["segment_ids"] > 0
        got, expected = run(target, layout)(upcycled), run(source, layout)(params)
        models.assert_close(got[real], expected[real], 1e-5)

    def test_is_kept_with_gates_unrolled(self):
        source = dataclasses.replace(DENSE, gated_mlp=True)
        check_same_function(source, sparse(source), models.unrolled(source))

    @pytest.mark.parametrize("form", Form)
    def test_is_kept_where_every_other_layer_becomes_sparse(self, form):
        source = dataclasses.replace(DENSE, num_layers=4)
        target = sparse(source, ("DENSE", "SPARSE"))
        upcycled = check_same_function(source, target, source.layout(4, form))
        first = upcycled["layers"] if form is Form.STACKED else upcycled["layers_1"]
        assert sorted(first) == ["dense_0", "sparse_1"]

    def test_is_kept_in_rounds_of_the_same_length(self):
        source = dataclasses.replace(DENSE, pattern=("DENSE", "DENSE"))
        target = sparse(source, ("SPARSE", "DENSE"))
        upcycled = check_same_function(source, target, models.stacked(source))
        assert sorted(upcycled["layers"]) == ["dense_1", "sparse_0"]

    def test_is_kept_before_and_after_delinking(self):
        """Both orders give the same leaves, but for routers: drawn for a layer, or shared."""
        params, target = models.draw(DENSE, self.SHARED), sparse()
        real = models.stacked(DENSE)
        after = upcycle(layouts.expand(params, self.SHARED, real), DENSE, target, real, KEY)
        upcycled = upcycle(params, DENSE, target, self.SHARED, KEY)
        before = layouts.expand(upcycled, self.SHARED, real)
        routers = [tree["layers"]["moe"].pop("router")["kernel"] for tree in (after, before)]
        models.assert_equal(after, before)
        np.testing.assert_array_equal(routers[0][0], routers[1][0])
        np.testing.assert_array_equal(routers[1][0], routers[1][1])
        assert (routers[0][0] != routers[0][1]).any()

    def test_parts_with_units_of_their_own_are_refused(self):
        layout = DENSE.layout(2, Form.STACKED, (Part(pattern="norm", unit=1),))
        with pytest.raises(ConfigError, match=r"Stage\.parts: 1 parts with units of their own"):
            upcycle(models.draw(DENSE, layout), DENSE, sparse(), layout, KEY)


class TestLeaves:
    LAYOUT = models.stacked(DENSE)

    def test_experts_are_copies_and_routers_are_drawn(self):
        target = sparse(num_shared_experts=2)
        params = models.draw(DENSE, self.LAYOUT)
        got = models.jit(lambda p: upcycle(p, DENSE, target, self.LAYOUT, KEY))(params)
        moe, mlp = got["layers"]["moe"], params["layers"]["mlp"]
        for e in range(8):
            np.testing.assert_array_equal(moe["up"][:, e], mlp["up"])
            np.testing.assert_array_equal(moe["down"][:, e], mlp["down"] / 4)
        np.testing.assert_array_equal(moe["shared"]["up"], np.tile(mlp["up"], (1, 1, 2)))
        np.testing.assert_array_equal(moe["shared"]["down"], np.tile(mlp["down"], (1, 2, 1)) / 4)
        drawn = models.jit(lambda: Transformer(target).init(KEY, self.LAYOUT))()
        models.assert_equal(moe["router"], drawn["layers"]["moe"]["router"])
        del params["layers"]["mlp"], got["layers"]["moe"]
        models.assert_equal(got, params)

    @pytest.mark.parametrize("form", Form)
    def test_structs_get_shapes_and_shardings(self, form):
        layout, target = DENSE.layout(2, form), sparse(num_shared_experts=1)
        where = Partitioning(data=2, expert=2, model=2, fully_sharded=True)
        mesh = where.make_mesh()
        described = models.describe(DENSE, layout)
        structs = jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.value.shape, p.value.dtype, sharding=s),
            described,
            where.weight_shardings(described, mesh),
            is_leaf=is_parameter,
        )
        got = upcycle(structs, DENSE, target, layout, KEY)
        shapes = jax.eval_shape(lambda p: upcycle(p, DENSE, target, layout, KEY), structs)
        assert differences(got, shapes) == []
        lead = (None,) if form is Form.STACKED else ()
        moe = got["layers" if form is Form.STACKED else "layers_1"]["moe"]
        specs = {name: leaf.sharding.spec for name, leaf in flatten_named(moe)}
        assert specs == {
            "up": PartitionSpec(*lead, None, "data", "model"),
            "down": PartitionSpec(*lead, None, "model", "data"),
            "router/kernel": PartitionSpec(),
            "shared/up": PartitionSpec(*lead, "data", "model"),
            "shared/down": PartitionSpec(*lead, "model", "data"),
        }
        assert moe["router"]["kernel"].sharding == NamedSharding(mesh, PartitionSpec())

    def test_structs_without_shardings_stay_without(self):
        structs = jax.eval_shape(lambda: models.draw(DENSE, self.LAYOUT))
        got = upcycle(structs, DENSE, sparse(), self.LAYOUT, KEY)
        assert {leaf.sharding for leaf in jax.tree.leaves(got)} == {None}


@pytest.mark.parametrize(
    "optimizer", [AdamW(), Adafactor(min_dim_size_to_factor=4)], ids=["adamw", "adafactor"]
)
@pytest.mark.parametrize("pattern", [("SPARSE",), ("DENSE", "SPARSE")], ids=len)
def test_state_keeps_what_the_optimizer_knows_of_old_leaves(optimizer, pattern):
    source, target = DENSE, sparse(pattern=pattern, router=TopK(bias_rate=0.1))
    layout, length = models.stacked(source), len(pattern)
    new = new_layout(source, target, layout)

    def build(config, layout):
        return optimizer.build(train_state.logical_axes(models.describe(config, layout)))

    params = models.draw(source, layout)
    dense = models.jit(lambda p: train_state.create(p, build(source, layout), 0, True))(params)
    dense = dense.replace(
        step=jnp.int32(7), opt_state=jax.tree.map(lambda x: x + 1, dense.opt_state)
    )
    tx = build(target, new)
    got = models.jit(lambda s: upcycle_state(s, source, target, layout, KEY, tx))(dense)

    zeros = jax.tree.map(
        lambda p: jnp.zeros(p.value.shape),
        Transformer(target).router_bias(new),
        is_leaf=is_parameter,
    )
    fresh = models.jit(lambda p: train_state.create(p, tx, 0, True, zeros))(got.params)
    assert differences(got, fresh) == []
    expected = map_named(lambda name, x: x + (0 if "/moe/" in name else 1), fresh.opt_state)
    models.assert_equal(got.opt_state, expected)
    assert int(got.step) == 7
    models.assert_equal(got.rng, dense.rng)
    models.assert_equal(got.extra, fresh.extra)
    assert length == 1 or "dense_0" in got.params["layers"]


def test_state_without_averages_and_biases_has_none():
    layout, target = models.stacked(DENSE), sparse()
    tx = AdamW().build(train_state.logical_axes(models.describe(target, layout)))

    def go():
        old = AdamW().build(train_state.logical_axes(models.describe(DENSE, layout)))
        state = train_state.create(models.draw(DENSE, layout), old, 0, False)
        return upcycle_state(state, DENSE, target, layout, KEY, tx)

    extra = jax.eval_shape(go).extra
    assert (extra.averaged, extra.router_bias) == (None, None)


def test_state_keeps_the_biases_of_routers_that_were_there():
    moe = {"router": TopK(bias_rate=0.1), "num_prototypes": 1}
    source, target = (
        sparse(pattern=("DENSE", "SPARSE"), **moe),
        sparse(pattern=("SPARSE",) * 2, **moe),
    )
    layout = models.stacked(source)
    tx = AdamW().build(train_state.logical_axes(models.describe(target, layout)))
    old = AdamW().build(train_state.logical_axes(models.describe(source, layout)))
    router = {"router": {"bias": jnp.arange(8.0)[None]}}
    bias = {"layers": {"sparse_1": {"moe": router}}}
    params = models.draw(source, layout)
    kernel = params["layers"]["sparse_1"]["moe"]["router"]["kernel"]

    @models.jit
    def go(params, bias):
        state = train_state.create(params, old, 0, False, bias)
        return upcycle_state(state, source, target, layout, KEY, tx)

    got = go(params, bias)
    layers = got.extra.router_bias["layers"]
    np.testing.assert_array_equal(layers["sparse_0"]["moe"]["router"]["bias"], np.zeros((1, 8)))
    np.testing.assert_array_equal(layers["sparse_1"]["moe"]["router"]["bias"], [range(8)])
    np.testing.assert_array_equal(
        got.params["layers"]["sparse_1"]["moe"]["router"]["kernel"], kernel
    )


class TestRefusals:
    LAYOUT = models.stacked(DENSE)

    def upcycle(self, target, source=DENSE, params=None, layout=None, **settings):
        layout = layout or self.LAYOUT
        params = params or jax.eval_shape(lambda: models.draw(source, layout))
        return upcycle(params, source, target, layout, KEY, **settings)

    @pytest.mark.parametrize(
        "moe",
        [
            {"normalize_weights": False},
            {"router": TopK(scores="SIGMOID"), "normalize_weights": False, "num_experts": 4},
            {"router": ExpertChoice(), "capacity_factor": 1.0},
        ],
        ids=["softmax", "sigmoid", "expert choice"],
    )
    def test_of_weights_without_a_known_sum(self, moe):
        source = dataclasses.replace(DENSE, causal=False)
        target = sparse(source, **moe)
        with pytest.raises(ConfigError, match=r"no known sum, so .* keep_function = False"):
            self.upcycle(target, source)
        got = self.upcycle(target, source, keep_function=False)
        assert got["layers"]["moe"]["down"].shape == (2, target.moe.num_experts, 16, 16)
        assert total_weight(target, known=False) == 2.0

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (("DENSE",), ("DENSE",)),
            (("SPARSE",), ("SPARSE",)),
            (("SPARSE", "DENSE"), ("DENSE", "SPARSE")),
            (("DENSE", "DENSE"), ("SPARSE",)),
        ],
    )
    def test_of_patterns_that_do_not_fit(self, old, new):
        source, target = sparse(pattern=old), sparse(pattern=new)
        with pytest.raises(ConfigError, match=r"pattern: \(.*\) cannot be upcycled to \(.*\)"):
            self.upcycle(target, source, layout=models.stacked(source))

    def test_of_a_unit_that_cuts_a_round(self):
        target = sparse(pattern=("DENSE", "SPARSE"))
        with pytest.raises(ConfigError, match="1 layers are not whole rounds"):
            self.upcycle(target, layout=models.stacked(DENSE, 1))

    def test_of_a_tree_that_is_not_the_dense_models(self):
        params = models.draw(DENSE, self.LAYOUT)
        del params["layers"]["mlp"]["down"]
        with pytest.raises(UpcyclingError, match="the dense model has: layers/mlp/down: nothing"):
            self.upcycle(sparse(), params=params)

    def test_of_a_tree_that_is_sparse_already(self):
        target = sparse()
        params = models.draw(target, self.LAYOUT)
        with pytest.raises(UpcyclingError, match=r"layers/moe/down: .* against nothing"):
            self.upcycle(target, params=params)

    def test_of_models_that_differ_otherwise(self):
        target = dataclasses.replace(sparse(), mlp_dim=32)
        with pytest.raises(
            UpcyclingError,
            match=r"the sparse model has: layers/moe/down: .*\[2,8,16,16\] against .*\[2,8,32,16\]",
        ):
            self.upcycle(target)
