"""float16 with a scaled loss against float32, where without a scale gradients are lost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import runs
from flax.training.dynamic_scale import DynamicScale

from m6jax.converting.source_checkpoint import expected_state
from m6jax.experiment import Stage
from m6jax.foundation.validated import ConfigError
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.training import train_state
from m6jax.training.finite import Skipped
from m6jax.training.losses import Loss
from m6jax.training.train_step import ClipBy, Update, model_loss, next_scale, train_step

BATCH = models.make_batch()
TOKENS = 1e6  # of a batch whose mean loss makes gradients as small as here
DENSE = {"moe": None, "pattern": ("DENSE",)}  # choices of experts would jump


@functools.cache
def step_of(dtype, microbatches=1):
    config = models.tiny(dtype=dtype, **DENSE)
    layout = models.stacked(config)
    loss = model_loss(Transformer(config), layout, Loss())

    def small_loss(*args):
        total, sums = loss(*args)
        return total / TOKENS, dataclasses.replace(sums, total=sums.total / TOKENS)

    tx = AdamW().build(train_state.logical_axes(models.describe(config, layout)))
    step = functools.partial(
        train_step,
        loss_fn=small_loss,
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 0.0,
        update=Update(clip_norm=None, microbatches=microbatches),
    )
    return models.jit(step), train_state.create(models.draw(config, layout), tx, 0, averaged=False)


def gradients(dtype, scale=None, microbatches=1):
    """The gradients of a step, as the first moments remember them, and its metrics."""
    step, state = step_of(dtype, microbatches)
    state = state.replace(extra=state.extra.replace(loss_scale=scale))
    after, metrics = step(state, BATCH)
    return jax.tree.map(lambda mu: np.asarray(mu) * 1e6, after.opt_state.mu), after, metrics


def error(found, exact):
    """The largest error relative to each leaf's largest gradient."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_of_float32(microbatches):
    exact, _, _ = gradients("float32")
    lost, _, _ = gradients("float16", microbatches=microbatches)
    assert error(lost, exact) > 0.1
    scaled, after, metrics = gradients("float16", train_state.new_loss_scale(), microbatches)
    assert error(scaled, exact) < 2e-2
    assert float(metrics["loss_scale"]) == 65536
    assert int(metrics["skipped"]) == Skipped.NOTHING
    assert int(after.extra.loss_scale.fin_steps) == 1


def test_a_scale_that_is_too_large_is_halved_and_the_update_skipped():
    before = DynamicScale(fin_steps=jnp.int32(3), scale=jnp.float32(2.0**60))
    none, after, metrics = gradients("float16", before)
    assert int(metrics["skipped"]) == Skipped.EVERYTHING
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(none))
    assert int(after.extra.loss_scale.fin_steps) == 0
    assert float(after.extra.loss_scale.scale) == 2.0**59


def test_the_scale_grows_after_many_finite_steps():
    before = DynamicScale(fin_steps=jnp.int32(2000), scale=jnp.float32(1024))
    after = next_scale(before, jnp.bool_(True))
    assert (float(after.scale), int(after.fin_steps)) == (2048, 0)
    assert next_scale(None, jnp.bool_(True)) is None


@pytest.mark.parametrize(("dtype", "scaled"), [("float16", True), ("bfloat16", False)])
def test_runs_in_float16_have_a_scale(text, tmp_path, dtype, scaled):
    run = runs.experiment(text, tmp_path, model=models.tiny(vocab_size=320, dtype=dtype))
    state = expected_state(run, run.layout(0))
    assert (state.extra.loss_scale is not None) == scaled


def test_the_streamed_step_refuses_float16(text, tmp_path):
    with pytest.raises(ConfigError, match=r"OffloadPlan.streamed: with ModelConfig.dtype = 'floa"):
        runs.experiment(
            text,
            tmp_path,
            model=models.tiny(vocab_size=320, dtype="float16"),
            stages=(Stage(name="real", offload=OffloadPlan(weights=("moe",), streamed=True)),),
            update=Update(clip_by=ClipBy.LAYER),
        )
