"""From shared layers to layers of their own: parameters, averages and what the optimizer knows."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax import layouts
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named, map_named
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, LayoutError
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.pseudo_to_real.delinking import Policy, delink
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import Update, model_loss, scale_shared, train_step

DEPTH = 4
SHARED = Layout(depth=DEPTH, unit=1)
PAIRS = Layout(depth=DEPTH, unit=2)
REAL = Layout(depth=DEPTH, unit=4)
UNROLLED = Layout(depth=DEPTH, unit=4, form=Form.UNROLLED)

OPTIMIZERS = {
    "adamw": AdamW(weight_decay=0.0),
    "adafactor": Adafactor(min_dim_size_to_factor=4),
    "momentum": Adafactor(min_dim_size_to_factor=4, b1=0.9),
}
AXES = {
    "head": ("embed",),
    "layers": {"norm": ("layers", "embed"), "w": ("layers", "embed", "mlp")},
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
# MEASURED needs batches; see test_measuring.
every_policy = pytest.mark.parametrize("policy", [Policy.COPY, Policy.RESCALE, Policy.RESET])


def tree(seed, unit=1):
    rng = np.random.default_rng(seed)
    shapes = {"head": (4,), "layers": {"norm": (unit, 4), "w": (unit, 4, 6)}}
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=is_tuple
    )


def is_tuple(node):
    return isinstance(node, tuple)


@functools.cache
def transformation(optimizer):
    tx = optimizer.build(AXES)
    return models.jit(tx.init), models.jit(tx.update)


def in_stack(name):
    return layouts.LeafName.of(name).in_stack


def trained(optimizer, factor=1.0, unit=1):
    """A state after two gradients; those of the stack times `factor`."""
    init, update = transformation(optimizer)
    params = tree(0, unit)
    opt_state = init(params)
    for seed in (1, 2):
        grads = map_named(lambda name, g: g * factor if in_stack(name) else g, tree(seed, unit))
        _, opt_state = update(grads, opt_state, params)
    return train_state.TrainState(
        step=jnp.int32(7),
        params=params,
        opt_state=opt_state,
        rng=jax.random.key_data(jax.random.key(3)),
        extra=train_state.Extra(averaged=tree(9, unit)),
    )


def move(state, old, new, policy):
    # Numpy arrays and eager code: every delink here would compile a program of its own.
    return jax.device_get(delink(state, old, new, policy))


@every_policy
@every_optimizer
def test_parameters_and_averages_are_copied_and_the_rest_stays(optimizer, policy):
    """B15: equal copies after delinking."""
    before = trained(optimizer)
    after = move(before, SHARED, REAL, policy)
    for got, old in ((after.params, before.params), (after.extra.averaged, before.extra.averaged)):
        for layer in range(DEPTH):
            np.testing.assert_array_equal(got["layers"]["w"][layer], old["layers"]["w"][0])
            np.testing.assert_array_equal(got["layers"]["norm"][layer], old["layers"]["norm"][0])
        np.testing.assert_array_equal(got["head"], old["head"])
    assert int(after.step) == 7
    np.testing.assert_array_equal(after.rng, before.rng)
    # What the optimizer knows of other parameters never changes.
    for (name, got), old in zip(
        flatten_named(after.opt_state), jax.tree.leaves(before.opt_state), strict=True
    ):
        assert got.dtype == old.dtype, name
        if not in_stack(name):
            np.testing.assert_array_equal(got, old, err_msg=name)


class TestPolicies:
    @every_optimizer
    def test_copy_keeps_what_was_known(self, optimizer):
        before = trained(optimizer)
        after = move(before, SHARED, REAL, Policy.COPY)
        models.assert_equal(after.opt_state, layouts.expand(before.opt_state, SHARED, REAL))

    @every_optimizer
    def test_after_copy_equal_gradients_move_all_layers_as_the_shared_one(self, optimizer):
        before = trained(optimizer)
        after = move(before, SHARED, REAL, Policy.COPY)
        _, update = transformation(optimizer)
        grads = tree(5)
        expected, _ = update(grads, before.opt_state, before.params)
        got, _ = update(layouts.expand(grads, SHARED, REAL), after.opt_state, after.params)
        models.assert_close(got, layouts.expand(expected, SHARED, REAL))

    @every_optimizer
    @pytest.mark.parametrize("new", [PAIRS, REAL, UNROLLED])
    def test_rescale_of_summed_gradients_is_copy_of_their_means(self, optimizer, new):
        """First moments by U / L, second by its square; momentum of directions stays."""
        summed, mean = trained(optimizer, factor=new.unit), trained(optimizer)
        got = move(summed, SHARED, new, Policy.RESCALE)
        expected = move(mean, SHARED, new, Policy.COPY)
        models.assert_close(got.opt_state, expected.opt_state, 2e-6)

    def test_rescale_by_hand(self):
        before = trained(OPTIMIZERS["adamw"])
        after = move(before, SHARED, REAL, Policy.RESCALE)
        w = before.opt_state.mu["layers"]["w"][0]
        np.testing.assert_allclose(after.opt_state.mu["layers"]["w"][3], w / 4, rtol=1e-6)
        w = before.opt_state.nu["layers"]["w"][0]
        np.testing.assert_allclose(after.opt_state.nu["layers"]["w"][3], w / 16, rtol=1e-6)
        np.testing.assert_array_equal(after.opt_state.count["layers"]["w"], [2] * DEPTH)

    @every_optimizer
    def test_reset_forgets_moments_and_counts_of_the_stack(self, optimizer):
        after = move(trained(optimizer), SHARED, REAL, Policy.RESET)
        for name, leaf in flatten_named(after.opt_state):
            if in_stack(name):
                assert not leaf.any(), name
        assert int(after.opt_state.count["head"]) == 2

    @every_optimizer
    def test_after_reset_layers_move_as_new_ones(self, optimizer):
        """Zero moments under an old count would overshoot."""
        after = move(trained(optimizer), SHARED, REAL, Policy.RESET)
        init, update = transformation(optimizer)
        grads = tree(5, DEPTH)
        got, _ = update(grads, after.opt_state, after.params)
        expected, _ = update(grads, init(after.params), after.params)
        models.assert_close(got["layers"], expected["layers"])

    def test_first_step_of_adam_after_reset_has_size_one(self):
        after = move(trained(OPTIMIZERS["adamw"]), SHARED, REAL, Policy.RESET)
        _, update = transformation(OPTIMIZERS["adamw"])
        grads = tree(5, DEPTH)
        got, _ = update(grads, after.opt_state, after.params)
        np.testing.assert_allclose(got["layers"]["w"], np.sign(grads["layers"]["w"]), rtol=1e-4)

    @every_policy
    def test_unrolling_alone_leaves_the_optimizers_memory(self, policy):
        before = trained(OPTIMIZERS["adamw"], unit=4)
        after = move(before, REAL, UNROLLED, policy)
        models.assert_equal(layouts.stack(after), before)


class TestWays:
    @every_policy
    @every_optimizer
    def test_every_unit_on_the_way_leads_to_the_same_state(self, optimizer, policy):
        """B15: 1 to 2 to 4, and unrolled, equal 1 to 4 in one go."""
        before = trained(optimizer)
        at_once = move(before, SHARED, REAL, policy)
        half = move(before, SHARED, PAIRS, policy)
        models.assert_close(move(half, PAIRS, REAL, policy), at_once)
        models.assert_close(move(half, PAIRS, UNROLLED, policy), layouts.unstack(at_once))

    @every_optimizer
    def test_runs_under_eval_shape(self, optimizer):
        before = trained(optimizer)
        for new in (PAIRS, REAL, UNROLLED):
            shape = jax.eval_shape(
                lambda s, new=new: delink(s, SHARED, new, Policy.RESCALE), before
            )
            after = move(before, SHARED, new, Policy.RESCALE)
            assert jax.tree.map(jnp.shape, shape) == jax.tree.map(jnp.shape, after)

    def test_without_averages_there_are_none_after(self):
        before = trained(OPTIMIZERS["adamw"]).replace(extra=train_state.Extra())
        after = move(before, SHARED, REAL, Policy.COPY)
        assert after.extra == train_state.Extra()


class TestErrors:
    @pytest.mark.parametrize("layout", [SHARED, REAL, UNROLLED])
    def test_nothing_to_delink(self, layout):
        """Delinking once more is no silent success."""
        state = trained(OPTIMIZERS["adamw"])
        if layout != SHARED:
            state = move(state, SHARED, layout, Policy.COPY)
        with pytest.raises(LayoutError, match=f"already has {layout.unit} distinct of 4 layers"):
            delink(state, layout, layout, Policy.COPY)

    def test_measuring_without_batches(self):
        with pytest.raises(LayoutError, match="MEASURED needs batches and a step"):
            delink(trained(OPTIMIZERS["adamw"]), SHARED, REAL, Policy.MEASURED)

    def test_without_a_policy(self):
        with pytest.raises(LayoutError, match=r"1 layers into 4 needs a policy .*choices: COPY"):
            delink(trained(OPTIMIZERS["adamw"]), SHARED, REAL, None)

    @every_policy
    def test_delinking_twice(self, policy):
        """B15."""
        once = move(trained(OPTIMIZERS["adamw"]), SHARED, REAL, policy)
        with pytest.raises(LayoutError, match=r"shape \(4, 4\): cannot expand 1 to 4"):
            delink(once, SHARED, REAL, policy)

    @every_policy
    def test_a_tree_that_is_already_unrolled(self, policy):
        """B15."""
        once = move(trained(OPTIMIZERS["adamw"]), SHARED, UNROLLED, policy)
        with pytest.raises(LayoutError, match="already has its own parameters"):
            delink(once, SHARED, REAL, policy)

    def test_a_unit_that_does_not_divide(self):
        """B15."""
        state = trained(OPTIMIZERS["adamw"], unit=2)
        with pytest.raises(ConfigError, match="3 does not divide the depth of 4 layers"):
            delink(state, PAIRS, Layout(depth=DEPTH, unit=3), Policy.COPY)
        with pytest.raises(LayoutError, match="2 layers cannot expand to 3"):
            delink(state, Layout(depth=6, unit=2), Layout(depth=6, unit=3), Policy.COPY)

    @pytest.mark.parametrize("old", [REAL, UNROLLED])
    def test_fewer_layers(self, old):
        state = move(trained(OPTIMIZERS["adamw"]), SHARED, old, Policy.COPY)
        with pytest.raises(LayoutError, match="4 layers cannot expand to 2"):
            delink(state, old, PAIRS, Policy.COPY)

    def test_another_depth(self):
        state = trained(OPTIMIZERS["adamw"])
        with pytest.raises(LayoutError, match="depth 4 cannot become one of depth 8"):
            delink(state, SHARED, Layout(depth=8, unit=8), Policy.COPY)


@functools.cache
def model_step(unit):
    """A step of a model of three layers; its gradient is the direction's first moment."""
    config = models.tiny(num_layers=3, moe=models.experts(capacity_factor=None))
    model, layout = Transformer(config), models.stacked(config, unit)
    tx = AdamW(b1=0.0, weight_decay=0.0).build(
        train_state.logical_axes(models.describe(config, layout))
    )
    step = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2,
        update=Update(clip_norm=None),
    )
    return config, layout, tx, models.jit(step)


class TestModel:
    """B15 with a model: three uses of one layer."""

    def test_stages_meet(self):
        config, shared, tx, shared_step = model_step(1)
        _, real, _, real_step = model_step(3)
        batch = models.make_batch(rows=4)
        before = models.jit(lambda params: train_state.create(params, tx, 0, True))(
            models.draw(config, shared)
        )
        delinked = delink(before, shared, real, Policy.COPY)
        shared_after, shared_metrics = shared_step(before, batch)
        after, metrics = real_step(delinked, batch)
        # The same loss, bit for bit, and the shared gradient is the mean of the three.
        assert float(metrics["loss"]) == float(shared_metrics["loss"])
        own = after.opt_state.mu
        mean = own | {"layers": jax.tree.map(lambda g: g.mean(0, keepdims=True), own["layers"])}
        models.assert_close(shared_after.opt_state.mu, mean, 5e-6)
        summed = own | {"layers": jax.tree.map(lambda g: g.sum(0, keepdims=True), own["layers"])}
        models.assert_close(scale_shared(summed, shared), mean)
        # Copies differ after one step.
        for name, leaf in flatten_named(after.params["layers"]):
            assert (np.asarray(leaf[0]) != np.asarray(leaf[1])).any(), name
            assert (np.asarray(leaf[1]) != np.asarray(leaf[2])).any(), name


def test_delinks_straight_into_the_shardings_of_the_new_layout():
    config = models.tiny(num_layers=4)
    model, optimizer = Transformer(config), AdamW()
    where = Partitioning(data=2, expert=2, model=2, fully_sharded=True)
    mesh = where.make_mesh()
    old, new = models.stacked(config, 1), models.stacked(config)

    def describe(layout):
        return train_state.abstract_state(model, layout, optimizer, where, mesh, averaged=False)

    params = models.draw(config, old)
    tx = optimizer.build(train_state.logical_axes(models.describe(config, old)))
    state = models.jit(lambda: train_state.create(params, tx, 0, False))()
    placed = jax.device_put(state, train_state.shardings_of(describe(old)))
    shardings = train_state.shardings_of(describe(new))
    real = models.jit(lambda s: delink(s, old, new, Policy.COPY), out_shardings=shardings)(placed)
    for leaf, sharding in zip(jax.tree.leaves(real), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    models.assert_equal(real, layouts.expand(state, old, new))
