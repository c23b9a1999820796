"""A stack of which some layers rest on the host is one stack, whatever is done with it."""

import functools

import jax
import models
import numpy as np
import pytest
import runs

from m6jax import layouts
from m6jax.checkpointing import CheckpointError, Checkpoints
from m6jax.converting.recipes import Origin, recipes
from m6jax.experiment import Stage
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.routers import TopK
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import ClipBy, Update, model_loss, router_balance, train_step

CONFIG = models.tiny(
    num_layers=4,
    remat="FULL",
    dropout=0.1,
    moe=models.experts(num_experts=4, num_selected_experts=1, router=TopK(bias_rate=0.01)),
)
MODEL, WHOLE = Transformer(CONFIG), models.stacked(CONFIG)
ALL = {"weights": ("",), "optimizer_state": True, "min_bytes": 0}
MIDDLE = OffloadPlan(layers=(1, 2), activations=True, **ALL)
LAST = OffloadPlan(layers=1, **ALL)
NONE = OffloadPlan()
ONE, MESH, OTHER = Partitioning(), Partitioning(data=2, expert=4), Partitioning(data=4, expert=2)
ADAFACTOR = Adafactor(min_dim_size_to_factor=4)


def describe(plan, optimizer=ADAFACTOR, where=ONE):
    mesh = where.make_mesh(jax.devices()[: 1 if where is ONE else 8])
    plain = train_state.abstract_state(MODEL, WHOLE, optimizer, where, mesh, averaged=True)
    return plan.place(plain, WHOLE)


def kinds(tree):
    """Names of leaves on the host."""
    return [n for n, leaf in flatten_named(tree) if leaf.sharding.memory_kind == "pinned_host"]


class TestSplit:
    @pytest.mark.parametrize(
        ("layers", "borders"),
        [(1, (3,)), (3, (1,)), ((1, 2), (1, 3)), ((0, 2), (1, 2, 3)), ((0,), (1,))],
    )
    def test_cuts_where_memories_meet(self, layers, borders):
        assert OffloadPlan(layers=layers, **ALL).split(WHOLE) == Layout(
            depth=4, unit=4, borders=borders
        )

    @pytest.mark.parametrize(
        "plan",
        [NONE, OffloadPlan(**ALL), OffloadPlan(layers=4, **ALL), OffloadPlan(layers=2)],
        ids=["none", "all", "all_by_number", "nothing_of_two"],
    )
    def test_does_not_cut_without_need(self, plan):
        assert plan.split(WHOLE) == WHOLE

    def test_unrolled_layers_are_apart_already(self):
        layout = models.unrolled(CONFIG)
        assert MIDDLE.split(layout) == layout

    def test_refuses_shared_layers(self):
        layout = Layout(depth=4, unit=2, parts=(Part(pattern="moe"),))
        with pytest.raises(ConfigError, match=r"layers: \(1, 2\) of a .* share .*2 distinct of 4"):
            MIDDLE.split(layout)

    @pytest.mark.parametrize("layers", [5, (1, 4)])
    def test_refuses_layers_that_are_not_there(self, layers):
        with pytest.raises(ConfigError, match="goes beyond the 4 distinct layers"):
            OffloadPlan(layers=layers, **ALL).split(WHOLE)

    def test_places_the_named_layers(self):
        plan = OffloadPlan(weights=("moe/up$",), layers=(1, 2), min_bytes=0)
        assert kinds(describe(plan)) == [
            "params/layers/1to2/moe/up",
            "extra/averaged/layers/1to2/moe/up",
        ]


def five_steps(plan, where=MESH):
    """Returns the state, taken to the whole layout, and metrics after five ordinary steps."""
    update = Update(clip_norm=0.1, clip_by=ClipBy.LAYER, average_decay=0.9, microbatches=2)
    abstract = describe(plan, where=where)
    layout, shardings = plan.split(WHOLE), train_state.shardings_of(abstract)
    tx = ADAFACTOR.build(train_state.logical_axes(MODEL.parameters(layout)))
    step = functools.partial(
        train_step,
        loss_fn=model_loss(MODEL, layout, Loss(), plan.activations),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2 / (1 + step),
        update=update,
        balance=router_balance(MODEL, layout),
    )
    with where.activate(abstract.step.sharding.mesh):
        state = jax.device_put(layouts.convert(begin(), WHOLE, layout), shardings)
        batch = jax.device_put(
            models.make_batch(16), where.batch_sharding(abstract.step.sharding.mesh)
        )
        run = models.jit(step, exact=True, donate_argnums=0, out_shardings=(shardings, None))
        run = run.lower(state, batch).compile()
        for _ in range(5):
            state, metrics = jax.block_until_ready(run(state, batch))
            assert kinds(state) == kinds(abstract)
    return layouts.convert(jax.device_get(state), layout, WHOLE), jax.device_get(metrics)


def begin():
    tx = ADAFACTOR.build(train_state.logical_axes(MODEL.parameters(WHOLE)))
    params, biases = models.draw(CONFIG, WHOLE), models.draw_biases(CONFIG, WHOLE)
    return jax.device_get(
        models.jit(lambda p, b: train_state.create(p, tx, 0, True, b))(params, biases)
    )


@pytest.mark.long
def test_five_ordinary_steps_are_those_of_the_whole_stack():
    """To rounding: each run is a program of its own."""
    got, expected = five_steps(MIDDLE), five_steps(NONE)
    models.assert_close(got, expected, 2e-5)
    assert int(got[0].step) == 5


def numbered(plan, where=ONE):
    """A state in which every number is another one, as a plan places it; and whole."""
    rng = np.random.default_rng(0)
    abstract = describe(NONE)
    state = jax.tree.map(lambda x: rng.integers(1, 100, x.shape).astype(x.dtype), abstract)
    placed = layouts.convert(state, WHOLE, plan.split(WHOLE))
    return jax.device_put(placed, train_state.shardings_of(describe(plan, where=where))), state


class TestCheckpoints:
    """B12: from any plan and mesh to any other."""

    @pytest.mark.parametrize(
        ("saved", "read"), [(MIDDLE, NONE), (NONE, MIDDLE), (MIDDLE, LAST), (MIDDLE, MIDDLE)]
    )
    def test_are_read_with_another_plan_on_another_mesh(self, saved, read, tmp_path):
        state, expected = numbered(saved, MESH)
        abstract = describe(read, where=OTHER)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state, {}, {}, wait=True)
            got = checkpoints.restore(1, abstract)
        assert kinds(got) == kinds(abstract)
        for leaf, described in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True):
            assert leaf.sharding == described.sharding
        whole = layouts.convert(jax.device_get(got), read.split(WHOLE), WHOLE)
        models.assert_equal(whole, expected)

    def test_other_layers_are_refused(self, tmp_path):
        state, _ = numbered(MIDDLE)
        layers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((3, *x.shape[1:]), x.dtype),
            describe(NONE).params["layers"],
        )
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state.params, {}, {}, wait=True)
            with pytest.raises(CheckpointError, match=r"layers/0to0/moe/up: .* against nothing"):
                checkpoints.restore(1, {**describe(NONE).params, "layers": layers})


def test_is_read_by_the_conversion_of_checkpoints():
    """Layer 2 is the second of its run; as many layers as before, so the policy does not matter."""
    mesh = ONE.make_mesh(jax.devices()[:1])
    split, apart = MIDDLE.split(WHOLE), models.unrolled(CONFIG)
    source, target = (
        train_state.abstract_state(MODEL, layout, ADAFACTOR, ONE, mesh, averaged=True)
        for layout in (split, apart)
    )
    made = recipes(source, split, target, apart, None)
    assert made["params/layers_2/moe/up"].copies == ((Origin("params/layers/1to2/moe/up", 1),),)
    assert made["opt_state/count/layers_3/moe/up"].copies == (
        (Origin("opt_state/count/layers/3to3/moe/up", 0),),
    )


def experiment(text, directory, plan, steps=runs.STEPS):
    return runs.experiment(
        text,
        directory,
        model=models.tiny(num_layers=4, vocab_size=runs.VOCABULARY, remat="FULL"),
        stages=(
            Stage(name="pseudo", unit=1, until=AtStep(step=runs.DELINK_STEP)),
            Stage(name="real", optimizer_state=Policy.COPY, offload=plan),
        ),
        optimizer=AdamW(),
        update=Update(clip_norm=1.0, clip_by=ClipBy.LAYER, average_decay=0.9),
        steps=steps,
        save_every=100,
    )


@pytest.mark.long
def test_a_run_delinks_into_it_and_goes_on_with_other_plans(text, tmp_path, quick_runs):
    """Streamed with two layers on the host, then one in an ordinary step, then none."""
    plans = (OffloadPlan(layers=(1, 2), streamed=True, **ALL), LAST, None)
    directory, plain = tmp_path / "split", tmp_path / "plain"
    for i, plan in enumerate(plans):
        result = train.run(experiment(text, directory, plan, runs.STEPS + i))
        assert result.step == runs.STEPS + i
    train.run(experiment(text, plain, None, runs.STEPS + 2))
    described = StageProgram(experiment(text, plain, None), 1, runs.DELINK_STEP).abstract
    got, expected = (
        {r["step"]: r["loss"] for r in read_records(d) if r["split"] == "train"}
        for d in (directory, plain)
    )
    assert got.keys() == expected.keys()
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=1e-4)
    states = []
    for where in (directory, plain):
        with Checkpoints(where / "checkpoints") as checkpoints:
            states.append(checkpoints.restore(runs.STEPS + 2, described))
            if where is directory:
                layout = Layout.from_json(checkpoints.description(runs.STEPS)["layout"])
                assert layout.borders == (1, 3)
    models.assert_close(states[0].params, states[1].params, 1e-3)
