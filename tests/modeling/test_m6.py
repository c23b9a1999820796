"""The flax module against the functions of explicit trees, and what users of flax expect of it."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import linen as nn

from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.layouts import Form, Layout, Part, offload
from m6jax.layouts.layout import LayoutError
from m6jax.modeling import M6, balancing
from m6jax.modeling.block import Block
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer

PARTS = (Part(pattern="norm"), Part(pattern="attention", unit=2))
BIASED = models.experts(router=TopK(scores="SIGMOID", bias_rate=0.01))
JITTERED = models.experts(router_jitter=0.1)
PATCHED = {"norm": "LAYER", "sandwich_norm": True, "positions": "LEARNED", "patch_dim": 3}
CASES = {
    "one shared layer": ({}, Layout(depth=4, unit=1)),
    "units of two": ({"remat": "FULL", "dropout": 0.1}, Layout(depth=4, unit=2)),
    "distinct": ({"moe": JITTERED, "remat": "ALL_BUT_PRODUCTS"}, Layout(depth=4, unit=4)),
    "unrolled": (
        {"remat": "FULL", "moe": BIASED, "dropout": 0.1},
        Layout(depth=2, unit=2, form=Form.UNROLLED),
    ),
    "parts": ({"moe": BIASED}, Layout(depth=4, unit=1, parts=PARTS)),
    "pattern": (
        {"pattern": ("DENSE", "SPARSE"), "tied_output": False, **PATCHED},
        Layout(depth=2, unit=1),
    ),
}


def model_of(name):
    changes, layout = CASES[name]
    layers = layout.depth * len(changes.get("pattern", (0,)))
    return M6(models.tiny(num_layers=layers, **changes), layout)


def batch_of(model, rows=2):
    batch = models.make_batch(rows=rows, prefix=2)
    if model.config.patch_dim is not None:
        patches = np.random.default_rng(0).normal(size=(rows, 2, 3)).astype(np.float32)
        mask = np.zeros_like(batch["tokens"])
        mask[:, :2] = 1
        batch |= {"patches": patches, "patch_mask": mask}
    return batch


def variables_of(model):
    params = models.draw(model.config, model.layout)
    return balancing.variables(
        balancing.join(params, models.draw_biases(model.config, model.layout))
    )


def loss_and_gradients(apply):
    def loss(params, *args):
        output = apply(params, *args)
        router = output.router
        extra = router.load_balance_loss.sum() + router.router_z_loss.sum()
        return (output.logits**2).mean() + extra, output

    return models.jit(jax.value_and_grad(loss, has_aux=True))


def both(model, batch):
    """Loss, output and gradients of the explicit path and of the module."""
    variables, key = variables_of(model), jax.random.key(3)
    params, biases = variables["params"], variables.get(balancing.COLLECTION)
    explicit = loss_and_gradients(
        lambda params, batch: Transformer(model.config).apply(
            balancing.join(params, biases), batch, model.layout, key
        )
    )
    module = loss_and_gradients(
        lambda params, batch: model.apply(
            variables | {"params": params}, batch, rngs={"dropout": key}
        )
    )
    return explicit(params, batch), module(params, batch)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_transformer(name):
    model = model_of(name)
    ((total, output), grads), ((got_total, got), got_grads) = both(model, batch_of(model))
    models.assert_close(got_total, total)
    models.assert_close(got, output, 2e-6)
    models.assert_close(got_grads, grads, 5e-6)


def test_it_is_the_transformer_on_eight_devices():
    model, where = model_of("units of two"), Partitioning(data=2, expert=2, model=2)
    mesh = where.make_mesh()
    with where.activate(mesh):
        batch = jax.device_put(batch_of(model, rows=8), where.batch_sharding(mesh))
        ((total, output), grads), ((got_total, got), got_grads) = both(model, batch)
    models.assert_close((got_total, got.logits), (total, output.logits), 2e-6)
    models.assert_close(got_grads, grads, 5e-6)


@pytest.mark.parametrize("name", CASES)
def test_init_gives_the_tree_of_the_training_state(name):
    """The same names and shapes; from a batch without patches too."""
    model = model_of(name)
    batch = models.make_batch(rows=1)
    got = jax.eval_shape(model.init, jax.random.key(0), batch)
    transformer = Transformer(model.config)
    expected = jax.eval_shape(lambda key: transformer.init(key, model.layout), jax.random.key(0))
    assert not models.differences(got["params"], expected)
    biases = got.get(balancing.COLLECTION)
    assert (biases is not None) == (transformer.router_bias(model.layout) is not None)


def test_init_draws_by_path_and_layer():
    model = model_of("one shared layer")
    got = model.init({"params": jax.random.key(1)}, models.make_batch(rows=1))["params"]
    models.assert_equal(got, Transformer(model.config).init(jax.random.key(1), model.layout))


def test_the_table_shows_every_parameter_once():
    model = model_of("one shared layer")
    batch, wide = models.make_batch(rows=1), {"width": 200}
    table = model.tabulate(jax.random.key(0), batch, console_kwargs=wide)
    size = sum(
        np.prod(p.value.shape) for p in jax.tree.leaves(model.parameters(), is_leaf=is_parameter)
    )
    assert f"Total Parameters: {size:,}" in table
    assert table.count("layers/moe/router") == 1


def test_the_output_before_the_head():
    model = model_of("one shared layer")
    variables, batch = variables_of(model), batch_of(model)
    hidden = model.apply(variables, batch, method="hidden").x
    logits = model.apply(variables, hidden, method="logits")
    models.assert_close(logits, model.apply(variables, batch).logits)
    assert logits.dtype == jnp.float32


def uses_the_module(layout, move=lambda params: params):
    """Whether `apply_layers` traces the flax module."""
    config, seen = models.tiny(num_layers=layout.depth), []

    def note(call, args, kwargs, context):
        seen.append(type(context.module))
        return call(*args, **kwargs)

    def apply(params, batch):
        return apply_layers(Transformer(config), move(params), batch, layout).x

    params = jax.tree.map(lambda p: p.value, models.describe(config, layout), is_leaf=is_parameter)
    with nn.intercept_methods(note):
        jax.eval_shape(apply, params, models.make_batch())
    assert Block in seen
    return M6 in seen


def test_the_ordinary_step_applies_the_module():
    assert uses_the_module(Layout(depth=4, unit=2))
    assert uses_the_module(Layout(depth=2, unit=2, form=Form.UNROLLED))


def test_what_needs_explicit_slices_gets_them():
    assert not uses_the_module(Layout(depth=4, unit=4, borders=(2,)))
    assert not uses_the_module(
        Layout(depth=4, unit=4),
        lambda params: params | {"layers": offload.to_host(params["layers"])},
    )


def test_a_stack_in_runs_is_refused():
    model = M6(models.tiny(num_layers=4), Layout(depth=4, unit=4, borders=(2,)))
    with pytest.raises(LayoutError, match=r"M6\.layout.*\(2,\).*Transformer\.apply"):
        model.init(jax.random.key(0), models.make_batch(rows=1))
