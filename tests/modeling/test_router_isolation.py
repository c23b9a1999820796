"""What the experts of a token must not depend on: later tokens, and rounding going back."""

import collections

import jax
import models
import numpy as np
import pytest

from m6jax.modeling import balancing, moe
from m6jax.modeling.routers import ExpertChoice, TokenHash, TopK
from m6jax.modeling.transformer import Transformer

BIASED = TopK(scores="SIGMOID", bias_rate=0.01)
NO_LOSSES = {"load_balance_loss": 0.0, "router_z_loss": 0.0}
CAUSAL = {
    "sigmoid": models.experts(router=TopK(scores="SIGMOID"), normalize_weights=True),
    "biased": models.experts(router=BIASED, balance_over="SEQUENCE"),
    "hash": models.experts(router=TokenHash(), **NO_LOSSES),
    "hash dropless": models.experts(router=TokenHash(), capacity_factor=None, **NO_LOSSES),
    "shared": models.experts(num_shared_experts=1),
}


class TestCausality:
    """B14 for the routers that `test_isolation` does not have."""

    PREFIXES = (1, 3, 7, 15, 31, 32, 63)

    def logits(self, config):
        rng = np.random.default_rng(0)
        tokens = np.tile(rng.integers(0, 32, 64), (8, 1))
        for row, prefix in enumerate(self.PREFIXES, start=1):
            tokens[row, prefix:] = (tokens[row, prefix:] + rng.integers(1, 32, 64 - prefix)) % 32
        layout, batch = models.stacked(config), models.whole_rows(tokens)
        params = models.draw(config, layout)
        joined = balancing.join(params, models.draw_biases(config, layout))
        return np.asarray(models.logits_fn(config, layout)(joined, batch))

    @pytest.mark.parametrize("experts", CAUSAL.values(), ids=CAUSAL)
    def test_logits_of_a_prefix_do_not_depend_on_the_suffix(self, experts):
        logits = self.logits(models.tiny(moe=experts))
        for row, prefix in enumerate(self.PREFIXES, start=1):
            models.assert_close(logits[row, :prefix], logits[0, :prefix])
            assert (logits[row, prefix] != logits[0, prefix]).any()

    def test_without_causality_everything_depends_on_the_suffix(self):
        moe = models.experts(router=ExpertChoice(), load_balance_loss=0.0)
        logits = self.logits(models.tiny(moe=moe, causal=False))
        for row in range(1, 8):
            assert (logits[row, 0] != logits[0, 0]).any()


@pytest.mark.parametrize("router", [BIASED, ExpertChoice()], ids=["by tokens", "by experts"])
def test_recomputation_chooses_the_same_experts(router, monkeypatch):
    """Bfloat16, all of a layer recomputed: scores are rounded otherwise, choices are kept."""
    experts = models.experts(
        num_experts=64, num_selected_experts=4, router=router, load_balance_loss=0.0
    )
    config = models.tiny(dtype="bfloat16", remat="FULL", moe=experts, causal=router.causal)
    layout, model, seen = models.unrolled(config), Transformer(config), []
    assign_slots = moe.assign_slots

    def record(index, *rest):
        jax.debug.callback(lambda a: seen.append(np.asarray(a).tobytes()), index)
        return assign_slots(index, *rest)

    monkeypatch.setattr(moe, "assign_slots", record)
    batch = models.whole_rows(np.random.default_rng(0).integers(0, 32, (16, 64)))
    biases = models.draw_biases(config, layout)

    @models.jit
    def gradients(params):
        return jax.grad(
            lambda p: (model.apply(balancing.join(p, biases), batch, layout).logits ** 2).mean()
        )(params)

    jax.block_until_ready(gradients(models.draw(config, layout)))
    jax.effects_barrier()
    # Two layers, each with the same experts going forward and again going back.
    assert collections.Counter(collections.Counter(seen).values()) == {2: 2}
