"""B19 for routers that look at more than the layer's input: token ids, biases."""

import functools

import models
import numpy as np
import pytest

from m6jax.decoding import decode_step, decoding_model, prefill
from m6jax.foundation.validated import ConfigError
from m6jax.modeling import balancing
from m6jax.modeling.routers import TokenHash, TopK
from m6jax.modeling.transformer import Transformer

ROUTERS = {
    "hash": {"router": TokenHash(), "load_balance_loss": 0.0, "router_z_loss": 0.0},
    "biased": {"router": TopK(scores="SIGMOID", bias_rate=0.1), "num_shared_experts": 1},
}


@pytest.mark.parametrize("settings", ROUTERS.values(), ids=ROUTERS)
def test_decoding_equals_training(settings):
    config = models.tiny(moe=models.experts(capacity_factor=None, **settings))
    layout, model = models.stacked(config, 1), Transformer(config)
    params = balancing.join(models.draw(config, layout), models.draw_biases(config, layout))
    tokens = np.random.default_rng(0).integers(1, 32, (3, 7)).astype(np.int32)
    expected = models.logits_fn(config, layout)(params, models.whole_rows(tokens))

    prompt = models.whole_rows(tokens[:, :4])
    state = models.jit(functools.partial(prefill, model, layout=layout, num_slots=8))(
        params, batch=prompt
    )
    models.assert_close(state.logits, expected[:, 3], 1e-5)
    step = models.jit(lambda *arguments: decode_step(model, params, layout, *arguments))
    for t in range(4, 7):
        state = step(state, tokens[:, t], np.ones(3, bool))
        models.assert_close(state.logits, expected[:, t], 1e-5)


def test_a_model_that_is_not_causal_is_refused():
    with pytest.raises(ConfigError, match=r"ModelConfig.causal: a model with causal = False"):
        decoding_model(Transformer(models.tiny(causal=False)))
