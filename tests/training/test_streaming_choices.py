"""What the streamed step recomputes keeps the experts that the forward pass chose."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.modeling import routers
from m6jax.modeling.config import Remat
from m6jax.modeling.transformer import Transformer
from m6jax.training.streaming.microbatches import Parts
from m6jax.training.streaming.stacked import Stacked
from m6jax.training.streaming.unrolled import Unrolled

LAYOUT = models.stacked(models.tiny(num_layers=1))
MASK = jnp.ones((1, 2), bool)


def rounded_otherwise():
    """A layer of two experts that takes the other expert when it is computed again."""
    passes = []

    def block(layer, x, use, context):
        del use, context
        passes.append(None)
        sign = 1 if len(passes) == 1 else -1
        scores = jax.nn.sigmoid(sign * (x @ layer["router"]))[:, :, None]  # [B, T, P, F]
        _, chosen = routers.choose(scores, MASK, 1, True)
        return x + jnp.einsum("btpf,f->bt", chosen, layer["experts"])[..., None], None

    return block, passes


@pytest.mark.parametrize("passes_of", [Stacked, Unrolled])
@pytest.mark.parametrize("remat", Remat)
def test_a_layer_that_is_rounded_otherwise_keeps_its_experts(passes_of, remat):
    """Token 0 chose expert 0, token 1 expert 1 with a gradient of 10 by its output."""
    block, passes = rounded_otherwise()
    parts = Parts(Transformer(models.tiny()), models.make_batch(), 1, None)
    layers = passes_of(block, parts, remat, LAYOUT, True, inputs_on_host=False, always=True)
    layer = {"router": jnp.eye(2), "experts": jnp.array([1.0, 2.0])}
    x = jnp.array([[[3.0, 0.0], [0.0, 3.0]]])
    y, report, choices = layers.apply(layer, x, 0)
    np.testing.assert_array_equal(y, x + jnp.array([[[1.0], [2.0]]]))
    y_grad = jnp.array([[[1.0, 0.0], [10.0, 0.0]]])
    grads, _ = layers.gradients(layer, layers.wait(x, choices), y_grad, report, 0)
    assert len(passes) == 2
    np.testing.assert_array_equal(grads["experts"], [1.0, 10.0])


@pytest.mark.parametrize("router", [routers.TopK(), routers.ExpertChoice()])
def test_every_sparse_layer_of_a_block_has_its_choices_recorded(router):
    config = models.tiny(
        num_layers=3,
        pattern=("DENSE", "SPARSE", "SPARSE"),
        moe=models.experts(router=router, load_balance_loss=0.0),
        causal=False,
    )
    model, layout = Transformer(config), config.layout(3, models.Form.STACKED)
    params, batch = models.draw(config, layout), models.make_batch()

    def run(params, batch):
        layers = Stacked(
            lambda layer, x, use, context: model.block(layer["layers"], x, context, use),
            Parts(model, batch, 1, None),
            Remat.FULL,
            layout,
            mean=True,
            inputs_on_host=False,
            always=True,
        )
        rest = {key: value for key, value in params.items() if key != "layers"}
        return layers.forward({"layers": params["layers"]}, model.embed(rest, batch)).inputs

    ((_, choices),) = jax.eval_shape(run, params, batch)
    assert [leaf.shape[:3] for leaf in choices] == [(1, 8, 8), (1, 8, 8)]
