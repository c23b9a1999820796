"""Steps on rows of real pictures with text: streamed, and on a mesh, the numbers are the same."""

import functools

import jax
import models
import numpy as np
import pytest

from m6jax.data.config import BuiltinPictures, Pictures, SentencePiece, TextData
from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Form, offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update, model_loss, train_step

STEPS = 3
HOST = OffloadPlan(weights=("",), optimizer_state=True, activations=True, min_bytes=0)
CONFIG = models.tiny(
    vocab_size=320, patch_dim=48, pattern=("DENSE", "SPARSE"), moe=models.experts(group_size=8)
)
LAYOUT = CONFIG.layout(2, Form.STACKED)


def rate(step):
    return 1e-3 * (1 + step)  # Adam makes steps of the rounding of tiny gradients


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Eight rows each, of up to three pictures of four patches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        data = TextData(
            sources=(BuiltinPictures(name="fashion"),),
            vocabulary=SentencePiece(size=320),
            pictures=Pictures(grid=(2, 2), patch_size=4, per_row=3),
            length=32,
            prefetch=0,
        )
        rows = data.train_rows()
        made = [rows.take(8) for _ in range(STEPS)]
    assert all(batch["patch_mask"].sum(1).max() > 4 for batch in made)
    return made


def run(batches, where, plan=None):
    """Makes all steps; returns the state and the metrics."""
    model, optimizer, update = Transformer(CONFIG), AdamW(weight_decay=0.1), Update(clip_norm=None)
    mesh = where.make_mesh(jax.devices()[: 8 if where.expert > 1 else 1])
    plain = train_state.abstract_state(model, LAYOUT, optimizer, where, mesh, averaged=False)
    tx = optimizer.build(train_state.logical_axes(model.parameters(LAYOUT)))
    common = {"layout": LAYOUT, "learning_rate": rate, "update": update}
    if plan is None:
        loss = model_loss(model, LAYOUT, Loss())
        step, abstract = functools.partial(train_step, loss_fn=loss, tx=tx, **common), plain
    else:
        step = functools.partial(
            streamed_step,
            model=model,
            loss=Loss(),
            optimizer=optimizer,
            inputs_on_host=True,
            **common,
        )
        abstract = plan.place(plain, LAYOUT)
    shardings = train_state.shardings_of(abstract)
    create = models.jit(lambda params: train_state.create(params, tx, 0, False))
    with where.activate(mesh):
        start = jax.device_put(create(models.draw(CONFIG, LAYOUT)), shardings)
        state = jax.tree.map(lambda x: x if offload.on_host(x) else x.copy(), start)
        put = [jax.device_put(batch, where.batch_sharding(mesh)) for batch in batches]
        options = {"donate_argnums": 0, "out_shardings": (shardings, None)}
        compiled, measured = models.jit(step, **options).lower(state, put[0]).compile(), []
        for batch in put:
            state, metrics = jax.block_until_ready(compiled(state, batch))
            measured.append(jax.device_get(metrics))
    return jax.device_get(state), measured


@pytest.fixture(scope="module")
def ordinary(batches):
    return run(batches, Partitioning())


def test_patches_learn(ordinary):
    state, metrics = ordinary
    before = models.draw(CONFIG, LAYOUT)["patches"]["kernel"]
    assert np.abs(state.params["patches"]["kernel"] - before).max() > 1e-4
    assert all(np.isfinite(m["loss"]) for m in metrics)


def test_the_streamed_step(batches, ordinary):
    state, metrics = run(batches, Partitioning(), HOST)
    models.assert_close(metrics, ordinary[1], 2e-5)
    models.assert_close(state.params, ordinary[0].params, 2e-5)


def test_a_mesh_of_eight(batches, ordinary):
    state, metrics = run(batches, Partitioning(data=2, expert=4))
    models.assert_close(metrics, ordinary[1], 1e-5)
    models.assert_close(state.params, ordinary[0].params, 1e-5)
