"""A forward pass that is looked at finds the layer and the part that is not finite."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax import layouts
from m6jax.layouts import Form
from m6jax.modeling.transformer import Transformer
from m6jax.training import losses
from m6jax.training.inspection import first_bad, look
from m6jax.training.losses import Loss
from m6jax.training.train_step import model_loss

BATCH = models.make_batch()
CONFIG = models.tiny(num_layers=4, dropout=0.1)
KEY = jax.random.key(5)


@functools.cache
def looked_at(form):
    model, layout = Transformer(CONFIG), CONFIG.layout(4, form)
    weight = losses.batch_weight(BATCH)
    seen = models.jit(lambda params: look(model, layout, Loss(), params, BATCH, weight, KEY))
    loss = models.jit(
        lambda params: model_loss(model, layout, Loss())(params, BATCH, weight, KEY)[0]
    )
    return (lambda params: jax.tree.map(np.asarray, seen(params))), loss


def changed(form, name, factor, layer=2):
    """Parameters of which one leaf of one layer (or outside of the layers) is `factor` as large."""
    unrolled = layouts.unstack(models.draw(CONFIG, CONFIG.layout(4, Form.STACKED)))
    *parents, last = name.split("/")
    node = unrolled if layer is None else unrolled[f"layers_{layer}"]
    for parent in parents:
        node = node[parent]
    node[last] = node[last] * np.float32(factor)
    return unrolled if form is Form.UNROLLED else layouts.stack(unrolled)


@pytest.mark.parametrize("form", list(Form))
def test_the_loss_is_that_of_the_training_step(form):
    params = changed(form, "moe/up", 1.0)
    seen, loss = looked_at(form)
    assert float(seen(params).loss) == pytest.approx(float(loss(params)), rel=1e-6)
    assert first_bad(seen(params)) is None


@pytest.mark.parametrize(
    ("name", "part"),
    [("attention/output", "attention"), ("moe/up", "moe"), ("moe/router/kernel", "moe/router")],
)
def test_the_layer_and_the_part_are_named(name, part):
    seen, _ = looked_at(Form.STACKED)
    found = first_bad(seen(changed(Form.STACKED, name, 1e38)))
    assert found.startswith(f"layer 2, {part}: not finite, of an input of at most ")
    assert f"; largest weight: {name}, " in found


def test_what_is_outside_of_the_layers_is_named():
    seen, _ = looked_at(Form.STACKED)
    bad = changed(Form.STACKED, "embedder/table", 3e38, layer=None)
    assert first_bad(seen(bad)) == "the stack's input: not finite, made of embedder and patches"
    fine = seen(changed(Form.STACKED, "moe/up", 1.0))
    lost = fine.replace(loss=jnp.float32(jnp.nan))
    assert first_bad(lost) == "the loss: nan, of a finite output of the last layer"
