"""Checkpoints turned into others: the same bits as in memory, and whole states that a run reads."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import source_runs
from source_runs import DATA_STATE, STEP, experiment, layout

from m6jax import layouts
from m6jax.checkpointing import Checkpoints
from m6jax.configuration import compare
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.converting.source_checkpoint import expected_state
from m6jax.experiment import Stage
from m6jax.foundation import pytrees
from m6jax.layouts import Form, Part
from m6jax.modeling.routers import TopK
from m6jax.optimizers import Adafactor
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training.train_step import Update

NORMS = (Part(pattern="norm|router"),)


def stage(unit=None, form=Form.STACKED, policy=None, parts=()):
    return Stage(
        name="target",
        unit=unit,
        form=form,
        optimizer_state=policy,
        allow_other_scale=True,
        parts=parts,
    )


def converted(tmp_path, run, state, old, change, **settings):
    """Saves a state, converts it, and returns the report and the leaves of the result."""
    source_runs.save(tmp_path / "source", state, old)
    report = convert(run, Conversion(source=str(tmp_path / "source"), **settings), change)
    return report, source_runs.load(tmp_path / "target", 0 if settings.get("restart") else STEP)


@pytest.mark.parametrize(
    ("old", "target", "changes"),
    [
        (layout(1), stage(form=Form.UNROLLED, policy=Policy.COPY), {}),
        (layout(1), stage(unit=2, policy=Policy.RESCALE), {}),
        (layout(2), stage(policy=Policy.RESET), {}),
        (
            layout(1),
            stage(form=Form.UNROLLED, policy=Policy.RESCALE),
            {"optimizer": Adafactor(), "update": Update(average_decay=0.9)},
        ),
        (layout(1), stage(unit=2, policy=Policy.RESET, parts=NORMS), {}),
        (layout(2, parts=NORMS), stage(form=Form.UNROLLED, policy=Policy.COPY), {}),
    ],
)
def test_delinks_to_the_same_bits_as_in_memory(tmp_path, old, target, changes):
    run = experiment(tmp_path / "target", target, **changes)
    state = source_runs.make_state(run, old)

    _, leaves = converted(tmp_path, run, state, old, LayoutChange.DELINK)

    expected = source_runs.delinked(state, old, run.layout(0), target.optimizer_state)
    source_runs.assert_same(leaves, expected)


@pytest.mark.parametrize(
    ("change", "old", "target"),
    [
        (LayoutChange.UNSTACK, layout(4), stage(form=Form.UNROLLED)),
        (LayoutChange.STACK, layout(4, Form.UNROLLED), stage()),
    ],
)
def test_stacks_and_unstacks_to_the_same_bits(tmp_path, change, old, target):
    model = models.tiny(
        num_layers=4, moe=models.experts(router=TopK(scores="SIGMOID", bias_rate=1e-3))
    )
    run = experiment(tmp_path / "target", target, model=model)
    state = source_runs.make_state(run, old)

    report, leaves = converted(tmp_path, run, state, old, change)

    source_runs.assert_same(leaves, source_runs.delinked(state, old, run.layout(0), None))
    assert {line.done for line in report.changes} == {"as it was"}


def test_links_what_was_delinked_back_to_the_same_bits(tmp_path):
    pseudo = experiment(tmp_path / "target", stage(unit=2, policy=Policy.RESCALE))
    state = source_runs.make_state(pseudo, layout(2))
    real = source_runs.layout(4, Form.UNROLLED)
    copies = source_runs.delinking.delink(state, layout(2), real, Policy.RESCALE)

    report, leaves = converted(tmp_path, pseudo, copies, real, LayoutChange.LINK)

    source_runs.assert_same(leaves, dict(pytrees.flatten_named(state)))
    done = {line.after: line.done for line in report.changes}
    assert done["params/layers/attention/query"] == "2 equal layers are one"
    assert done["opt_state/nu/layers/attention/query"] == (
        "2 equal layers are one, times 4 (RESCALE)"
    )


def test_a_router_that_was_saved_in_bfloat16_is_float32(tmp_path):
    """Routers had `ModelConfig.param_dtype` once."""
    run = experiment(tmp_path / "target", stage(form=Form.UNROLLED, policy=Policy.COPY))
    state = source_runs.make_state(run, layout(1))
    router = state.params["layers"]["moe"]["router"]
    router["kernel"] = router["kernel"].astype(jnp.bfloat16)

    _, leaves = converted(tmp_path, run, state, layout(1), LayoutChange.DELINK)

    assert leaves["params/layers_3/moe/router/kernel"].dtype == np.float32
    np.testing.assert_array_equal(leaves["params/layers_3/moe/router/kernel"], router["kernel"][0])


@pytest.mark.parametrize("form", list(Form))
def test_links_layers_that_differ_to_their_mean(tmp_path, form):
    run = experiment(tmp_path / "target", stage(unit=2, policy=Policy.COPY))
    old = layout(4, form)
    state = source_runs.make_state(run, old)

    _, leaves = converted(tmp_path, run, state, old, LayoutChange.LINK, average=True)

    stacked = layouts.convert(state, old, layout(4)) if form is Form.UNROLLED else state
    expected = dict(pytrees.flatten_named(layouts.link(stacked, layout(4), layout(2), True)))
    assert leaves.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(leaves[name], leaf, rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_mean_of_two_layers_by_hand(tmp_path):
    """Layers 0..3 filled with 1, 2, 5, 10: of 0 and 2 comes 3, of 1 and 3 comes 6."""
    run = experiment(tmp_path / "target", stage(unit=2, policy=Policy.RESET))
    filling = jnp.asarray([1.0, 2.0, 5.0, 10.0])

    def fill(name, leaf):
        if not layouts.LeafName.of(name).in_stack or leaf.dtype != jnp.float32:
            return leaf
        return jnp.broadcast_to(filling.reshape(4, *[1] * (leaf.ndim - 1)), leaf.shape)

    state = pytrees.map_named(fill, source_runs.make_state(run, layout(4)))
    _, leaves = converted(tmp_path, run, state, layout(4), LayoutChange.LINK, average=True)

    query = leaves["params/layers/attention/query"]
    np.testing.assert_array_equal(query[:, 0, 0, 0], [3.0, 6.0])
    assert not leaves["opt_state/mu/layers/attention/query"].any()


def test_the_result_is_a_whole_checkpoint_of_the_run(tmp_path):
    run = experiment(tmp_path / "target")
    state = source_runs.make_state(run, layout(1))

    converted(tmp_path, run, state, layout(1), LayoutChange.DELINK)

    with Checkpoints(tmp_path / "target" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [STEP]
        description = checkpoints.description(STEP)
        assert checkpoints.restore_data_state(STEP) == DATA_STATE
        mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            expected_state(run, run.layout(0)),
        )
        restored = checkpoints.restore(STEP, abstract)
    assert int(restored.step) == STEP
    assert description["stage_name"] == "real"
    assert (description["stage"], description["stage_start"]) == (0, STEP)
    assert layouts.Layout.from_json(description["layout"]) == run.layout(0)
    assert description["source"] == {"model_dir": str(tmp_path / "source"), "step": STEP}
    config = (tmp_path / "target" / "config.gin").read_text()
    assert compare(config, description["config"]) == []


def test_a_restart_forgets_the_step_the_place_and_the_random_numbers(tmp_path):
    run = experiment(tmp_path / "target", seed=5)
    state = source_runs.make_state(run, layout(1))

    _, leaves = converted(tmp_path, run, state, layout(1), LayoutChange.DELINK, restart=True)

    assert leaves["step"] == 0
    np.testing.assert_array_equal(leaves["rng"], jax.random.key_data(jax.random.key(5)))
    query = state.params["layers"]["attention"]["query"]
    np.testing.assert_array_equal(leaves["params/layers_3/attention/query"], query[0])
    with Checkpoints(tmp_path / "target" / "checkpoints") as checkpoints:
        assert checkpoints.restore_data_state(0) == {}


def test_every_leaf_is_reported(tmp_path):
    run = experiment(tmp_path / "target", dataclasses.replace(source_runs.REAL))
    state = source_runs.make_state(run, layout(1))

    report, leaves = converted(tmp_path, run, state, layout(1), LayoutChange.DELINK)

    lines = str(report).splitlines()
    query = (
        "params/layers/attention/query: float32[1,16,8,2] ->"
        " params/layers_*/attention/query: 4 x float32[16,8,2], 4 copies"
    )
    assert query in lines
    moment = (
        "opt_state/nu/layers/attention/query: float32[1,16,8,2] ->"
        " opt_state/nu/layers_*/attention/query: 4 x float32[16,8,2], 4 copies (COPY)"
    )
    assert moment in lines
    assert "step: int32[] -> int32[], as it was" in lines
    reported = {change.after.replace("layers_*", "layers_3") for change in report.changes}
    assert reported == {
        name for name in leaves if not any(f"layers_{i}/" in name for i in range(3))
    }
    assert report.nbytes == sum(leaf.nbytes for leaf in leaves.values())


def test_a_stack_that_was_saved_in_runs_is_one(tmp_path):
    run = experiment(tmp_path / "target", stage(unit=2, policy=Policy.COPY))
    state = source_runs.make_state(run, layout(4))
    in_runs = dataclasses.replace(layout(4), borders=(1, 3))
    source_runs.save(tmp_path / "source", layouts.cut(state, in_runs), in_runs)

    report = convert(
        run, Conversion(source=str(tmp_path / "source"), average=True), LayoutChange.LINK
    )

    expected = dict(pytrees.flatten_named(layouts.link(state, layout(4), layout(2), True)))
    for name, leaf in source_runs.load(tmp_path / "target").items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert "params/layers/moe/up: float32[4,8,16,16] -> float32[2,8,16,16], mean of 2" in str(
        report
    )
