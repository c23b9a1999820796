"""The runs of the study as values: what differs between them, and nothing else.

>>> Variant(unit=2, switch=60).name, Variant(unit=None, seed=1).name
('unit2-at60-copy-mean-s0', 'scratch-s1')
"""

import dataclasses
import itertools
from pathlib import Path

from m6jax.data.config import SentencePiece, TextData, TextFiles
from m6jax.experiment import Experiment, Stage
from m6jax.layouts import Form, Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, MoEConfig
from m6jax.optimizers.schedules import WarmupStableDecay
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope
from m6jax.training.train_step import ClipBy, Update

# What has its own weights in every layer of the Pseudo stage.
OWN = {"nothing": "", "norms-router": "norm|router", "all-but-experts": "norm|router|attention"}
TRIGGERS = ("step", "slope", "agreement")


@dataclasses.dataclass(frozen=True)
class Study:
    """What all runs have in common.

    Attributes:
      steps: updates of a run with the whole budget.
      rows: of a batch.
      group_rows: rows whose tokens compete for room at the experts.
      length: tokens of a row.
      vocabulary: its size.
      depth: layers.
      embed: width of a token.
      mlp: width of an expert.
      experts: of a layer, in two prototypes.
      balance: weight of the balance loss; without one most choices overflow their expert's room.
      evaluations: of the held-out text, in a run with the whole budget.
    """

    steps: int = 320
    rows: int = 8
    group_rows: int = 8
    length: int = 128
    vocabulary: int = 512
    depth: int = 8
    embed: int = 64
    mlp: int = 128
    experts: int = 256
    balance: float = 0.01
    evaluations: int = 20

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.length

    def model(self) -> ModelConfig:
        """Returns the network, nearly all of it experts."""
        return ModelConfig(
            vocab_size=self.vocabulary,
            num_layers=self.depth,
            embed_dim=self.embed,
            num_heads=4,
            mlp_dim=self.mlp,
            moe=MoEConfig(
                num_experts=self.experts,
                num_prototypes=2,
                group_size=self.group_rows * self.length,
                load_balance_loss=self.balance,
            ),
            dtype="float32",
        )


@dataclasses.dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
      unit: distinct layers of the Pseudo stage; None: Real from scratch.
      switch: percent of the steps that the Pseudo stage takes; with a trigger, at most.
      policy: for the optimizer's state at the delink.
      mean: whether a shared weight's gradient is the mean over its uses, or the sum.
      own: what has its own weights in every layer from the beginning; a key of `OWN`.
      trigger: what ends the Pseudo stage; one of `TRIGGERS`.
      peak: of the learning rate, in thousandths.
      budget: percent of the study's steps that the run makes, with a schedule to match.
      seed: of initial values and of the order of the text.
    """

    unit: int | None = 1
    switch: int = 30
    policy: str = "COPY"
    mean: bool = True
    own: str = "nothing"
    trigger: str = "step"
    peak: int = 4
    budget: int = 100
    seed: int = 0

    @property
    def name(self) -> str:
        """What the run and its result are called."""
        parts = ["scratch"]
        if self.unit is not None:
            gradient = "mean" if self.mean else "sum"
            parts = [f"unit{self.unit}", f"at{self.switch}", self.policy.lower(), gradient]
        if self.own != "nothing":
            parts.append(f"own-{self.own}")
        if self.trigger != "step":
            parts.append(self.trigger)
        if self.peak != 4:
            parts.append(f"peak{self.peak}")
        if self.budget != 100:
            parts.append(f"budget{self.budget}")
        return "-".join([*parts, f"s{self.seed}"])

    def experiment(
        self, study: Study, text: Path, model_dir: Path, streamed: bool = False
    ) -> Experiment:
        """Returns the run as m6jax makes it.

        Args:
          study: sizes.
          text: directory with `train/*.txt` and `held_out/*.txt`.
          model_dir: where the run writes.
          streamed: let the Real stage stream weights and optimizer's state from the host, which
            changes no result.
        """
        steps = study.steps * self.budget // 100
        source = TextFiles(
            train=f"{text}/train/*.txt",
            validation=f"{text}/held_out/*.txt",
            document="file",
            name="speeches",
        )
        return Experiment(
            model=study.model(),
            data=TextData(
                sources=(source,),
                vocabulary=SentencePiece(size=study.vocabulary),
                length=study.length,
                seed=self.seed,
            ),
            stages=self._stages(steps, streamed),
            steps=steps,
            batch_size=study.rows,
            schedule=WarmupStableDecay(
                peak=self.peak / 1000,
                total_steps=steps,
                warmup_steps=steps // 20,
                decay_fraction=0.2,
            ),
            model_dir=str(model_dir),
            update=Update(clip_by=ClipBy.LAYER, mean_shared_gradient=self.mean),
            seed=self.seed,
            eval_every=study.steps // study.evaluations,
            save_every=study.steps // 4,
            keep=1,
        )

    def _stages(self, steps: int, streamed: bool) -> tuple[Stage, ...]:
        offload = OffloadPlan(weights=("",), optimizer_state=True, streamed=streamed)
        real = Stage(name="real", form=Form.STACKED, offload=offload if streamed else None)
        if self.unit is None:
            return (real,)
        parts = (Part(pattern=OWN[self.own]),) if OWN[self.own] else ()
        pseudo = Stage(name="pseudo", unit=self.unit, parts=parts, until=self._until(steps))
        # The study compares all policies, also those that do not go with the gradients.
        return pseudo, dataclasses.replace(
            real, optimizer_state=Policy[self.policy], allow_other_scale=True
        )

    def _until(self, steps: int) -> AtStep | LossSlope | GradientAgreement:
        latest = steps * self.switch // 100
        if self.trigger == "slope":
            return LossSlope(at_most=latest, least_decrease=4.0, window=steps // 20, checks=2)
        if self.trigger == "agreement":
            return GradientAgreement(at_most=latest, every=steps // 40, threshold=0.5, checks=3)
        return AtStep(step=latest)


def planned() -> list[Variant]:
    """Returns the runs of the study, those that say most first."""
    compared = [Variant(unit=None), Variant(unit=1, switch=60), Variant(unit=2, switch=60)]
    seeds = [dataclasses.replace(v, seed=seed) for seed in range(3) for v in compared]
    grid = [Variant(unit, switch) for switch, unit in itertools.product((60, 30, 10), (1, 2, 4))]
    shorter = [Variant(unit=1, switch=60, budget=budget) for budget in (50, 75)]
    own = [Variant(unit=1, switch=60, own=own) for own in list(OWN)[1:]]
    triggers = [Variant(unit=1, switch=80, trigger=trigger) for trigger in TRIGGERS[1:]]
    peaks = [Variant(unit=None, peak=8), Variant(unit=1, switch=60, peak=8)]
    policies = [
        Variant(unit=1, switch=30, policy=policy.name, mean=mean)
        for mean, policy in itertools.product((True, False), Policy)
    ]
    return list(dict.fromkeys([*seeds, *shorter, *peaks, *grid, *own, *policies, *triggers]))
