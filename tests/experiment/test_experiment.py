"""B9 (vi) to (viii): what does not fit together is named before anything is compiled."""

import dataclasses
import pathlib

import jax
import models
import pytest
import runs

from m6jax.data.config import BuiltinPictures, TextData
from m6jax.experiment import Experiment, Stage
from m6jax.experiment.programs import StageProgram
from m6jax.experiment.summary import describe_run
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.modeling.config import LayerKind, MoEConfig, Positions
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope
from m6jax.training.train_step import Update


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
            {"stages": (runs.stages()[0], Stage(name="real", optimizer_state=Policy.RESCALE))},
            "RESCALE in stage 'real' with Update.mean_shared_gradient = True leaves the optimizer's"
            " state at another scale than the gradients (choose COPY, or",
        ),
        (
            {"update": Update(mean_shared_gradient=False)},
            "COPY in stage 'real' with Update.mean_shared_gradient = False leaves the optimizer's"
            " state at another scale than the gradients (choose RESCALE, or",
        ),
        (
            {"model": models.tiny(causal=False)},
            "ModelConfig.causal: a run learns to predict the next token",
        ),
        (
            {"model": models.tiny(max_length=8, positions=Positions.LEARNED)},
            "TextData.length: rows of 16 tokens are longer than ModelConfig.max_length = 8",
        ),
        (
            {"data": TextData(sources=(BuiltinPictures(),))},
            "ModelConfig.patch_dim: None, but Pictures.patch_size = 12 makes patches of 432",
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
            "Stage.optimizer_state: stage 'b' delinks 1 layers of attention/key into 2",
        ),
        (
            {
                "stages": (
                    Stage(name="a", until=AtStep(step=4)),
                    Stage(name="b", unit=1, optimizer_state=Policy.COPY),
                )
            },
            "has 1 distinct layers of attention/key, which is not a multiple of the 2 before it",
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


def test_no_stage_ends_at_step_zero():
    with pytest.raises(ConfigError, match="at least 1 is needed"):
        AtStep(step=0)


def in_three_stages(first, second):
    return (
        Stage(name="a", unit=1, until=first),
        Stage(name="b", unit=1, until=second, batch_size=16),
        Stage(name="c", optimizer_state=Policy.COPY),
    )


SLOPE = LossSlope(at_most=4, at_least=2, least_decrease=0.1, window=1, checks=1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (in_three_stages(SLOPE, AtStep(step=4)), "stage 'b' would end at step 4 at the latest"),
        (in_three_stages(SLOPE, AtStep(step=8)), "stage 'b' would end at step 8 at the latest"),
        (
            in_three_stages(SLOPE, LossSlope(at_most=6, least_decrease=0.1, window=1)),
            "stage 'b' may begin at step 4, and 3 windows of 1 steps do not fit",
        ),
        (
            (
                Stage(name="a", until=GradientAgreement(at_most=4, every=1)),
                Stage(name="b", form=Form.UNROLLED),
            ),
            "in stage 'a' every layer has its own weights",
        ),
        (
            (
                Stage(name="a", until=AtStep(step=4)),
                Stage(name="b", batch_size=16, optimizer_state=Policy.COPY),
            ),
            "Stage.optimizer_state: stage 'b' has the layers of the stage before",
        ),
    ],
)
def test_stages_whose_end_is_not_known_beforehand(stages, message):
    with pytest.raises(ConfigError) as error:
        make(stages=stages)
    assert message in str(error.value)


def test_where_stages_begin():
    experiment = make(stages=in_three_stages(SLOPE, AtStep(step=6)))
    assert [experiment.begin_of(i) for i in range(3)] == [(0, 0), (2, 4), (6, 6)]
    mesh = Partitioning().make_mesh()
    lines = [line for line in describe_run(experiment, mesh, 320).splitlines() if "stage " in line]
    assert "a: steps 0 to 2 ... 4, 1 distinct of 2 layers" in lines[0]
    assert "at most 512 positions in batches of 128" in lines[0]
    assert "b: steps 2 ... 4 to 6, 1 distinct" in lines[1]
    assert "at most 1.02k positions in batches of 256" in lines[1]
    assert "c: steps 6 to 8, 2 distinct" in lines[2]
    assert ", 256 positions in batches of 128" in lines[2]


def test_nothing_to_compare():
    with pytest.raises(ConfigError, match="agreement_every: in no stage do layers share weights"):
        make(stages=(Stage(name="real"),), agreement_every=2)
    with pytest.raises(ConfigError, match="agreement_every: 0 is not greater than 0"):
        make(agreement_every=0)


def test_measuring_needs_a_batch():
    with pytest.raises(ConfigError, match="measured_batches: 0 is not greater than 0"):
        Stage(name="real", measured_batches=0)


def test_rewarmup_cannot_be_negative():
    with pytest.raises(ConfigError, match="rewarmup_steps: -1 is negative"):
        Stage(name="real", rewarmup_steps=-1)


def test_a_policy_of_another_scale_needs_a_word():
    pseudo, real = runs.stages()
    wrong = dataclasses.replace(real, optimizer_state=Policy.RESCALE, allow_other_scale=True)
    assert make(stages=(pseudo, wrong)).stages[1].optimizer_state is Policy.RESCALE


def test_the_header_shows_stages_from_where_the_run_stands():
    mesh = Partitioning().make_mesh(jax.devices()[:1])
    said = describe_run(make(), mesh, runs.VOCABULARY, stage=1, step=2)
    assert "stage    real: steps 2 to 8," in said
    assert "768 positions in batches of 128" in said
    assert "pseudo" not in said


@dataclasses.dataclass(frozen=True)
class Gpu:
    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "GPU"


def test_the_header_says_which_axes_go_between_machines():
    chips = [Gpu(id=i, slice_index=i // 4) for i in range(8)]
    mesh = Partitioning(expert=2).make_mesh(chips)
    assert "(data 4 x expert 2 x model 1, data over 2 machines)" in describe_run(make(), mesh, 320)
    inside = Partitioning(expert=2).make_mesh(chips[:4])
    assert "(data 2 x expert 2 x model 1)" in describe_run(make(), inside, 320)
