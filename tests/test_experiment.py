"""B9 (vi) to (viii): what does not fit together is named before anything is compiled."""

import pathlib

import models
import pytest
import runs

from m6jax.delinking import Policy
from m6jax.experiment import Experiment, Stage
from m6jax.layouts import Form
from m6jax.modeling.config import LayerKind, MoEConfig, Positions
from m6jax.partitioning import Partitioning
from m6jax.programs import StageProgram
from m6jax.train_step import Update
from m6jax.triggers import AtStep
from m6jax.validated import ConfigError


def make(**changes) -> Experiment:
    nowhere = pathlib.Path("/nowhere")
    return runs.experiment(nowhere / "text", nowhere / "run", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "Experiment.stages: at least one stage is needed"),
        ({"update": Update(microbatches=3)}, "microbatches: 3 do not divide a batch of 8 rows"),
        ({"steps": 0}, "Experiment.steps: 0 is not greater than 0"),
        ({"steps": 4}, "would end at step 4"),
        (
            {"model": models.tiny(causal=False)},
            "ModelConfig.causal: a run learns to predict the next token",
        ),
        (
            {"model": models.tiny(max_length=8, positions=Positions.LEARNED)},
            "TextData.length: rows of 16 tokens are longer than ModelConfig.max_length = 8",
        ),
        (
            {"stages": (Stage(name="pseudo", unit=3),)},
            "Layout.unit: 3 does not divide the depth of 2 layers",
        ),
        (
            {"stages": (Stage(name="real", unit=1, form=Form.UNROLLED),)},
            "UNROLLED needs a unit of all 2 layers",
        ),
        ({"stages": (runs.stages()[0],)}, "the last stage 'pseudo' ends with Experiment.steps"),
        (
            {"stages": (Stage(name="pseudo", unit=1), Stage(name="real"))},
            "Stage.until: stage 'pseudo' is not the last and must say when it ends",
        ),
        (
            {"stages": (Stage(name="a", unit=1, until=AtStep(step=4)), Stage(name="b"))},
            "Stage.optimizer_state: stage 'b' delinks 1 layers into 2",
        ),
        (
            {
                "stages": (
                    Stage(name="a", until=AtStep(step=4)),
                    Stage(name="b", unit=1, optimizer_state=Policy.COPY),
                )
            },
            "has 1 distinct layers, which is not a multiple of the 2 before it",
        ),
    ],
)
def test_parts_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert message in str(error.value)


def test_experts_that_do_not_divide_into_prototypes():
    with pytest.raises(ConfigError, match="8 experts do not divide into 3 prototypes"):
        MoEConfig(num_experts=8, num_prototypes=3)


def test_a_unit_that_cuts_the_pattern():
    model = models.tiny(num_layers=4, pattern=(LayerKind.DENSE, LayerKind.SPARSE))
    with pytest.raises(ConfigError, match="1 layers are not whole rounds of the pattern"):
        make(model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitioning": Partitioning(data=3)}, "does not fit 8 devices"),
        ({"batch_size": 12}, "a microbatch of 12 rows does not divide over the 8 devices"),
        ({"update": Update(microbatches=2)}, "a microbatch of 4 rows does not divide"),
        ({"eval_batch_size": 4}, "an evaluation batch of 4 rows does not divide"),
        (
            {
                "partitioning": Partitioning(expert=8),
                "model": models.tiny(moe=models.experts(num_experts=4)),
            },
            "expert = 4 does not divide over the mesh axes expert = 8",
        ),
        (
            {
                "partitioning": Partitioning(model=8),
                "model": models.tiny(num_kv_heads=4),
            },
            "heads = 4 does not divide over the mesh axes model = 8",
        ),
    ],
)
def test_what_does_not_fit_the_devices(changes, message):
    with pytest.raises(ConfigError) as error:
        StageProgram(make(**changes), stage=0, start_step=0)
    assert message in str(error.value)


def test_a_trigger_is_due_from_its_step_on():
    trigger = AtStep(step=3)
    assert [trigger.due(step) for step in (2, 3, 4)] == [False, True, True]
    with pytest.raises(ConfigError, match="at least 1 is needed"):
        AtStep(step=0)


def test_rewarmup_cannot_be_negative():
    with pytest.raises(ConfigError, match="rewarmup_steps: -1 is negative"):
        Stage(name="real", rewarmup_steps=-1)
