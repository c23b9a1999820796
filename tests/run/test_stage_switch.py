"""Stages that end when something was seen: in whole runs, and after an interruption."""

import jax
import numpy as np
import pytest
import runs

from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.optimizers import Adafactor
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import GradientAgreement, LossSlope
from m6jax.reporting.writers import read_records
from m6jax.run import train
from m6jax.run.between_steps import Probe
from m6jax.training.train_step import ClipBy, Update

pytestmark = pytest.mark.usefixtures("quick_runs")

# No loss falls by a million in 1000 steps, and no correlation is above 1.
SLOPE = LossSlope(at_most=7, least_decrease=1e6, window=2, checks=2)
AGREEMENT = GradientAgreement(at_most=7, every=2, threshold=1.0, checks=2)
STREAMED = OffloadPlan(weights=("",), optimizer_state=True, streamed=True, min_bytes=0)


def records(directory, split="train"):
    return [r for r in read_records(directory) if r["split"] == split]


def losses(directory):
    return {r["step"]: (r["stage"], r["loss"]) for r in records(directory)}


def final_state(directory):
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.restore(runs.STEPS, checkpoints.metadata(runs.STEPS))


class KilledError(Exception):
    """As if the process had ended: nothing is saved on the way out."""


def run_with_deaths(make, directory, deaths, monkeypatch):
    """Runs until done; dies after each of the steps `deaths`, before anything of it is saved."""
    look = Probe.look
    for death in deaths:

        def look_and_die(self, position, *rest, death=death):
            found = look(self, position, *rest)
            if position.step == death:
                raise KilledError
            return found

        monkeypatch.setattr(Probe, "look", look_and_die)
        with pytest.raises(KilledError):
            train.run(make(directory))
        monkeypatch.undo()
    assert train.run(make(directory)).finished


@pytest.mark.long
def test_a_flat_loss_ends_a_stage_of_large_batches(text, tmp_path, monkeypatch):
    """Real on another mesh, streamed, second moments measured; bit-equal after interruptions."""

    def make(directory):
        return runs.experiment(
            text,
            directory,
            stages=(
                Stage(name="pseudo", unit=1, until=SLOPE, batch_size=16),
                Stage(
                    name="real",
                    optimizer_state=Policy.MEASURED,
                    measured_batches=2,
                    rewarmup_steps=4,
                    partitioning=Partitioning(data=2, expert=2, model=2),
                    offload=STREAMED,
                ),
            ),
            update=Update(clip_norm=1.0, clip_by=ClipBy.LAYER, average_decay=0.9),
            save_every=1,
            sample=None,
        )

    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    train.run(make(straight))
    assert [stage for stage, _ in losses(straight).values()] == ["pseudo"] * 6 + ["real"] * 2
    probes = {r["step"]: r["flat_windows"] for r in records(straight, "probe")}
    assert probes == {4: 1, 6: 2}
    (delink,) = records(straight, "delink")
    assert delink["step"] == 6
    np.testing.assert_allclose(delink["loss_before"], delink["loss_after"], rtol=1e-5)
    # Between a check and its save; after the switch, whose step the re-warm-up counts from.
    run_with_deaths(make, interrupted, (4, 8), monkeypatch)
    assert losses(interrupted) == losses(straight)
    assert records(interrupted, "probe") == records(straight, "probe")
    rates = [r["learning_rate"] for r in records(straight)]
    assert [r["learning_rate"] for r in records(interrupted)] == rates
    assert rates[6] < rates[7] < rates[5]
    jax.tree.map(np.testing.assert_array_equal, final_state(interrupted), final_state(straight))


def test_disagreeing_gradients_end_a_stage(text, tmp_path, monkeypatch):
    """The check that ends the stage is made again where the process died before its save."""

    def make(directory, agreement_every=None):
        return runs.experiment(
            text,
            directory,
            stages=(
                Stage(name="pseudo", unit=1, until=AGREEMENT),
                Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.MEASURED),
            ),
            optimizer=Adafactor(min_dim_size_to_factor=4),
            agreement_every=agreement_every,
            sample=None,
        )

    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    train.run(make(straight, agreement_every=1))
    assert [stage for stage, _ in losses(straight).values()] == ["pseudo"] * 4 + ["real"] * 4
    probes = records(straight, "probe")
    assert [r["step"] for r in probes] == [1, 2, 3, 4]
    assert [r.get("low_checks") for r in probes] == [None, 1, None, 2]
    for record in probes:
        assert -1 <= record["gradient_agreement"] <= 1
        assert record["gradient_agreement_by_layer"] == pytest.approx(
            [record["gradient_agreement"]], abs=1e-5
        )
        assert "gradient_agreement/moe/up" in record
    run_with_deaths(make, interrupted, (4,), monkeypatch)
    assert losses(interrupted) == losses(straight)
    checks = [r for r in probes if "low_checks" in r]
    assert records(interrupted, "probe") == checks
    jax.tree.map(np.testing.assert_array_equal, final_state(interrupted), final_state(straight))
