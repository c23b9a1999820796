"""A step whose numbers are not finite changes nothing that could be saved."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax import layouts
from m6jax.foundation.pytrees import flatten_named
from m6jax.layouts import Form, Layout, offload
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.optimizers.rounding import Rounding
from m6jax.optimizers.weight_update import UpdateRule, Weights, update_by_layer
from m6jax.training import train_state
from m6jax.training.finite import (
    Skipped,
    first_bad_leaf,
    place_name,
    places,
    what_was_skipped,
)
from m6jax.training.losses import Loss, LossSums, TokenSums
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update, train_step

LAYOUT = Layout(depth=2, unit=2)
BATCH = models.make_batch()
ADAMW = AdamW()


def root_loss(params, part, weight, key):
    """The gradient of a layer whose weight is 0 is infinite; the loss is finite."""
    del weight, key
    zero, one = jnp.float32(0), jnp.float32(1)
    total = params["head"] * part["loss_weights"][0, 0] + jnp.sqrt(params["layers"]["w"]).sum()
    return total, LossSums(TokenSums(total, zero, zero, one), total, None)


@jax.jit
def step(state, batch, rate=0.1):
    axes = {"head": (), "layers": {"w": ("layers",)}}
    return train_step(
        state,
        batch,
        loss_fn=root_loss,
        layout=LAYOUT,
        tx=ADAMW.build(axes),
        learning_rate=lambda step: rate,
        update=Update(average_decay=0.9),
    )


def state_of(*layers, head=1.0):
    params = {"head": jnp.float32(head), "layers": {"w": jnp.array(layers, jnp.float32)}}
    tx = ADAMW.build({"head": (), "layers": {"w": ("layers",)}})
    return train_state.create(params, tx, 0, averaged=True)


def assert_only_the_step_counts(before, after):
    assert int(after.step) == int(before.step) + 1
    models.assert_equal(after.replace(step=before.step), before)


def test_an_infinite_gradient_changes_nothing_and_is_named():
    before = state_of(1.0, 0.0)
    after, metrics = step(before, BATCH)
    assert_only_the_step_counts(before, after)
    assert int(metrics["skipped"]) == Skipped.EVERYTHING
    assert np.isfinite(metrics["loss"])
    assert places(before.params)[int(metrics["bad_place"])] == ("layers/w", 1)


def test_a_loss_that_is_no_number_changes_nothing():
    before = state_of(1.0, 1.0)
    weights = np.full_like(BATCH["loss_weights"], np.nan)
    after, metrics = step(before, BATCH | {"loss_weights": weights})
    assert_only_the_step_counts(before, after)
    assert int(metrics["skipped"]) == Skipped.EVERYTHING


def test_a_finite_step_is_made():
    before = state_of(1.0, 1.0)
    after, metrics = step(before, BATCH)
    assert int(metrics["skipped"]) == Skipped.NOTHING
    assert int(metrics["bad_place"]) == -1
    assert first_bad_leaf(after) is None
    assert (np.asarray(after.params["layers"]["w"]) < 1).all()


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (
            {"layers_0": {"w": 0.0}, "layers_10": {"w": 0.0}, "head": 0.0, "embedder": {"w": 0.0}},
            ["None", "10", "0", "None"],
        ),
        ({"layers": {"0to1": {"w": [0.0] * 2}, "2to2": {"w": [0.0]}}}, ["2", "1", "0"]),
    ],
)
def test_places_go_back_from_the_last_layer(tree, expected):
    tree = jax.tree.map(jnp.float32, tree, is_leaf=lambda x: isinstance(x, list))
    assert [str(layer) for _, layer in places(tree)] == expected
    for number, (name, layer) in enumerate(places(tree)):
        bad = {n: np.array(leaf) for n, leaf in flatten_named(tree)}
        at = () if bad[name].ndim == 0 else layer - int(name.split("/")[1].split("to")[0])
        bad[name][at] = np.inf
        marked = jax.tree.unflatten(jax.tree.structure(tree), list(bad.values()))
        fits = jax.tree.map(lambda x: np.isfinite(x), marked)
        every = jax.tree.map(np.ones_like, fits)
        gradient = what_was_skipped(jnp.bool_(False), marked, fits)
        assert int(gradient["bad_place"]) == number  # which explains what is bad after the update
        assert place_name(tree, number).endswith(f", in the gradient of {name}")
        update = what_was_skipped(jnp.bool_(True), tree, fits)
        assert int(update["skipped"]) == Skipped.PART
        assert place_name(tree, int(update["bad_place"])).endswith(f", in the update of {name}")
        assert first_bad_leaf(jax.tree.map(jnp.asarray, marked)) == (
            name if layer is None or at == () else f"{name}, layer {layer}"
        )
        assert int(what_was_skipped(jnp.bool_(True), tree, every)["bad_place"]) == -1


def test_a_weight_that_its_own_update_makes_infinite_stays():
    before = state_of(1.0, 1.0, head=-3e38)
    after, metrics = step(before, BATCH, 3e38)
    assert np.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == Skipped.PART
    found = place_name(before.params, int(metrics["bad_place"]))
    assert found == "outside of the layers, in the update of head"
    assert first_bad_leaf(after) is None
    for old, new in ((before.params, after.params), (before.extra.averaged, after.extra.averaged)):
        assert float(new["head"]) == float(old["head"])
        assert (np.asarray(new["layers"]["w"]) < 0).all()


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_layers_of_a_stack_are_looked_at_by_themselves(kind):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    params = {"layers": {"w": jax.device_put(jnp.ones((3, 4), jnp.float16), place)}}
    grads = {"layers": {"w": jax.device_put(jnp.array([[1.0], [0], [1]]) * jnp.ones(4), place)}}
    tx = AdamW(weight_decay=0.0).build({"layers": {"w": ("layers", "embed")}})

    def update(params, grads):
        weights = Weights(params, tx.init(offload.to_device(params)))
        rule = UpdateRule(tx, jnp.float32(1e5))  # beyond what float16 holds
        new, finite = update_by_layer(weights, grads, None, rule)
        return offload.to_device(new.params), finite

    new, finite = models.jit(update)(params, grads)
    assert finite["layers"]["w"].tolist() == [False, True, False]
    np.testing.assert_array_equal(new["layers"]["w"], np.ones((3, 4)))


def test_the_first_bad_leaf_of_a_state_may_rest_on_the_host():
    state = state_of(1.0, 2.0)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    mu = {"head": jnp.float32(0), "layers": {"w": jnp.array([1.0, np.inf])}}
    state = state.replace(opt_state=state.opt_state.replace(mu=jax.device_put(mu, host)))
    assert first_bad_leaf(state) == "opt_state/mu/layers/w, layer 1"


def streamed(model, layout, rate=0.1):
    return models.jit(
        functools.partial(
            streamed_step,
            model=model,
            layout=layout,
            loss=Loss(),
            optimizer=ADAMW,
            learning_rate=lambda step: rate,
            update=Update(clip_norm=None, rounding=Rounding.NEAREST),
        )
    )


@pytest.mark.parametrize(("unit", "form"), [(4, Form.UNROLLED), (2, Form.STACKED)])
def test_the_streamed_step_keeps_weights_that_their_update_makes_infinite(unit, form):
    config = models.tiny(num_layers=4, param_dtype="float16")
    layout = config.layout(unit, form)
    tx = ADAMW.build(train_state.logical_axes(models.describe(config, layout)))
    before = train_state.create(models.draw(config, layout), tx, 0, averaged=True)
    after, metrics = streamed(Transformer(config), layout, rate=1e6)(before, BATCH)
    assert int(metrics["skipped"]) == Skipped.PART
    assert " in the update of " in place_name(before.params, int(metrics["bad_place"]))
    assert first_bad_leaf(after) is None
    changed = 0
    for (name, old), new in zip(
        flatten_named(before.params), jax.tree.leaves(after.params), strict=True
    ):
        if old.dtype == jnp.float16:
            moved = np.abs(np.asarray(new, np.float32) - np.asarray(old, np.float32)).max()
            assert moved < 7e4, name
        else:
            changed += bool((np.asarray(old) != np.asarray(new)).any())
    assert changed  # what has room for it


def test_the_streamed_step_updates_nothing_without_a_finite_loss():
    config = models.tiny()
    layout = config.layout(2, Form.STACKED)
    tx = ADAMW.build(train_state.logical_axes(models.describe(config, layout)))
    before = train_state.create(models.draw(config, layout), tx, 0, averaged=False)

    run = streamed(Transformer(config), layout)
    weights = np.full_like(BATCH["loss_weights"], np.nan)
    after, metrics = run(before, BATCH | {"loss_weights": weights})
    assert_only_the_step_counts(before, after)
    assert int(metrics["skipped"]) == Skipped.EVERYTHING
    after, metrics = run(before, BATCH)
    assert int(metrics["skipped"]) == Skipped.NOTHING


class Rooted(Transformer):
    """The gradient by a layer's first norm is no number where its scale is 0; all else is."""

    def block(self, params, x, context, use):
        x, report = super().block(params, x, context, use)
        return x + 1e-9 * jnp.sqrt(jnp.abs(params["attention_norm"]["scale"])), report


@pytest.mark.parametrize("form", list(Form))
def test_the_streamed_step_keeps_a_layer_without_a_finite_gradient_and_all_below_it(form):
    bad, config = 1, models.tiny(num_layers=4, moe=None, pattern=("DENSE",))
    layout = config.layout(4, form)
    parameters = models.draw(config, layout)
    before = layouts.unstack(parameters) if form is Form.STACKED else parameters
    before["layers_1"]["attention_norm"]["scale"] *= 0
    parameters = layouts.stack(before) if form is Form.STACKED else before
    tx = ADAMW.build(train_state.logical_axes(models.describe(config, layout)))
    state = train_state.create(parameters, tx, 0, averaged=False)
    after, metrics = streamed(Rooted(config), layout)(state, BATCH)
    assert np.isfinite(metrics["loss"])
    assert int(metrics["skipped"]) == Skipped.PART
    name, layer = places(state.params)[int(metrics["bad_place"])]
    assert (name.split("/", 1)[1], layer) == ("attention_norm/scale", bad)
    for old, new in ((state, after), (state.opt_state.mu, after.opt_state.mu)):
        old, new = (getattr(tree, "params", tree) for tree in (old, new))
        if form is Form.STACKED:
            old, new = layouts.unstack(old), layouts.unstack(new)
        for key in old:
            stays = not key.startswith("layers_") or int(key[-1]) <= bad
            same = jax.tree.map(lambda a, b: bool((a == b).all()), old[key], new[key])
            assert all(jax.tree.leaves(same)) == stays, key
