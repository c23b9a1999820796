"""The streamed step is the ordinary step, for every unit, form, optimizer and mesh."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

from m6jax import layouts
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Part, offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.weight_update import Weights
from m6jax.training import streaming, train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.streaming.parts import split
from m6jax.training.train_step import Update, model_loss, router_balance, train_step

HOST = OffloadPlan(weights=("",), optimizer_state=True, activations=True, min_bytes=0)
EXPERTS = OffloadPlan(weights=("moe/(up|down)",), min_bytes=0)
NONE = OffloadPlan()
MESH = Partitioning(data=2, expert=4)
ADAMW = AdamW(weight_decay=0.1)
ADAFACTOR = Adafactor(min_dim_size_to_factor=4, b1=0.9)
UPDATE = Update(clip_norm=None)
SETTINGS = {
    "num_layers": 2,
    "dropout": 0.2,
    "moe": models.experts(num_experts=4, num_selected_experts=1, group_size=4),
}
BIASED = models.experts(
    num_experts=4, num_selected_experts=1, group_size=4, router=TopK(bias_rate=0.01)
)


def rate(step):
    return 1e-2 / (1 + step)


def batches(parts):
    """Eight rows a part; in the last batch of two parts one is all padding."""
    made = [models.make_batch(rows=8 * parts, seed=i, prefix=2) for i in range(3)]
    if parts > 1:
        for name in ("segment_ids", "loss_weights"):
            made[-1][name][-8:] = 0
    return made


def run(step, state, shardings, batch_sharding, steps, parts):
    """Makes `steps` updates; returns the state and the metrics of each."""
    compiled, measured = None, []
    data = batches(parts)
    for i in range(steps):
        batch = jax.device_put(data[i % len(data)], batch_sharding)
        if compiled is None:
            options = {"donate_argnums": 0, "out_shardings": (shardings, None)}
            compiled = models.jit(step, **options).lower(state, batch).compile()
        # Emulated devices wait for each other; programs of many steps at once may wait for ever.
        state, metrics = jax.block_until_ready(compiled(state, batch))
        measured.append(metrics)
    return state, measured


@functools.cache
def both(
    unit=2,
    form=Form.STACKED,
    optimizer=ADAMW,
    plan=HOST,
    where=None,
    update=UPDATE,
    steps=5,
    parts=(),
    **settings,
):
    """Runs both steps from one state; returns (state, metrics) of the ordinary and the streamed."""
    config = models.tiny(**(SETTINGS | settings))
    layout = config.layout(unit, form, parts)
    model = Transformer(config)
    devices = jax.devices()[: 8 if where else 1]
    where = where or Partitioning()
    mesh = where.make_mesh(devices)
    averaged = update.average_decay is not None
    plain = train_state.abstract_state(model, layout, optimizer, where, mesh, averaged)
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    params = models.draw(config, layout)
    biases = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), plain.extra.router_bias)
    state = models.jit(lambda p, b: train_state.create(p, tx, 0, averaged, b))(params, biases)
    split = plan.split(layout)
    common = {"learning_rate": rate, "update": update}
    ordinary = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss(chunk_length=4)),
        tx=tx,
        balance=router_balance(model, layout),
        layout=layout,
        **common,
    )
    streamed = functools.partial(
        streamed_step,
        model=model,
        loss=Loss(chunk_length=4),
        optimizer=optimizer,
        inputs_on_host=plan.activations,
        layout=split,
        **common,
    )
    results = []
    with where.activate(mesh):
        for step, abstract in ((ordinary, plain), (streamed, plan.place(plain, layout))):
            shardings = train_state.shardings_of(abstract)
            start = state if step is ordinary else layouts.convert(state, layout, split)
            start = jax.device_put(start, shardings)
            # What is donated may share its buffers with `state`.
            copies = jax.tree.map(lambda x: x if offload.on_host(x) else x.copy(), start)
            start = jax.block_until_ready(copies)
            sharding = where.batch_sharding(mesh)
            results.append(run(step, start, shardings, sharding, steps, update.microbatches))
    return results, train_state.shardings_of(abstract), (split, layout)


def check(tolerance=2e-5, **case):
    ((expected, expected_metrics), (state, metrics)), shardings, layouts_ = both(**case)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.memory_kind == sharding.memory_kind
    models.assert_close(metrics, expected_metrics, tolerance)
    state = layouts.convert(jax.device_get(state), *layouts_)
    models.assert_close(state, expected, 10 * tolerance)
    models.assert_close(state.params, expected.params, tolerance)
    return state, metrics


CASES = {
    "stacked": {"num_layers": 3, "unit": 3},
    "stacked_on_a_mesh": {"where": MESH, "plan": EXPERTS},
    "unit_of_two": {
        "num_layers": 4,
        "optimizer": ADAFACTOR,
        "update": Update(clip_norm=0.05, clip_by="LAYER"),
    },
    "shared_on_a_mesh": {"unit": 1, "where": MESH, "remat": "FULL"},
    "unrolled": {
        "form": Form.UNROLLED,
        "optimizer": ADAFACTOR,
        "update": Update(clip_norm=0.05, clip_by="LAYER", average_decay=0.9),
        "moe": BIASED,
    },
    "unrolled_on_a_mesh": {
        "form": Form.UNROLLED,
        "where": MESH,
        "num_layers": 3,
        "unit": 3,
        "plan": OffloadPlan(weights=("",), optimizer_state=True, layers=(0, 2), min_bytes=0),
        "remat": "ALL_BUT_PRODUCTS",
    },
    "pattern_and_biases": {
        "pattern": ("DENSE", "SPARSE"),
        "update": Update(clip_norm=None, average_decay=0.9, mean_shared_gradient=False),
        "num_layers": 4,
        "moe": BIASED,
        "tied_output": False,
    },
    "norms_and_routers_of_every_layer": {
        "num_layers": 4,
        "unit": 1,
        "parts": (Part(pattern="norm|router"),),
        "update": Update(clip_norm=0.05, clip_by="LAYER", average_decay=0.9),
        "moe": BIASED,
    },
    "experts_of_one_layer_on_a_mesh": {
        "num_layers": 4,
        "parts": (Part(pattern="attention_norm"), Part(pattern="moe/(up|down)", unit=1)),
        "optimizer": ADAFACTOR,
        "where": MESH,
    },
    "some_layers_of_a_stack": {
        "num_layers": 4,
        "unit": 4,
        "plan": OffloadPlan(
            weights=("",), optimizer_state=True, activations=True, layers=(1, 2), min_bytes=0
        ),
        "update": Update(clip_norm=0.05, clip_by="LAYER", average_decay=0.9),
        "moe": BIASED,
    },
    "the_last_layer_of_a_stack_on_a_mesh": {
        "num_layers": 3,
        "unit": 3,
        "plan": OffloadPlan(weights=("moe",), optimizer_state=True, layers=1, min_bytes=0),
        "optimizer": ADAFACTOR,
        "where": MESH,
        "remat": "FULL",
    },
    "nothing_on_the_host": {"plan": NONE, "optimizer": ADAFACTOR},
    "two_parts_of_parts_of_a_layer": {
        "num_layers": 4,
        "unit": 1,
        "parts": (Part(pattern="norm|router"),),
        "optimizer": ADAFACTOR,
        "update": Update(microbatches=2, clip_norm=0.05, clip_by="LAYER", average_decay=0.9),
        "moe": BIASED,
        "tied_output": False,
        "remat": "FULL",
    },
    "three_parts_of_cut_layers_on_a_mesh": {
        "num_layers": 3,
        "unit": 3,
        "plan": OffloadPlan(
            weights=("moe",), optimizer_state=True, activations=True, layers=1, min_bytes=0
        ),
        "update": Update(microbatches=3, clip_norm=0.05, clip_by="LAYER"),
        "where": MESH,
    },
    "two_parts_unrolled": {
        "form": Form.UNROLLED,
        "pattern": ("DENSE", "SPARSE"),
        "num_layers": 4,
        "unit": 4,
        "update": Update(microbatches=2, clip_norm=None, mean_shared_gradient=False),
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(
    "two_parts_of_parts_of_a_layer",
    "the_last_layer_of_a_stack_on_a_mesh",
    "unrolled_on_a_mesh",
    "two_parts_unrolled",
    "unit_of_two",
    "some_layers_of_a_stack",
    "stacked",
)
def test_equals_the_ordinary_step(name):
    """Five steps, with prefixes, dropout, capacity and router losses."""
    state, metrics = check(**CASES[name])
    assert int(state.step) == 5
    assert float(metrics[0]["grad_norm"]) > 0.1
    assert float(metrics[0]["fraction_dropped"]) > 0


def test_layers_are_updated_by_their_own_names():
    """A layer alone keeps the names that patterns of decay are written for."""
    keep = AdamW(weight_decay=0.5, no_decay=("^layers/moe",))
    case = {"optimizer": keep, "steps": 2, "plan": NONE}
    check(**case)


def test_refuses_what_needs_all_gradients_at_once():
    message = r"Update.clip_norm: the streamed step has no global norm.*1.0.*LAYER"
    with pytest.raises(ConfigError, match=message):
        streaming.check_update(Update())
    with pytest.raises(ConfigError, match=message):
        step_alone(Update(), None)


def step_alone(update, batch, **config):
    config = models.tiny(**(SETTINGS | config))
    layout = config.layout(2, Form.STACKED)
    params = models.draw(config, layout)
    tx = ADAMW.build(train_state.logical_axes(models.describe(config, layout)))
    return streamed_step(
        train_state.create(params, tx, 0, averaged=False),
        batch,
        model=Transformer(config),
        layout=layout,
        loss=Loss(),
        optimizer=ADAMW,
        learning_rate=rate,
        update=update,
    )


class TestMicrobatches:
    @pytest.mark.parametrize(
        ("rows", "group", "message"),
        [
            (8, 4, "Update.microbatches: 3 do not divide a batch of 8 rows"),
            (3, 16, r"MoEConfig.group_size: a part of 1 rows .* no whole number of groups of 16"),
        ],
    )
    def test_refuses_parts_that_cannot_be(self, rows, group, message):
        update = Update(clip_norm=None, microbatches=3)
        moe = models.experts(num_experts=4, group_size=group)
        batch = models.make_batch(rows=rows)
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(lambda batch: step_alone(update, batch, moe=moe), batch)

    def test_equal_the_whole_batch(self):
        """Where no loss is nonlinear in the batch: no router losses over it, no dropout."""
        moe = models.experts(
            num_experts=4,
            num_selected_experts=1,
            group_size=4,
            load_balance_loss=0.0,
            router_z_loss=0.0,
        )
        batch = models.make_batch(rows=8, prefix=2)

        def run(parts):
            update = Update(clip_norm=None, microbatches=parts)
            return models.jit(
                lambda batch: step_alone(update, batch, moe=moe, dropout=0.0, remat="FULL")
            )(batch)

        (state, metrics), (whole, whole_metrics) = run(4), run(1)
        models.assert_close(metrics["loss"], whole_metrics["loss"], 1e-5)
        models.assert_close(metrics["grad_norm"], whole_metrics["grad_norm"], 2e-5)
        models.assert_close(state.params, whole.params, 2e-5)

    def test_the_program_does_not_grow_with_their_number(self):
        def size(parts):
            update = Update(clip_norm=None, microbatches=parts)
            batch = models.make_batch(rows=16)
            return str(jax.make_jaxpr(lambda batch: step_alone(update, batch))(batch)).count("=")

        assert size(4) < 1.01 * size(2)  # but for what a first trace alone has


PARAMS = {"head": jnp.ones(3), "layers": {"w": jnp.ones((2, 4))}}


class TestParts:
    def test_every_tree_is_divided(self):
        state = optax.ScaleByAdamState(jnp.int32(0), PARAMS, PARAMS)
        rest, stack = split(Weights(PARAMS, (state.mu, state.nu)))
        assert list(rest.params) == ["head"]
        assert [list(tree) for tree in stack.opt_state] == [["layers"], ["layers"]]

    def test_refuses_a_state_that_has_no_layers(self):
        state = optax.ScaleByAdamState(jnp.int32(0), PARAMS, PARAMS)
        with pytest.raises(ValueError, match="opt_state/count: is in no tree shaped like"):
            split(Weights(PARAMS, state))
