"""New states and delinked states are those of the plain functions, made layer by layer."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Layout, LayoutError, Part, state_building
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training import train_state

HOST = OffloadPlan(weights=("",), optimizer_state=True, min_bytes=0)
CONFIG = models.tiny(num_layers=4, moe=models.experts(router=TopK(bias_rate=0.01)))
MESH = Partitioning(data=2, expert=4)
ADAMW, ADAFACTOR = AdamW(), Adafactor(min_dim_size_to_factor=4, b1=0.9)
FOUR, ONE = models.stacked(CONFIG), models.stacked(CONFIG, 1)
UNROLLED = models.unrolled(CONFIG)
PARTS = Layout(depth=4, unit=1, parts=(Part(pattern="norm"), Part(pattern="attention", unit=2)))
RUNS = Layout(depth=4, unit=4, borders=(2,))


def describe(layout, optimizer=ADAMW, plan=HOST, config=CONFIG, where=MESH):
    mesh = where.make_mesh(jax.devices()[: where.data * where.expert])
    plain = train_state.abstract_state(
        Transformer(config), layout, optimizer, where, mesh, True, True
    )
    return plan.place(plain, layout)


def tx_of(layout, optimizer):
    return optimizer.build(train_state.logical_axes(models.describe(CONFIG, layout)))


def assert_lies(state, abstract):
    for leaf, described in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(described.sharding, leaf.ndim)
        assert leaf.sharding.memory_kind == described.sharding.memory_kind


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [(FOUR, ADAMW), (ONE, ADAFACTOR), (UNROLLED, ADAMW), (PARTS, ADAFACTOR), (RUNS, ADAMW)],
    ids=["stacked", "shared", "unrolled", "parts", "runs"],
)
@pytest.mark.long("runs")
def test_a_new_state_is_that_of_the_whole_model(layout, optimizer):
    """Bit for bit, in the described places."""
    abstract, tx = describe(layout, optimizer), tx_of(layout, optimizer)

    def whole():
        params = Transformer(CONFIG).init(jax.random.key(3), layout)
        biases = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.extra.router_bias)
        return train_state.create(params, tx, 3, True, biases, True)

    with MESH.activate(abstract.step.sharding.mesh):
        state = train_state.initialize(Transformer(CONFIG), layout, tx, 3, abstract)
        expected = jax.jit(whole, out_shardings=train_state.shardings_of(abstract))()
    models.assert_equal(jax.device_get(state), jax.device_get(expected))
    assert_lies(state, abstract)


@functools.cache
def trained(layout, optimizer=ADAFACTOR):
    """A state with numbers everywhere."""
    abstract = describe(layout, optimizer)
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return rng.normal(size=leaf.shape).astype(leaf.dtype)
        return rng.integers(0, 9, leaf.shape).astype(leaf.dtype)

    return jax.device_put(jax.tree.map(draw, abstract), train_state.shardings_of(abstract))


@pytest.mark.parametrize(
    ("old", "new", "policy"),
    [
        (ONE, FOUR, Policy.COPY),
        (models.stacked(CONFIG, 2), FOUR, Policy.RESCALE),
        (ONE, UNROLLED, Policy.RESET),
        (PARTS, FOUR, Policy.RESCALE),
        (ONE, RUNS, Policy.COPY),
        (FOUR, UNROLLED, None),
        (UNROLLED, FOUR, None),
        (RUNS, FOUR, None),
    ],
    ids=lambda value: "" if isinstance(value, Layout) else str(value and value.name),
)
def test_a_delinked_state_is_that_of_the_plain_function(old, new, policy):
    state, abstract = trained(old), describe(new, ADAFACTOR)
    with MESH.activate(abstract.step.sharding.mesh):
        got = delinking.delink_by_layer(state, old, new, policy, abstract)
    expected = delinking.delink(jax.device_get(state), old, new, policy)
    models.assert_equal(jax.device_get(got), jax.device_get(expected))
    assert_lies(got, abstract)


def test_a_state_that_keeps_its_layout_moves():
    state, abstract = trained(FOUR), describe(FOUR, ADAFACTOR, OffloadPlan())
    with MESH.activate(abstract.step.sharding.mesh):
        moved = delinking.delink_by_layer(state, FOUR, FOUR, None, abstract)
    models.assert_equal(jax.device_get(moved), jax.device_get(state))
    assert_lies(moved, abstract)


def test_refuses_what_the_plain_function_refuses():
    with pytest.raises(LayoutError, match="needs a policy for the optimizer's state"):
        delinking.delink_by_layer(trained(ONE), ONE, FOUR, None, describe(FOUR, ADAFACTOR))


WIDE = models.tiny(num_layers=8, embed_dim=128, mlp_dim=256, pattern=("DENSE",), moe=None)


def one_layer_bytes(abstract, layers=8):
    """Bytes of one layer of a stacked state, parameters and all that goes with them."""
    leaves = jax.tree.leaves((abstract.params["layers"], abstract.opt_state, abstract.extra))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / layers


def test_temporaries_of_a_new_state_are_about_one_layer():
    layout, where = models.stacked(WIDE), Partitioning(data=1)
    abstract = describe(layout, config=WIDE, where=where)
    tx = ADAMW.build(train_state.logical_axes(models.describe(WIDE, layout)))
    make = train_state.one_layer(Transformer(WIDE), layout, tx, 0, abstract)
    memory = state_building.stacked_builder(make, abstract).lower().compile().memory_analysis()
    assert memory.output_size_in_bytes > 7 * one_layer_bytes(abstract)
    assert memory.temp_size_in_bytes < 1.5 * one_layer_bytes(abstract)


def test_temporaries_of_a_delink_are_about_one_layer():
    old, new, where = models.stacked(WIDE, 1), models.stacked(WIDE), Partitioning(data=1)
    before, after = (describe(layout, config=WIDE, where=where) for layout in (old, new))
    make = delinking.one_layer(old, new, Policy.RESCALE)
    memory = state_building.stacked_builder(make, after).lower(before).compile().memory_analysis()
    assert memory.output_size_in_bytes > 7 * one_layer_bytes(after)
    assert memory.temp_size_in_bytes < 1.5 * one_layer_bytes(after)
