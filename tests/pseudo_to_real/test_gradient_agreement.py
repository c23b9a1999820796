"""Agreement of the gradients of shared layers, against expanded layers and numpy.corrcoef."""

import functools

import jax
import models
import numpy as np
import pytest

from m6jax import layouts
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.layouts import Form, Layout, LayoutError, Part, offload
from m6jax.modeling import balancing
from m6jax.modeling.config import LayerKind
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.pseudo_to_real.gradient_agreement import gradient_agreement
from m6jax.training import losses
from m6jax.training.losses import Loss
from m6jax.training.train_step import model_loss

DEPTH = 4
CONFIG = models.tiny(num_layers=DEPTH, moe=models.experts(router=TopK(bias_rate=0.1)), dropout=0.5)
LOSS = Loss(z_loss=1e-3)
BATCH = models.make_batch()
REAL = models.stacked(CONFIG)
LAYOUTS = {
    "one": Layout(depth=DEPTH, unit=1),
    "two": Layout(depth=DEPTH, unit=2),
    "parts": Layout(
        depth=DEPTH, unit=1, parts=(Part(pattern="norm"), Part(pattern="attention", unit=2))
    ),
}


@functools.cache
def drawn(name):
    layout = LAYOUTS[name]
    return models.draw(CONFIG, layout), models.draw_biases(CONFIG, layout)


@functools.cache
def compared(name):
    layout = LAYOUTS[name]
    compare = functools.partial(
        gradient_agreement, model=Transformer(CONFIG), layout=layout, loss=LOSS
    )
    params, biases = drawn(name)
    return jax.device_get(models.jit(compare)(params, BATCH, biases))


@functools.cache
def gradients_of_layers():
    """Jits the gradient of a model of which every layer has its own weights."""
    loss_fn = model_loss(Transformer(CONFIG), REAL, LOSS)

    def loss(params, biases):
        joined = balancing.join(params, biases)
        return loss_fn(joined, BATCH, losses.batch_weight(BATCH), None)[0]

    return models.jit(jax.grad(loss))


def expected(name):
    """Of every leaf the expanded gradients, float64[L, n], and its unit."""
    layout = LAYOUTS[name]
    params, biases = (layouts.expand(tree, layout, REAL) for tree in drawn(name))
    grads = gradients_of_layers()(params, biases)
    return {
        leaf: (np.asarray(g, np.float64).reshape(DEPTH, -1), layout.unit_of(leaf))
        for leaf, g in flatten_named(grads[layouts.STACK])
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_correlations_are_those_of_expanded_gradients(name):
    got, grads = compared(name), expected(name)
    shared = {leaf for leaf, (_, unit) in grads.items() if unit < DEPTH}
    assert got.by_leaf.keys() == shared
    for leaf in shared:
        g, unit = grads[leaf]
        pairs = [np.corrcoef(g[i], g[i + unit])[0, 1] for i in range(DEPTH - unit)]
        # A key's bias and the like have a gradient of rounding alone.
        if np.linalg.norm(g) > 1e-6:
            np.testing.assert_allclose(got.by_leaf[leaf], pairs, atol=2e-4, err_msg=leaf)
    smallest = min(grads[leaf][1] for leaf in shared)
    together = []
    for i in range(DEPTH - smallest):
        pair = [
            (g[i], g[i + unit]) for g, unit in (grads[leaf] for leaf in shared) if i + unit < DEPTH
        ]
        left, right = (np.concatenate(side) for side in zip(*pair, strict=True))
        together.append(np.corrcoef(left, right)[0, 1])
    np.testing.assert_allclose(got.by_layer, together, atol=2e-5)
    assert len(set(np.round(together, 3))) == len(together)


def test_metrics_are_means_and_values():
    metrics = compared("parts").metrics()
    got = compared("parts")
    np.testing.assert_allclose(metrics["gradient_agreement"], got.by_layer.mean())
    np.testing.assert_array_equal(metrics["gradient_agreement_by_layer"], got.by_layer)
    assert got.by_layer.shape == (3,)
    assert got.by_leaf["moe/up"].shape == (3,)
    assert got.by_leaf["attention/query"].shape == (2,)
    assert "gradient_agreement/attention/query" in metrics
    assert not any("norm" in key for key in metrics)


def test_on_a_mesh_and_from_the_host_it_is_the_same():
    """Weights come to the device layer by layer."""
    where = Partitioning(data=2, expert=2, model=2)
    mesh = where.make_mesh()
    layout = LAYOUTS["two"]
    params, biases = drawn("two")
    shardings = where.weight_shardings(models.describe(CONFIG, layout), mesh)
    on_host = {
        key: jax.tree.map(lambda s: s.with_memory_kind(offload.HOST), part)
        if key == layouts.STACK
        else part
        for key, part in shardings.items()
    }
    compare = functools.partial(
        gradient_agreement, model=Transformer(CONFIG), layout=layout, loss=LOSS
    )
    with where.activate(mesh):
        got = models.jit(compare)(jax.device_put(params, on_host), BATCH, biases)
    np.testing.assert_allclose(got.by_layer, compared("two").by_layer, atol=1e-4)


def test_gradients_of_zero_do_not_agree():
    batch = BATCH | {"loss_weights": np.zeros((8, 8), np.float32)}
    config = models.tiny(num_layers=DEPTH, pattern=(LayerKind.DENSE,), moe=None)
    compare = functools.partial(
        gradient_agreement, model=Transformer(config), layout=LAYOUTS["one"], loss=Loss()
    )
    got = models.jit(compare)(models.draw(config, LAYOUTS["one"]), batch)
    np.testing.assert_array_equal(got.by_layer, np.zeros(3))


@pytest.mark.parametrize("layout", [REAL, Layout(depth=DEPTH, unit=DEPTH, form=Form.UNROLLED)])
def test_layers_of_their_own_have_nothing_to_agree_on(layout):
    with pytest.raises(LayoutError, match="each of the 4 layers has its own weights"):
        gradient_agreement({}, BATCH, model=Transformer(CONFIG), layout=layout, loss=LOSS)


def test_memory_is_that_of_a_few_layers():
    """A gradient, that of the next use, and one layer's weights; not sixteen gradients."""
    config = models.tiny(num_layers=16, pattern=(LayerKind.DENSE,), moe=None, mlp_dim=8192)
    layout = Layout(depth=16, unit=1)
    params = models.draw(config, layout)
    compare = functools.partial(
        gradient_agreement, model=Transformer(config), layout=layout, loss=Loss()
    )
    batch = models.make_batch(rows=1)
    compiled = models.jit(compare).lower(params, batch).compile()
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"]))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert 2 * layer < temporary < 4 * layer
