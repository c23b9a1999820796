"""Whole runs with state on the host and streamed steps, and what an experiment refuses."""

import pathlib

import jax
import models
import numpy as np
import pytest
import runs

from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.training.train_step import ClipBy, Update

pytestmark = pytest.mark.usefixtures("quick_runs")

MOMENTS = OffloadPlan(optimizer_state=True, min_bytes=0)
STREAMED = OffloadPlan(weights=("",), optimizer_state=True, streamed=True, min_bytes=0)
UPDATE = Update(clip_norm=1.0, clip_by=ClipBy.LAYER, average_decay=0.9)


def stages(pseudo, real):
    return (
        Stage(name="pseudo", unit=1, until=AtStep(step=runs.DELINK_STEP), offload=pseudo),
        Stage(name="real", form=Form.STACKED, optimizer_state=Policy.COPY, offload=real),
    )


@pytest.mark.long
def test_a_streamed_run_is_the_ordinary_run(text, tmp_path):
    """Both stages, evaluation, sampling and checkpoints; then on without offload."""
    offloaded, plain = tmp_path / "offloaded", tmp_path / "plain"
    for directory, pseudo, real in ((offloaded, MOMENTS, STREAMED), (plain, None, None)):
        train.run(runs.experiment(text, directory, stages=stages(pseudo, real), update=UPDATE))
    got, expected = (
        [r for r in read_records(d) if r["split"] == "train"] for d in (offloaded, plain)
    )
    assert [r.keys() for r in got] == [r.keys() for r in expected]
    for ours, theirs in zip(got, expected, strict=True):
        for name in ("loss", "total_loss", "grad_norm", "learning_rate", "fraction_dropped"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, err_msg=name)

    experiment = runs.experiment(
        text, offloaded, stages=stages(None, None), update=UPDATE, steps=runs.STEPS + 1
    )
    result = train.run(experiment)
    assert result.step == runs.STEPS + 1
    with Checkpoints(offloaded / "checkpoints") as checkpoints:
        abstract = StageProgram(experiment, 1, runs.DELINK_STEP).abstract
        state = checkpoints.restore(runs.STEPS, abstract)
    with Checkpoints(plain / "checkpoints") as checkpoints:
        models.assert_close(state.params, checkpoints.restore(runs.STEPS, abstract).params, 1e-4)


def test_a_new_state_rests_where_the_plan_says(text, tmp_path):
    experiment = runs.experiment(
        text, tmp_path, stages=(Stage(name="real", offload=STREAMED),), update=UPDATE
    )
    program = StageProgram(experiment, 0, 0)
    state = program.initialize()
    for leaf, described in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.abstract), strict=True
    ):
        assert leaf.sharding.memory_kind == described.sharding.memory_kind
    assert state.params["layers"]["moe"]["up"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (STREAMED, {}, r"Update.clip_norm: the streamed step has no global norm"),
        (
            OffloadPlan(weights=("moe",)),
            {},
            r"OffloadPlan.weights: with ModelConfig.remat = NOTHING .*'FULL'",
        ),
        (
            OffloadPlan(),
            {"update": Update(rounding="MASTER")},
            r"Update.rounding: MASTER keeps float32 copies of weights that are float32 already",
        ),
        (
            OffloadPlan(activations=True),
            {"model": models.tiny(vocab_size=runs.VOCABULARY, remat="ALL_BUT_PRODUCTS")},
            r"OffloadPlan.activations: with ModelConfig.remat = ALL_BUT_PRODUCTS",
        ),
    ],
)
def test_an_experiment_refuses_before_compilation(plan, changes, message):
    nowhere = pathlib.Path("/nowhere")
    with pytest.raises(ConfigError, match=message):
        runs.experiment(nowhere, nowhere, stages=(Stage(name="a", offload=plan),), **changes)
