"""Second moments that are measured at the delink, against squares of gradients taken by hand."""

import functools

import jax
import models
import numpy as np
import pytest
import runs

from m6jax import layouts
from m6jax.experiment import Experiment, Stage, stage_switch
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named, map_named
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep
from m6jax.training import losses, train_state
from m6jax.training.train_step import ClipBy, Update, model_loss

pytestmark = pytest.mark.usefixtures("quick_runs")

DEPTH = 4
CONFIG = models.tiny(num_layers=DEPTH, moe=models.experts(capacity_factor=None))
REAL = models.stacked(CONFIG)
BATCHES = [models.make_batch(seed=seed) for seed in (1, 2)]
ADAMW, ADAFACTOR = AdamW(weight_decay=0.1), Adafactor(min_dim_size_to_factor=4, b1=0.9)
STREAMED = OffloadPlan(weights=("",), optimizer_state=True, streamed=True, min_bytes=0)
COUNT = 3
BY_LAYER = Update(clip_norm=0.05, clip_by=ClipBy.LAYER, average_decay=0.9)
SUMS = Update(clip_norm=None, mean_shared_gradient=False)


def experiment(tmp_path, optimizer, old_unit, new: Stage, update) -> Experiment:
    stages = (Stage(name="old", unit=old_unit, until=AtStep(step=1)), new)
    return runs.experiment(
        tmp_path, tmp_path, model=CONFIG, stages=stages, optimizer=optimizer, update=update
    )


def some_state(program):
    """A state as after some steps, in which all numbers differ."""
    rng = np.random.default_rng(0)

    def value(name, leaf):
        if leaf.dtype == np.int32:
            return np.full(leaf.shape, COUNT, np.int32)
        if name.startswith("opt_state"):
            return np.square(rng.normal(size=leaf.shape)).astype(leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype)

    state = map_named(value, program.abstract)
    params = models.draw(CONFIG, program.layout)
    averaged = None if state.extra.averaged is None else params
    state = state.replace(params=params, extra=state.extra.replace(averaged=averaged))
    return jax.device_put(state, train_state.shardings_of(program.abstract))


@functools.cache
def gradients():
    """Jits the gradients of a model of which every layer has its own weights."""
    loss_fn = model_loss(Transformer(CONFIG), REAL, losses.Loss())

    def loss(params, batch):
        return loss_fn(params, batch, losses.batch_weight(batch), None)[0]

    return jax.jit(jax.grad(loss))


def layer_gradients(params, batch, unit, update):
    """Of every leaf of the stack the gradients [U, ...] that training would see, float64."""
    grads = gradients()(params, batch)
    uses = {}
    for name, g in flatten_named(grads[layouts.STACK]):
        by_repeat = np.asarray(g, np.float64).reshape(-1, unit, *g.shape[1:])
        uses[name] = by_repeat.mean(0) if update.mean_shared_gradient else by_repeat.sum(0)
    rest = {
        name: np.asarray(g, np.float64) for name, g in flatten_named(grads) if "layers" not in name
    }
    if update.clip_norm is None:
        return uses
    by_layer = sum((g**2).reshape(unit, -1).sum(1) for g in uses.values())
    if update.clip_by is ClipBy.LAYER:
        norms = np.sqrt(by_layer)
    else:
        whole = DEPTH / unit * by_layer.sum() + sum((g**2).sum() for g in rest.values())
        norms = np.full(unit, np.sqrt(whole))
    shrink = np.minimum(1.0, update.clip_norm / norms)
    return {n: g * shrink.reshape(-1, *[1] * (g.ndim - 1)) for n, g in uses.items()}


CASES = {
    "adamw 1 to 2, sums": (
        ADAMW,
        1,
        Stage(name="new", unit=2, optimizer_state="MEASURED"),
        Update(clip_norm=0.1, mean_shared_gradient=False),
    ),
    "adamw 2 to 4 streamed": (
        ADAMW,
        2,
        Stage(name="new", optimizer_state="MEASURED", offload=STREAMED),
        BY_LAYER,
    ),
    "adafactor 1 to 4 unrolled, sums": (
        ADAFACTOR,
        1,
        Stage(name="new", form=Form.UNROLLED, optimizer_state="MEASURED"),
        SUMS,
    ),
    "adafactor 1 to 2 streamed, sums": (
        ADAFACTOR,
        1,
        Stage(
            name="new",
            unit=2,
            optimizer_state="MEASURED",
            offload=STREAMED,
            partitioning=Partitioning(data=2, expert=4),
        ),
        SUMS,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long("adafactor 1 to 2 streamed, sums")
def test_second_moments_are_mean_squares_of_layers_gradients(tmp_path, case):
    optimizer, old_unit, stage, update = CASES[case]
    run = experiment(tmp_path, optimizer, old_unit, stage, update)
    old, new = StageProgram(run, 0, 0), StageProgram(run, 1, 1)
    before = jax.device_get(some_state(old))
    got = stage_switch.delink(run, new, some_state(old), old.layout, Policy.MEASURED, iter(BATCHES))
    for leaf, described in zip(jax.tree.leaves(got), jax.tree.leaves(new.abstract), strict=True):
        assert leaf.sharding == described.sharding
    got = jax.device_get(got)
    if new.layout.form is Form.UNROLLED:
        got = layouts.stack(got)
    unit = stage.unit or DEPTH
    middle = models.stacked(CONFIG, unit)
    expanded = layouts.expand(before.params, old.layout, REAL)
    squares = [
        {n: g**2 for n, g in layer_gradients(expanded, batch, unit, update).items()}
        for batch in BATCHES
    ]
    copied = layouts.expand(before, old.layout, middle)
    expected = seeded(optimizer, copied, squares, middle)
    if not update.mean_shared_gradient and optimizer is ADAMW:
        share = old_unit / unit
        stack = jax.tree.map(lambda m: m * share, copied.opt_state.mu["layers"])
        expected = expected.replace(mu=expected.mu | {"layers": stack})
    models.assert_close(got.opt_state, expected, 2e-5)
    models.assert_equal(got.replace(opt_state=None), copied.replace(opt_state=None))


def seeded(optimizer, state, squares, layout):
    """The optimizer's state with second moments of the stack from the mean of some squares."""
    axes = train_state.logical_axes(models.describe(CONFIG, layout))

    def mean(name, leaf):
        if "layers/" not in name:
            return np.zeros(leaf.shape, np.float32)
        inside = name.removeprefix("layers/")
        return np.mean([square[inside] for square in squares], 0).astype(np.float32)

    new = optimizer.with_second_moments(state.opt_state, map_named(mean, state.params), axes)
    merge = lambda name, old, new: new if "layers/" in name else old  # noqa: E731
    return map_named(merge, state.opt_state, new)


def test_measuring_needs_batches(tmp_path):
    run = experiment(tmp_path, ADAMW, 2, CASES["adamw 2 to 4 streamed"][2], BY_LAYER)
    program = StageProgram(run, 1, 1)
    with pytest.raises(ValueError, match="MEASURED needs at least one batch"):
        stage_switch.measure(run, program, None, program.layout, [])
