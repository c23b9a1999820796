"""Parts of the layers with units of their own: the same model as with copies for every layer."""

import functools
import itertools

import jax
import models
import numpy as np
import pytest
import runs

from m6jax import layouts
from m6jax.checkpointing import Checkpoints
from m6jax.decoding import Greedy, decoding_model, generate
from m6jax.experiment import Stage
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.layouts import Form, Layout, Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling import balancing
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.weight_update import leaf_squares
from m6jax.pseudo_to_real.delinking import Policy, delink
from m6jax.pseudo_to_real.triggers import AtStep
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.training import losses, train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import (
    ClipBy,
    Update,
    global_norm,
    model_loss,
    router_balance,
    scale_shared,
    train_step,
)

CONFIG = models.tiny(
    num_layers=4,
    remat="FULL",
    dropout=0.1,
    moe=models.experts(
        num_experts=4, num_selected_experts=1, group_size=4, router=TopK(bias_rate=0.01)
    ),
)
MODEL = Transformer(CONFIG)
EXPERTS = Part(pattern="moe/(up|down)", unit=1)
LAYOUTS = {
    "norms_and_routers": CONFIG.layout(1, Form.STACKED, (Part(pattern="norm|router"),)),
    "three_units": CONFIG.layout(2, Form.STACKED, (Part(pattern="norm|query"), EXPERTS)),
}
APART = models.unrolled(CONFIG)
# Experts before attention: each grows into the next.
GROWING = (
    CONFIG.layout(1, Form.STACKED),
    CONFIG.layout(1, Form.STACKED, (Part(pattern="moe"),)),
    CONFIG.layout(2, Form.STACKED, (Part(pattern="moe"),)),
    CONFIG.layout(4, Form.STACKED),
    APART,
)
MESH, ONE = Partitioning(data=2, expert=4), Partitioning()
STREAMED = OffloadPlan(weights=("",), optimizer_state=True, streamed=True, min_bytes=0)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@functools.cache
def five_steps(plan):
    """State and metrics after five ordinary steps; norms of every layer beside two of the rest."""
    layout, optimizer = CONFIG.layout(2, Form.STACKED, (Part(pattern="norm|moe"),)), AdamW()
    mesh = ONE.make_mesh(jax.devices()[:1])
    plain = train_state.abstract_state(MODEL, layout, optimizer, ONE, mesh, averaged=False)
    shardings = train_state.shardings_of(plan.place(plain, layout))
    tx = optimizer.build(train_state.logical_axes(MODEL.parameters(layout)))
    params, biases = draw(layout)
    state = models.jit(lambda p, b: train_state.create(p, tx, 0, False, b))(params, biases)
    state = jax.device_put(jax.device_get(state), shardings)
    step = functools.partial(
        train_step,
        loss_fn=model_loss(MODEL, layout, Loss()),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2,
        update=Update(),
        balance=router_balance(MODEL, layout),
    )
    run = models.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    for _ in range(5):
        state, metrics = jax.block_until_ready(run(state, models.make_batch()))
    up = state.params["layers"]["moe"]["up"]
    assert (up.sharding.memory_kind == "pinned_host") == bool(plan.weights)
    return jax.device_get((state, metrics))


def test_larger_units_on_the_host():
    """To rounding: the scans are others."""
    plan = OffloadPlan(weights=("moe",), min_bytes=0)
    models.assert_close(five_steps(plan), five_steps(OffloadPlan()), 1e-4)


def draw(layout):
    """Parameters, and biases of routers."""
    return models.draw(CONFIG, layout), models.draw_biases(CONFIG, layout)


@functools.cache
def gradients(layout, copied=False, where=ONE):
    """((loss, sums), gradients by parameters) of a batch.

    The reference copies the parameters to unrolled layers first.
    """
    used = APART if copied else layout
    loss_fn = model_loss(MODEL, used, Loss(chunk_length=4))
    params, biases = draw(layout)

    def loss(params, batch):
        own = (layouts.convert(tree, layout, used) for tree in (params, biases))
        key = jax.random.key(1)
        return loss_fn(balancing.join(*own), batch, losses.batch_weight(batch), key)

    mesh = where.make_mesh(jax.devices()[: where.data * where.expert if where is MESH else 1])
    with where.activate(mesh):
        batch = jax.device_put(models.make_batch(prefix=2), where.batch_sharding(mesh))
        run = models.jit(jax.value_and_grad(loss, has_aux=True))
        return jax.device_get(jax.block_until_ready(run(params, batch)))


@every_layout
def test_losses_and_gradients_are_those_of_copied_layers(layout):
    """A shared leaf's gradient is the sum over its uses, of dropout and router losses too."""
    got, expected = gradients(layout), gradients(layout, copied=True)
    models.assert_close(got, expected, 1e-5)
    for name, leaf in got[1]["layers"].items():
        assert {x.shape[0] for x in jax.tree.leaves(leaf)} <= {1, 2, 4}, name


def test_on_a_mesh():
    layout = LAYOUTS["three_units"]
    models.assert_close(gradients(layout, where=MESH), gradients(layout), 1e-5)


@every_layout
def test_means_and_norm_are_those_of_the_delinked_layers(layout):
    means = scale_shared(gradients(layout)[1], layout)
    sums = gradients(layout)[1]
    for (name, mean), total in zip(flatten_named(means), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(mean * layout.repeats_of(name), total, rtol=1e-6)
    every = layouts.convert(means, layout, APART)
    expected = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(every)))
    assert float(global_norm(leaf_squares(means), layout)) == pytest.approx(expected, rel=1e-5)


@functools.cache
def logits(layout):
    """Of the model of `GROWING[0]`, taken to a layout in steps."""
    tree = draw(GROWING[0])
    for old, new in itertools.pairwise(GROWING[: GROWING.index(layout) + 1]):
        tree = tuple(layouts.convert(part, old, new) for part in tree)
    return np.asarray(models.logits_fn(CONFIG, layout)(balancing.join(*tree), models.make_batch()))


@pytest.mark.parametrize("stage", range(1, len(GROWING)))
def test_delinking_in_steps_changes_no_logits(stage):
    """Bit for bit between scans, to rounding between scan and unrolled layers."""
    got, expected = logits(GROWING[stage]), logits(GROWING[0])
    if GROWING[stage].form is Form.STACKED:
        np.testing.assert_array_equal(got, expected)
    else:
        models.assert_close(got, expected, 1e-5)


def make_state(layout, optimizer):
    """A state in which every number is another one."""
    mesh = ONE.make_mesh(jax.devices()[:1])
    described = train_state.abstract_state(MODEL, layout, optimizer, ONE, mesh, averaged=True)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.integers(1, 100, x.shape).astype(x.dtype), described)


@pytest.mark.parametrize("policy", [Policy.COPY, Policy.RESCALE, Policy.RESET])
@pytest.mark.parametrize("optimizer", [AdamW(), Adafactor(min_dim_size_to_factor=4)])
def test_policies_treat_each_part_by_its_own_units(policy, optimizer):
    """From experts of every layer beside one of the rest, to two of the rest."""
    old, new = GROWING[1], GROWING[2]
    state = make_state(old, optimizer)
    got = delink(state, old, new, policy)
    copied = layouts.convert(state, old, new)
    models.assert_equal(got.params, copied.params)
    models.assert_equal(got.extra, copied.extra)
    powers = state.opt_state.GRADIENT_POWERS
    for (name, after), before in zip(
        flatten_named(got.opt_state), jax.tree.leaves(copied.opt_state), strict=True
    ):
        grown = old.repeats_of(name) > new.repeats_of(name)
        factor = {
            Policy.COPY: 1.0,
            Policy.RESET: 0.0,
            Policy.RESCALE: 0.5 ** powers.get(name.split("/")[0], 0),
        }[policy]
        expected = np.asarray(before) * (factor if grown else 1)
        np.testing.assert_allclose(after, expected, rtol=1e-6, err_msg=name)
    assert {old.repeats_of(n) > new.repeats_of(n) for n, _ in flatten_named(state.params)} == {
        True,
        False,
    }


def test_checkpoints_hold_each_distinct_tensor_once(tmp_path):
    layout, optimizer = LAYOUTS["three_units"], Adafactor(min_dim_size_to_factor=4)
    state = jax.device_put(make_state(layout, optimizer))
    mesh = MESH.make_mesh()
    abstract = train_state.abstract_state(MODEL, layout, optimizer, MESH, mesh, averaged=True)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {}, {"layout": layout.to_json()}, wait=True)
        saved = checkpoints.metadata(1)["params"]["layers"]
        assert saved["moe"]["up"].shape == (1, 4, 16, 16)
        assert saved["attention"]["query"].shape == (4, 16, 8, 2)
        assert saved["attention"]["key"].shape == (2, 16, 8, 2)
        assert Layout.from_json(checkpoints.description(1)["layout"]) == layout
        got = checkpoints.restore(1, abstract)
    models.assert_equal(jax.device_get(got), jax.device_get(state))


def test_decoding():
    """Greedy texts are those of the delinked model."""
    layout = LAYOUTS["three_units"]
    tree = draw(layout)
    delinked = tuple(layouts.convert(part, layout, GROWING[3]) for part in tree)
    texts = [
        generate(
            decoding_model(MODEL, force=True),
            balancing.join(*params),
            used,
            [[1, 2, 3], [4]],
            method=Greedy(),
            max_new_tokens=4,
            eos_id=31,
            pad_id=0,
            start_id=1,
        ).tokens
        for params, used in ((tree, layout), (delinked, GROWING[3]))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 4


@pytest.mark.long
def test_a_run_that_delinks_part_by_part(text, tmp_path, quick_runs):
    """Norms apart; experts too; two of attention; everything, streamed from the host."""
    norms, experts = Part(pattern="norm"), Part(pattern="moe")
    grow = {"optimizer_state": Policy.COPY}
    stages = (
        Stage(name="norms", unit=1, parts=(norms,), until=AtStep(step=1)),
        Stage(name="experts", unit=1, parts=(norms, experts), until=AtStep(step=2), **grow),
        Stage(name="pairs", unit=2, parts=(norms, experts), until=AtStep(step=3), **grow),
        Stage(name="real", offload=STREAMED, **grow),
    )
    experiment = runs.experiment(
        text,
        tmp_path / "run",
        model=models.tiny(num_layers=4, vocab_size=runs.VOCABULARY),
        stages=stages,
        steps=4,
        update=Update(clip_norm=1.0, clip_by=ClipBy.LAYER),
        sample=None,
        keep=4,
    )
    result = train.run(experiment)
    assert result.finished
    records = read_records(tmp_path / "run")
    delinks = [r for r in records if r["split"] == "delink"]
    assert [r["stage"] for r in delinks] == ["experts", "pairs", "real"]
    for record in delinks:
        assert record["loss_before"] == pytest.approx(record["loss_after"], rel=1e-6)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        units = [
            [leaf.shape[0] for leaf in (layer["mlp_norm"]["scale"], layer["moe"]["up"], query)]
            for layer in (checkpoints.metadata(step)["params"]["layers"] for step in (1, 2, 3, 4))
            for query in (layer["attention"]["query"],)
        ]
    assert units == [[4, 1, 1], [4, 4, 1], [4, 4, 2], [4, 4, 4]]
