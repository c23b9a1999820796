"""What a run is, as one value: model, data, optimizer, and the stages it goes through.

>>> Experiment(
...   model=ModelConfig(...), data=TextData(...), steps=1000, batch_size=32, model_dir="/tmp/run",
...   schedule=WarmupStableDecay(peak=3e-3, total_steps=1000, warmup_steps=50),
...   stages=(
...     Stage(name="pseudo", unit=1, until=AtStep(step=300)),
...     Stage(name="real", form="UNROLLED", optimizer_state="COPY"),
...   ))

Everything that can be known to be wrong without looking at data or devices stops here.
"""

from m6jax.data.config import TextData
from m6jax.decoding import Greedy, Sampling
from m6jax.delinking import Policy
from m6jax.layouts import Form, Layout
from m6jax.losses import Loss
from m6jax.modeling.config import ModelConfig, Positions, Remat, require_positive
from m6jax.offload import OffloadPlan
from m6jax.optimizers import Adafactor, AdamW
from m6jax.partitioning import Partitioning
from m6jax.schedules import Constant, Cosine, InverseSquareRoot, WarmupStableDecay
from m6jax.streaming import check_update
from m6jax.train_step import Update
from m6jax.triggers import AtStep
from m6jax.validated import ConfigError, validated

# Settings of where and how a run goes on, which may change when it is resumed; all others are what
# the run is, and may not.
MAY_CHANGE = frozenset(
    {
        "Experiment.partitioning",
        "Experiment.steps",
        "Experiment.log_every",
        "Experiment.eval_every",
        "Experiment.save_every",
        "Experiment.keep",
        "Experiment.eval_batch_size",
        "Experiment.sample",
        "Experiment.model_dir",
        "Update.microbatches",
        "Loss.chunk_length",
        "TextData.prefetch",
        "Stage.partitioning",
        "Stage.offload",
    }
)


@validated
class Stage:
    """A part of a run with one layout of the layers.

    Attributes:
      name: what it is called in metrics and plots; the paper's two are `pseudo` and `real`.
      unit: U, distinct layers; None: all of them.
      form: STACKED, or UNROLLED where all layers are distinct.
      until: when the stage ends; None for the last, which goes on to the end of the run.
      batch_size: rows of a batch; None: as in the Experiment.
      optimizer_state: what becomes of the optimizer's state when the stage begins; to be named in
        every stage that delinks.
      rewarmup_steps: steps in which the learning rate comes back after the stage's beginning; 0:
        it goes on undisturbed.
      partitioning: mesh of the stage; None: as in the Experiment.
      offload: what rests in host memory, and whether the step is streamed; None: nothing.
    """

    name: str
    unit: int | None = None
    form: Form = Form.STACKED
    until: AtStep | None = None
    batch_size: int | None = None
    optimizer_state: Policy | None = None
    rewarmup_steps: int = 0
    partitioning: Partitioning | None = None
    offload: OffloadPlan | None = None

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be."""
        require_positive(self, "unit", "batch_size")
        if self.rewarmup_steps < 0:
            raise ConfigError(f"Stage.rewarmup_steps: {self.rewarmup_steps} is negative")


@validated
class Sample:
    """Text to be generated when a run ends, for a person to read.

    Attributes:
      prompts: beginnings.
      method: how the next token is chosen.
      max_new_tokens: tokens to add.
    """

    prompts: tuple[str, ...] = ()
    method: Greedy | Sampling = Sampling(temperature=0.8)
    max_new_tokens: int = 48


@validated
class Experiment:
    """A run.

    Attributes:
      model: the network.
      data: what it learns from.
      stages: what the run goes through, at least one.
      steps: updates in all.
      batch_size: rows of a batch.
      schedule: learning rate.
      model_dir: where everything that the run writes goes; local or a network path.
      optimizer: what makes updates of gradients.
      loss: what is minimised.
      update: microbatches, clipping, averages.
      partitioning: the mesh.
      seed: of initial values and dropout.
      log_every: steps between lines of metrics.
      eval_every: steps between evaluations on held-out documents; also at the end of each stage.
      save_every: steps between checkpoints; also at the end of each stage.
      keep: newest checkpoints that are kept.
      eval_batch_size: rows of an evaluation batch; None: batch_size.
      sample: text to generate at the end; None: none.
    """

    model: ModelConfig
    data: TextData
    stages: tuple[Stage, ...]
    steps: int
    batch_size: int
    schedule: Constant | Cosine | InverseSquareRoot | WarmupStableDecay
    model_dir: str
    optimizer: AdamW | Adafactor = AdamW()
    loss: Loss = Loss()
    update: Update = Update()
    partitioning: Partitioning = Partitioning()
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep: int = 3
    eval_batch_size: int | None = None
    sample: Sample | None = None

    def check(self) -> None:
        """Raises ConfigError for parts that do not fit together."""
        require_positive(self, "steps", "batch_size", "log_every", "eval_every", "save_every")
        require_positive(self, "keep", "eval_batch_size")
        if not self.stages:
            raise ConfigError("Experiment.stages: at least one stage is needed")
        if not self.model.causal:
            raise ConfigError(
                "ModelConfig.causal: a run learns to predict the next token, which a model with"
                " causal = False sees (leave it True; other uses call the Transformer themselves)"
            )
        if self.model.positions is Positions.LEARNED and self.data.length > self.model.max_length:
            raise ConfigError(
                f"TextData.length: rows of {self.data.length} tokens are longer than"
                f" ModelConfig.max_length = {self.model.max_length} learned positions"
            )
        for i in range(len(self.stages)):
            self.layout(i)
            rows = self.rows(i)
            if rows % self.update.microbatches:
                raise ConfigError(
                    f"Update.microbatches: {self.update.microbatches} do not divide a batch of"
                    f" {rows} rows (stage {self.stages[i].name!r})"
                )
            self._check_offload(i)
        self._check_order()

    def layout(self, stage: int) -> Layout:
        """Returns the layout of a stage; raises ConfigError where the unit does not fit."""
        unit = self.stages[stage].unit or self.model.num_layers
        return self.model.layout(unit, self.stages[stage].form)

    def rows(self, stage: int) -> int:
        """Returns the rows of a batch of a stage."""
        return self.stages[stage].batch_size or self.batch_size

    def mesh_of(self, stage: int) -> Partitioning:
        """Returns the partitioning of a stage."""
        return self.stages[stage].partitioning or self.partitioning

    def offload_of(self, stage: int) -> OffloadPlan:
        """Returns the offload plan of a stage; the empty one where there is none."""
        return self.stages[stage].offload or OffloadPlan()

    def end_of(self, stage: int) -> AtStep:
        """Returns when a stage ends."""
        return self.stages[stage].until or AtStep(step=self.steps)

    def _check_offload(self, stage: int) -> None:
        plan = self.offload_of(stage)
        if plan.streamed:
            check_update(self.update)
            return
        if plan.weights and self.model.remat is Remat.NOTHING:
            raise ConfigError(
                "OffloadPlan.weights: with ModelConfig.remat = NOTHING the copies of all layers'"
                " weights wait for the backward pass on the device (set ModelConfig.remat ="
                " 'ALL_BUT_PRODUCTS' or 'FULL', or OffloadPlan.streamed = True)"
            )
        if plan.activations and self.model.remat is not Remat.FULL:
            raise ConfigError(
                f"OffloadPlan.activations: with ModelConfig.remat = {self.model.remat.name} more"
                " than the layers' inputs waits for the backward pass, on the device (set"
                " ModelConfig.remat = 'FULL', or OffloadPlan.streamed = True)"
            )

    def _check_order(self) -> None:
        ends = 0
        for i, stage in enumerate(self.stages):
            where = f"stage {stage.name!r}"
            last = i == len(self.stages) - 1
            if last and stage.until is not None:
                raise ConfigError(f"Stage.until: the last {where} ends with Experiment.steps")
            if not last and stage.until is None:
                raise ConfigError(f"Stage.until: {where} is not the last and must say when it ends")
            step = self.end_of(i).step
            if not ends < step <= self.steps or (not last and step == self.steps):
                raise ConfigError(
                    f"AtStep.step: {where} would end at step {step}, after {ends} and before the"
                    f" run's {self.steps} steps is needed"
                )
            ends = step
            if i == 0:
                continue
            before, after = self.layout(i - 1), self.layout(i)
            if after.unit % before.unit:
                raise ConfigError(
                    f"Stage.unit: {where} has {after.unit} distinct layers, which is not a multiple"
                    f" of the {before.unit} before it"
                )
            if after.unit != before.unit and stage.optimizer_state is None:
                raise ConfigError(
                    f"Stage.optimizer_state: {where} delinks {before.unit} layers into"
                    f" {after.unit}; say what becomes of the optimizer's state (choices:"
                    f" {', '.join(Policy.__members__)})"
                )
