"""B6: one global batch gives the same numbers on every mesh."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import struct

from m6jax.foundation.partitioning import Partitioning
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW, Optimizer
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import Update, model_loss, train_step

BATCH = models.make_batch()
MOE = {
    "capacity": models.experts(group_size=4),
    "dropless": models.experts(capacity_factor=None),
}


@struct.dataclass
class Either:
    """States of both optimizers, which of them is used, and the last gradients."""

    use_adamw: jax.Array
    grads: object
    adamw: object
    adafactor: object


class EitherOptimizer(Optimizer):
    """AdamW or Adafactor in one program, so that a mesh compiles one step only."""

    ADAMW, ADAFACTOR = AdamW(), Adafactor(min_dim_size_to_factor=4)

    def build(self, axes):
        adamw, adafactor = self.ADAMW.build(axes), self.ADAFACTOR.build(axes)

        def init(params):
            zeros = jax.tree.map(jnp.zeros_like, params)
            return Either(jnp.bool_(True), zeros, adamw.init(params), adafactor.init(params))

        def update(grads, state, params):
            first, adamw_state = adamw.update(grads, state.adamw, params)
            second, adafactor_state = adafactor.update(grads, state.adafactor, params)
            directions = jax.tree.map(lambda a, b: jnp.where(state.use_adamw, a, b), first, second)
            return directions, Either(state.use_adamw, grads, adamw_state, adafactor_state)

        return optax.GradientTransformation(init, update)

    def state_axes(self, axes, params):
        return Either(
            (), axes, self.ADAMW.state_axes(axes, params), self.ADAFACTOR.state_axes(axes, params)
        )

    def with_second_moments(self, state, squares, axes):
        raise NotImplementedError


@functools.cache
def start(moe):
    """A model, how it lies, and its transformation and state before the first step."""
    config = models.tiny(moe=moe)
    layout = models.stacked(config)
    axes = train_state.logical_axes(models.describe(config, layout))
    tx = EitherOptimizer().build(axes)
    create = models.jit(lambda params: train_state.create(params, tx, seed=0, averaged=False))
    return Transformer(config), layout, tx, jax.device_get(create(models.draw(config, layout)))


@functools.cache
def three_steps(where, moe, devices=8, microbatches=1):
    """Runs three steps with each optimizer; returns what the mesh must not change."""
    model, layout, tx, state = start(moe)
    step = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: (
            1e-3 * (1 + step)
        ),  # Adam turns rounding of tiny gradients to steps
        update=Update(clip_norm=0.5, microbatches=microbatches),
    )

    def both(run, state, batch):
        run, results = run.lower(state, batch).compile(), {}
        for name in ("adamw", "adafactor"):
            use_adamw = np.bool_(name == "adamw")
            now = state.replace(opt_state=state.opt_state.replace(use_adamw=use_adamw))
            metrics, grads = [], []
            for _ in range(3):
                now, measured = run(now, batch)
                metrics.append(measured)
                grads.append(now.opt_state.grads)
            results[name] = {"params": now.params, "metrics": metrics, "grads": grads[0]}
        return jax.device_get(results)

    if where is None:
        return both(models.jit(step), state, BATCH)
    mesh = where.make_mesh(jax.devices()[:devices])
    abstract = train_state.abstract_state(
        model, layout, EitherOptimizer(), where, mesh, averaged=False
    )
    shardings = train_state.shardings_of(abstract)
    with where.activate(mesh):
        run = models.jit(step, out_shardings=(shardings, None))
        return both(
            run,
            jax.device_put(state, shardings),
            jax.device_put(BATCH, where.batch_sharding(mesh)),
        )


class TestMeshes:
    """B6: the mesh changes nothing but where numbers lie."""

    def check(self, where, moe, devices=8):
        models.assert_close(three_steps(where, moe, devices), three_steps(None, moe), 1e-5)

    @pytest.mark.parametrize("moe", MOE.values(), ids=MOE)
    @pytest.mark.parametrize(
        "shape",
        [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8)],
        ids=lambda shape: "x".join(map(str, shape)),
    )
    @pytest.mark.long(
        "4x2x1-capacity", "1x8x1-capacity", "2x4x1-dropless", "8x1x1-capacity", "1x1x8-dropless"
    )
    def test_eight_devices_equal_one(self, shape, moe):
        data, expert, model = shape
        self.check(Partitioning(data=data, expert=expert, model=model), moe)

    def test_a_mesh_of_one_device_equals_none(self):
        self.check(Partitioning(data=1), MOE["capacity"], devices=1)

    def test_fully_sharded_equals_one(self):
        where = Partitioning(data=2, expert=2, model=2, fully_sharded=True)
        self.check(where, MOE["capacity"])

    @pytest.mark.parametrize("moe", MOE.values(), ids=MOE)
    def test_one_device_is_what_it_should_be(self, moe):
        """The comparison would hold for zeros too."""
        results = three_steps(None, moe)
        first = results["adamw"]["metrics"][0]
        assert (first["fraction_dropped"] > 0) == (moe.capacity_factor is not None)
        assert first["load_balance_loss"] > 1
        assert all(np.asarray(g).any() for g in jax.tree.leaves(results["adamw"]["grads"]))
        start = models.draw(models.tiny(moe=moe), models.stacked(models.tiny()))
        for name in ("adamw", "adafactor"):
            for leaf, before in zip(
                jax.tree.leaves(results[name]["params"]), jax.tree.leaves(start), strict=True
            ):
                assert np.abs(leaf - before).max() > 5e-4
        rates = [float(m["learning_rate"]) for m in results["adamw"]["metrics"]]
        np.testing.assert_allclose(rates, [0.001, 0.002, 0.003], rtol=1e-6)

    def test_microbatches_on_a_mesh_equal_microbatches_on_one_device(self):
        where = Partitioning(data=2, expert=2, model=2)
        on_mesh = three_steps(where, MOE["capacity"], microbatches=2)
        models.assert_close(on_mesh, three_steps(None, MOE["capacity"], microbatches=2), 1e-5)
