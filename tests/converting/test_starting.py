"""Runs that begin in another run's state: the same bits, where the new run wants them."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import source_runs
from source_runs import DATA_STATE, STEP, experiment, layout

from m6jax.checkpointing import CheckpointError
from m6jax.converting import starting, values
from m6jax.experiment import Initial, Stage
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.optimizers import Adafactor
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training.train_step import Update


def save(directory, old, **changes):
    run = experiment(directory, **changes)
    state = source_runs.make_state(run, old)
    source_runs.save(directory, state, old)
    return state


def begun(tmp_path, stage=source_runs.REAL, initial=None, go_to=lambda place: None, **changes):
    initial = Initial(model_dir=str(tmp_path / "source"), **(initial or {}))
    return starting.begin(experiment(tmp_path / "target", stage, initial=initial, **changes), go_to)


def by_name(state):
    return dict(pytrees.flatten_named(state))


@pytest.mark.parametrize(
    ("stage", "partitioning"),
    [
        (Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.COPY), Partitioning()),
        (
            Stage(name="real", unit=2, optimizer_state=Policy.RESCALE, allow_other_scale=True),
            Partitioning(data=2, expert=2, model=2, fully_sharded=True),
        ),
        (
            Stage(
                name="real",
                form=Form.UNROLLED,
                optimizer_state=Policy.RESET,
                offload=OffloadPlan(
                    weights=("moe",), layers=2, optimizer_state=True, streamed=True, min_bytes=0
                ),
            ),
            Partitioning(expert=8),
        ),
    ],
)
def test_the_state_is_delinked_straight_to_where_it_rests(tmp_path, stage, partitioning):
    update = Update(clip_norm=None) if stage.offload else Update()
    state = save(tmp_path / "source", layout(1))

    places = []
    start = begun(tmp_path, stage, None, places.append, partitioning=partitioning, update=update)

    expected = source_runs.delinked(state, layout(1), start.program.layout, stage.optimizer_state)
    source_runs.assert_same(by_name(start.state), expected)
    for ours, wanted in zip(
        jax.tree.leaves(start.state), jax.tree.leaves(start.program.abstract), strict=True
    ):
        assert ours.sharding == wanted.sharding
    on_host = offload.bytes_by_memory(start.program.abstract)[offload.HOST]
    assert (on_host > 0) is (stage.offload is not None)
    assert (start.stage, start.step, places) == (0, STEP, [DATA_STATE])
    assert not start.to_measure
    missing = {name.split("/")[0] for name in start.report.missing}
    assert missing == ({"opt_state"} if stage.optimizer_state is Policy.RESET else set())


def test_no_more_than_a_shard_is_read_at_a_time(tmp_path, monkeypatch):
    save(tmp_path / "source", layout(1))
    asked = {}
    make = values.make

    def watched(recipe, reader, index, *rest):
        asked.setdefault(recipe.name, []).append(index)
        return make(recipe, reader, index, *rest)

    monkeypatch.setattr(values, "make", watched)
    begun(tmp_path, partitioning=Partitioning(expert=8))
    # float32[8, 16, 16] over 8 devices: an expert at a time.
    assert [index[0] for index in asked["params/layers_3/moe/up"]] == [
        slice(i, i + 1) for i in range(8)
    ]
    assert len(asked["params/layers_3/attention/query"]) == 1


def test_the_same_layers_only_move(tmp_path):
    state = save(tmp_path / "source", layout(4, Form.UNROLLED))
    start = begun(tmp_path, Stage(name="real", form=Form.UNROLLED))
    source_runs.assert_same(by_name(start.state), by_name(state))


def test_a_restart_begins_at_step_0_with_numbers_of_its_own(tmp_path):
    state = save(tmp_path / "source", layout(1))
    places = []
    start = begun(tmp_path, initial={"restart": True}, go_to=places.append, seed=5)
    assert (start.step, int(start.state.step), places) == (0, 0, [{}])
    np.testing.assert_array_equal(start.state.rng, jax.random.key_data(jax.random.key(5)))
    assert start.state.rng.sharding == start.program.abstract.rng.sharding
    leaf = start.state.opt_state.mu["layers_1"]["attention"]["query"]
    np.testing.assert_array_equal(leaf, state.opt_state.mu["layers"]["attention"]["query"][0])


def test_parameters_alone_are_taken_of_another_optimizers_run_and_converted(tmp_path):
    state = save(tmp_path / "source", layout(1), optimizer=Adafactor())
    model = models.tiny(num_layers=4, param_dtype="bfloat16")
    real = dataclasses.replace(source_runs.REAL, optimizer_state=None)
    update = Update(average_decay=0.9)

    start = begun(tmp_path, real, {"parameters_only": True}, model=model, update=update)

    query = state.params["layers"]["attention"]["query"][0].astype(jnp.bfloat16)
    for tree in (start.state.params, start.state.extra.averaged):
        for i in range(4):
            ours = tree[f"layers_{i}"]["attention"]["query"]
            assert np.asarray(ours).tobytes() == np.asarray(query).tobytes()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(start.state.opt_state))
    assert int(start.state.step) == STEP
    report = start.report
    assert "params/layers_2/attention/query: float32 to bfloat16" in report.cast
    assert {name.split("/")[0] for name in report.missing} == {"opt_state"}
    assert {name.split("/")[0] for name in report.skipped} == {"opt_state"}
    assert f"{len(report.missing)} of opt_state" in str(start)


def test_measuring_is_left_to_who_has_batches(tmp_path):
    state = save(tmp_path / "source", layout(1))
    measured = dataclasses.replace(source_runs.REAL, optimizer_state=Policy.MEASURED)
    start = begun(tmp_path, measured)
    assert start.to_measure
    assert start.layout == layout(1)
    expected = source_runs.delinked(state, layout(1), start.program.layout, Policy.COPY)
    source_runs.assert_same(by_name(start.state), expected)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (
            Stage(name="real"),
            {},
            "Experiment.initial: checkpoint 7 of .* cannot become stage 'real': .* needs a policy",
        ),
        (Stage(name="real", unit=1, optimizer_state=None), {"seed": 1}, None),
        (
            source_runs.REAL,
            {"model": models.tiny(num_layers=4, mlp_dim=32)},
            "is of another model; .* params/layers/moe/down: float32",
        ),
        (source_runs.REAL, {"optimizer": Adafactor()}, "is of another optimizer"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, stage, changes, message):
    save(tmp_path / "source", layout(1))
    if message is None:
        assert begun(tmp_path, stage, **changes).step == STEP
        return
    with pytest.raises(ConfigError, match=message):
        begun(tmp_path, stage, **changes)


def test_fewer_layers_are_refused(tmp_path):
    save(tmp_path / "source", layout(4))
    with pytest.raises(ConfigError, match="a unit of 4 layers cannot expand to 2"):
        begun(tmp_path, Stage(name="real", unit=2, optimizer_state=Policy.COPY))


def test_a_missing_and_a_damaged_source(tmp_path):
    with pytest.raises(ConfigError, match=r"Initial.model_dir: .*source holds no checkpoint"):
        begun(tmp_path)
    save(tmp_path / "source", layout(1))
    data = max((tmp_path / "source").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=f"{data} is damaged"):
        begun(tmp_path)


def test_a_position_that_is_not_there_or_at_the_end_is_refused(tmp_path):
    save(tmp_path / "source", layout(1))
    with pytest.raises(ConfigError, match=r"Initial.step: .* no checkpoint of step 3 \(it has 7\)"):
        begun(tmp_path, initial={"step": 3})
    with pytest.raises(ConfigError, match=r"Experiment.steps: .*step 7 and stage 'real' ends at s"):
        begun(tmp_path, steps=7)


def test_settings_of_a_beginning():
    with pytest.raises(ConfigError, match=r"Initial.step: -1 is negative"):
        Initial(model_dir="runs/a", step=-1)
    with pytest.raises(ConfigError, match=r"Initial.stage: 'reel' is no stage \(did you"):
        experiment("/nowhere", initial=Initial(model_dir="runs/a", stage="reel"))


CUT = OffloadPlan(weights=("moe",), layers=(1, 2), optimizer_state=True, streamed=True, min_bytes=0)


def test_a_stack_of_which_some_layers_rest_on_the_host(tmp_path):
    state = save(tmp_path / "source", layout(1))
    stage = Stage(name="real", optimizer_state=Policy.COPY, offload=CUT)

    start = begun(tmp_path, stage, update=Update(clip_norm=None))

    names = [name for name in by_name(start.state) if name.startswith("params/layers/")]
    assert {name.split("/")[2] for name in names} == {"0to0", "1to2", "3to3"}
    on_device = jax.tree.map(np.asarray, start.state)
    whole = source_runs.layouts.mend(on_device, start.program.layout)
    expected = source_runs.delinked(state, layout(1), layout(4), Policy.COPY)
    source_runs.assert_same(by_name(whole), expected)


def test_parameters_alone_for_such_a_stack(tmp_path):
    save(tmp_path / "source", layout(1))
    stage = Stage(name="real", offload=CUT)
    update = Update(clip_norm=None)
    start = begun(tmp_path, stage, {"parameters_only": True}, update=update)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(start.state.opt_state))
    assert {name.split("/")[0] for name in start.report.missing} == {"opt_state"}
