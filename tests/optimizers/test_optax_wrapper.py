"""Optimizers of optax, layer by layer."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
import runs

from m6jax import layouts
from m6jax.experiment import Stage
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, LayoutError
from m6jax.modeling.config import LayerKind
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers.optax_wrapper import Optax
from m6jax.pseudo_to_real.delinking import Policy, delink
from m6jax.pseudo_to_real.triggers import AtStep
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update, model_loss, train_step

LION = Optax(name="lion", settings={"b1": 0.95}, weight_decay=0.1)
ADAM = Optax(name="adam")
OPTIMIZERS = {
    "lion": LION,
    "adam": ADAM,
    "sgd": Optax(name="sgd", settings={"momentum": 0.9, "nesterov": True}),
    "plain": Optax(name="sgd"),
    "lamb": Optax(name="lamb"),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
SHARED, REAL = Layout(depth=3, unit=1), Layout(depth=3, unit=3)
AXES = {
    "head": ("embed",),
    "layers": {"norm": ("layers", "embed"), "w": ("layers", "embed", "mlp")},
}
ONE_LAYER = {"head": ("embed",), "layers": {"norm": ("embed",), "w": ("embed", "mlp")}}


def tree(seed, layers=3):
    rng = np.random.default_rng(seed)
    return {
        "head": jnp.float32(rng.normal(size=4)),
        "layers": {
            "norm": jnp.float32(rng.normal(size=(layers, 4))),
            "w": jnp.float32(rng.normal(size=(layers, 4, 6))),
        },
    }


def after_steps(optimizer, layers=3):
    tx, params = optimizer.build(AXES), tree(0, layers)
    state = tx.init(params)
    for seed in (1, 2):
        directions, state = tx.update(tree(seed, layers), state, params)
    return directions, state


def of_layer(node, i):
    return jax.tree.map(lambda x: x[i], node)


@every_optimizer
def test_a_layer_moves_as_if_it_were_alone(optimizer):
    """As optax itself moves one leaf, weight decay aside."""
    directions, _ = after_steps(optimizer)
    settings = {"weight_decay": 0.0} if optimizer.name in ("lion", "lamb") else {}
    tx = getattr(optax, optimizer.name)(1.0, **(optimizer.settings or {}), **settings)
    for i in range(3):
        param = tree(0)["layers"]["w"][i]
        state = tx.init(param)
        for seed in (1, 2):
            step, state = tx.update(tree(seed)["layers"]["w"][i], state, param)
        expected = optimizer.weight_decay * param - step
        np.testing.assert_allclose(directions["layers"]["w"][i], expected, rtol=1e-5, atol=1e-6)
    # Norms do not decay.
    norm = Optax(name=optimizer.name, settings=optimizer.settings)
    np.testing.assert_array_equal(
        directions["layers"]["norm"], after_steps(norm)[0]["layers"]["norm"]
    )


@pytest.mark.parametrize("name", ["fromage", "lars", "sgd", "rmsprop"])
def test_under_a_schedule_a_layer_moves_as_optax_moves_it(name):
    """Steps of fromage are not linear in the rate; lars and rmsprop remember other rates."""
    momentum = {} if name == "fromage" else {"momentum": 0.9}
    optimizer = Optax(name=name, settings=momentum)
    rates = jnp.array([0.0, 0.5, 0.1])
    tx, params = optimizer.build(AXES), tree(0)
    own = getattr(optax, name)(learning_rate=lambda count: rates[count], **momentum)
    if name == "fromage":  # it takes no schedule
        own = optax.inject_hyperparams(optax.fromage)(learning_rate=lambda count: rates[count])
    leaf = params["layers"]["w"][1]
    state, own_state = tx.init(params), own.init(leaf)
    for seed, rate in enumerate(rates, 1):
        directions, state = tx.update(tree(seed), state, params, learning_rate=rate)
        params = jax.tree.map(lambda p, d, rate=rate: p - rate * d, params, directions)
        step, own_state = own.update(tree(seed)["layers"]["w"][1], own_state, leaf)
        leaf = leaf + step
        np.testing.assert_allclose(params["layers"]["w"][1], leaf, rtol=1e-5, atol=1e-6)


@every_optimizer
def test_the_update_of_a_slice_is_the_slice_of_the_update(optimizer):
    """What the streamed step relies on; of some leaves alone, too."""
    directions, state = after_steps(optimizer)
    again, _ = optimizer.build(AXES).update(tree(3), state, tree(0))
    del directions
    tx = optimizer.build({"layers": ONE_LAYER["layers"]})
    layer = jax.tree.map(
        lambda node: {"layers": of_layer(node["layers"], 1)},
        state,
        is_leaf=lambda node: isinstance(node, dict) and "layers" in node,
    )
    grads, params = ({"layers": of_layer(tree(seed)["layers"], 1)} for seed in (3, 0))
    got, _ = tx.update(grads, layer, params)
    models.assert_close(got["layers"], of_layer(again["layers"], 1))


@every_optimizer
def test_axes_are_those_of_the_state(optimizer):
    _, state = after_steps(optimizer)
    axes = optimizer.state_axes(AXES, tree(0))
    sizes = {"layers": 3, "embed": 4, "mlp": 6}
    jax.tree.map(lambda x, names: [sizes[n] for n in names] == list(x.shape) or 1 / 0, state, axes)
    assert jax.tree.structure(state) == jax.tree.structure(
        axes, is_leaf=lambda node: type(node) is tuple
    )


def delinked(optimizer, policy):
    state = train_state.TrainState(
        step=jnp.int32(2),
        params=tree(0, 1),
        opt_state=after_steps(optimizer, 1)[1],
        rng=jnp.zeros(2, jnp.uint32),
        extra=train_state.Extra(),
    )
    return state.opt_state, delink(state, SHARED, REAL, policy).opt_state


def test_copy_and_reset_with_counts_of_their_own():
    before, after = delinked(ADAM, Policy.COPY)
    models.assert_equal(after, layouts.expand(before, SHARED, REAL))
    _, after = delinked(ADAM, Policy.RESET)
    assert after.names == ("0/count", "0/mu", "0/nu")
    count, _, nu = after.trees
    assert count["head"] == 2
    np.testing.assert_array_equal(count["layers"]["w"], [0, 0, 0])
    assert not nu["layers"]["w"].any()
    # So the next step is a first step, and does not overshoot.
    got, _ = ADAM.build(AXES).update(tree(3), after, tree(0))
    np.testing.assert_allclose(np.abs(got["layers"]["w"]), 1.0, rtol=1e-4)


def test_streamed_and_ordinary_steps_are_alike():
    config = models.tiny(num_layers=2, pattern=(LayerKind.DENSE,), moe=None)
    model, layout = Transformer(config), models.stacked(config)
    axes = train_state.logical_axes(models.describe(config, layout))
    settings = {
        "layout": layout,
        "learning_rate": lambda step: 1e-2,
        "update": Update(clip_norm=None),
    }
    state = train_state.create(models.draw(config, layout), ADAM.build(axes), 0, averaged=False)
    ordinary = functools.partial(
        train_step, loss_fn=model_loss(model, layout, Loss()), tx=ADAM.build(axes), **settings
    )
    streamed = functools.partial(
        streamed_step, model=model, loss=Loss(), optimizer=ADAM, **settings
    )
    batch = models.make_batch()
    expected, got = (models.jit(step)(state, batch)[0] for step in (ordinary, streamed))
    models.assert_close(got.opt_state, expected.opt_state, 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "lio"}, r"optax.lio is no optimizer with a learning_rate \(did you mean 'lion'"),
        ({"name": "scale_by_adam"}, "optax.scale_by_adam is no optimizer with a learning_rate"),
        ({"name": "lion", "settings": {"beta1": 0.9}}, "'beta1' is none of lion's .*b1"),
        ({"name": "lion", "settings": {"weight_decay": 0.1}}, r"\(set Optax.weight_decay\)"),
        ({"name": "sgd", "settings": {"learning_rate": 0.1}}, "'learning_rate' is none of sgd's"),
        ({"name": "adam", "settings": {"mu_dtype": "float33"}}, "Optax.settings: adam.*float33"),
        ({"name": "adafactor"}, r"adafactor keeps 0/v_row of shape \(256,\) for a parameter"),
        ({"name": "lion", "weight_decay": -1.0}, "Optax.weight_decay: -1.0; 0 or more"),
        ({"name": "rprop"}, "Optax.name: rprop takes the learning rate when it begins and never"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Optax(**settings)


@pytest.mark.parametrize("policy", [Policy.RESCALE, Policy.MEASURED])
def test_policies_that_must_know_the_state(policy):
    nowhere = pathlib.Path("/nowhere")
    stages = (
        Stage(name="a", unit=1, until=AtStep(step=4)),
        Stage(name="b", optimizer_state=policy, allow_other_scale=True),
    )
    with pytest.raises(ConfigError, match=f"{policy.name} in stage 'b' needs to know .* of Optax"):
        runs.experiment(nowhere, nowhere, stages=stages, optimizer=LION)
    runs.experiment(nowhere, nowhere, optimizer=LION)
    with pytest.raises(LayoutError, match=r"trees/0/layers/norm: how it grows .* of OptaxState"):
        delinked(LION, Policy.RESCALE)
    with pytest.raises(ConfigError, match="lion does not say what it keeps of squared gradients"):
        LION.with_second_moments(None, None, None)
