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

import functools

from m6jax.data.config import TextData
from m6jax.decoding import Beam, Greedy, Sampling
from m6jax.experiment.rules import best_of, check_offload, check_pictures, check_scale
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError, PathName, adjustable, nearest, validated
from m6jax.layouts import Form, Layout, Part
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, Positions, require_positive
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.optax_wrapper import Optax
from m6jax.optimizers.rounding import check_rounding
from m6jax.optimizers.schedules import Constant, Cosine, InverseSquareRoot, WarmupStableDecay
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.gradient_agreement import shares
from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope, Trigger
from m6jax.trackers import MLflow, WandB
from m6jax.training.losses import Loss
from m6jax.training.train_step import Update


@validated
class Stage:
    """A part of a run with one layout of the layers.

    Attributes:
      name: what it is called in metrics and plots; the paper's two are `pseudo` and `real`.
      unit: U, distinct layers; None: all of them.
      parts: leaves of the layers with units of their own, such as norms and routers; each unit must
        divide the next larger one.
      form: STACKED, or UNROLLED where all layers are distinct.
      until: what ends the stage; None for the last, which goes on to the end of the run.
      batch_size: rows of a batch; None: as in the Experiment.
      optimizer_state: what becomes of the optimizer's state when the stage begins; to be named in
        every stage that delinks.
      allow_other_scale: accept an optimizer_state that does not go with
        `Update.mean_shared_gradient`: RESCALE for means, COPY for sums.
      measured_batches: how many of the coming batches second moments are measured on, where
        optimizer_state is MEASURED; they are not taken out of the data's order.
      rewarmup_steps: steps in which the learning rate comes back after the stage's beginning; 0:
        it goes on undisturbed.
      partitioning: mesh of the stage; None: as in the Experiment.
      offload: what rests in host memory, and whether the step is streamed; None: nothing.
    """

    name: str
    unit: int | None = None
    parts: tuple[Part, ...] = ()
    form: Form = Form.STACKED
    until: AtStep | LossSlope | GradientAgreement | None = None
    batch_size: int | None = None
    optimizer_state: Policy | None = None
    allow_other_scale: bool = adjustable(default=False)
    measured_batches: int = 4
    rewarmup_steps: int = 0
    partitioning: Partitioning | None = adjustable(default=None)
    offload: OffloadPlan | None = adjustable(default=None)

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be."""
        require_positive(self, "unit", "batch_size", "measured_batches")
        if self.rewarmup_steps < 0:
            raise ConfigError(f"Stage.rewarmup_steps: {self.rewarmup_steps} is negative")


@validated
class Sample:
    """Text to be generated when a run ends, for a person to read.

    Attributes:
      prompts: beginnings.
      method: how the next token is chosen.
      max_new_tokens: tokens to add.
      stop: a text ends before the first of these strings that it has after its prompt.
      num_samples: texts of each prompt; with `Sampling` alone they differ.
      seed: of what is drawn; None: `Experiment.seed`.
      batch_size: texts that are written at a time.
    """

    prompts: tuple[str, ...] = ()
    method: Greedy | Sampling | Beam = Sampling(temperature=0.8)
    max_new_tokens: int = 48
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    seed: int | None = None
    batch_size: int = 16

    def check(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        require_positive(self, "max_new_tokens", "num_samples", "batch_size")
        if "" in self.stop:
            raise ConfigError("Sample.stop: every text has the empty string (leave it out)")
        if self.num_samples > 1 and not isinstance(self.method, Sampling):
            raise ConfigError(
                f"Sample.num_samples: {type(self.method).__name__} finds one text of a prompt, not"
                f" {self.num_samples} (set Sample.method = @Sampling())"
            )
        if self.stop and isinstance(self.method, Beam):
            raise ConfigError(
                "Sample.stop: the texts of Beam change until the end, so that none can be stopped"
                " before (leave it empty, or choose Greedy or Sampling)"
            )


@validated
class Initial:
    """A checkpoint of another run, in whose state a run begins.

    Its layers are delinked on the way; the stage says what becomes of the optimizer's state
    (`Stage.optimizer_state`). It is read once: the run saves what it begins with.

    Attributes:
      model_dir: of the other run; or a folder in Hugging Face's format (config.json and
        *.safetensors of Llama, Mistral or Mixtral), of which parameters alone are taken.
      step: of its checkpoint; None: the newest.
      stage: name of the stage in which the run begins; None: the last.
      parameters_only: the optimizer begins anew.
      restart: the run begins at step 0 with the first row of its data, instead of going on at the
        step and the place in the data of the checkpoint; so it is with Hugging Face's folder.
      upcycle: the other model is dense in layers that are sparse here: each of their experts begins
        as a copy of its feed-forward (see `pseudo_to_real.upcycling`). Needs parameters_only.
      keep_function: with upcycle: refuse routers with which the model would not begin as the other.
    """

    model_dir: PathName
    step: int | None = None
    stage: str | None = None
    parameters_only: bool = False
    restart: bool = False
    upcycle: bool = False
    keep_function: bool = True

    def check(self) -> None:
        """Raises ConfigError for a step that cannot be, or an optimizer that knows no experts."""
        if self.step is not None and self.step < 0:
            raise ConfigError(f"Initial.step: {self.step} is negative")
        if self.upcycle and not self.parameters_only:
            raise ConfigError(
                "Initial.upcycle: the other optimizer knows nothing of experts (set"
                " Initial.parameters_only = True)"
            )


@validated
class Experiment:
    """A run.

    Attributes:
      model: the network.
      data: what it learns from.
      stages: what the run goes through, at least one.
      steps: updates in all. A run may be made longer: see `total_steps` of the schedule.
      batch_size: rows of a batch.
      schedule: learning rate.
      model_dir: where everything that the run writes goes; local or a network path.
      optimizer: what makes updates of gradients.
      loss: what is minimised.
      update: microbatches, clipping, averages.
      partitioning: the mesh.
      seed: of initial values and dropout.
      log_every: steps between lines of metrics.
      agreement_every: steps between comparisons of the gradients of shared layers, which are
        logged; None: only those that a stage's GradientAgreement asks for.
      eval_every: steps between evaluations on held-out documents; also at the end of each stage.
      save_every: steps between checkpoints; also at the end of each stage.
      most_skipped: updates in a row that may be skipped because loss or gradient is not finite;
        after one more the run stops.
      keep: newest checkpoints that are kept.
      keep_best: checkpoints that are kept because they are the best by `best_metric`, beside the
        newest; held-out documents are then evaluated before each checkpoint, but not before one
        that is written because the run is asked to stop.
      best_metric: what `keep_best` compares: `loss`, `accuracy`, or `mean_loss` of several held-out
        sets; of all sets together, or of one, as in `books/loss`.
      eval_batch_size: rows of an evaluation batch; None: batch_size.
      sample: text to generate at the end; None: none.
      initial: the checkpoint of another run in whose state the run begins; None: it begins anew.
      trackers: services that get the metrics too, such as @WandB(); none by default.
    """

    model: ModelConfig
    data: TextData
    stages: tuple[Stage, ...]
    steps: int = adjustable()
    batch_size: int
    schedule: Constant | Cosine | InverseSquareRoot | WarmupStableDecay
    model_dir: PathName = adjustable()
    optimizer: AdamW | Adafactor | Optax = AdamW()
    loss: Loss = Loss()
    update: Update = Update()
    partitioning: Partitioning = adjustable(default=Partitioning())
    seed: int = 0
    log_every: int = adjustable(default=10)
    agreement_every: int | None = adjustable(default=None)
    eval_every: int = adjustable(default=500)
    save_every: int = adjustable(default=500)
    most_skipped: int = adjustable(default=10)
    keep: int = adjustable(default=3)
    keep_best: int = adjustable(default=0)
    best_metric: str = adjustable(default="loss")
    eval_batch_size: int | None = adjustable(default=None)
    sample: Sample | None = adjustable(default=None)
    initial: Initial | None = None
    trackers: tuple[WandB | MLflow, ...] = adjustable(default=())

    def check(self) -> None:
        """Raises ConfigError for parts that do not fit together."""
        require_positive(self, "steps", "batch_size", "log_every", "eval_every", "save_every")
        require_positive(self, "keep", "eval_batch_size", "agreement_every")
        if self.most_skipped < 0:
            raise ConfigError(f"Experiment.most_skipped: {self.most_skipped} is negative")
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
        check_pictures(self.model, self.data)
        if self.keep_best:
            best_of(self.keep_best, self.best_metric, self.data)
        check_rounding(self.update.rounding, self.model.param_dtype)
        for i in range(len(self.stages)):
            self.layout(i).check_names(_layer_names(self.model))
            rows = self.rows(i)
            if rows % self.update.microbatches:
                raise ConfigError(
                    f"Update.microbatches: {self.update.microbatches} do not divide a batch of"
                    f" {rows} rows (stage {self.stages[i].name!r})"
                )
            check_offload(self.offload_of(i), self.model, self.update)
            if not self.stages[i].allow_other_scale:
                where = f"stage {self.stages[i].name!r}"
                check_scale(where, self.stages[i].optimizer_state, self.update)
        self._check_length()
        self._check_order()
        if self.initial is not None:
            self.stage_number(self.initial.stage, "Initial.stage")
        if self.agreement_every and not any(map(self.compares_gradients, range(len(self.stages)))):
            raise ConfigError(
                "Experiment.agreement_every: in no stage do layers share weights, so that there is"
                " nothing to compare (set it to None, or a Stage.unit)"
            )

    def stage_number(self, name: str | None, setting: str) -> int:
        """Returns the number of a stage; raises ConfigError for a name that no stage has.

        Args:
          name: of the stage; None: the last.
          setting: where the name was given.
        """
        names = [stage.name for stage in self.stages]
        if name is None:
            return len(names) - 1
        if name not in names:
            raise ConfigError(f"{setting}: {name!r} is no stage{nearest(name, names)}")
        return names.index(name)

    def layout(self, stage: int) -> Layout:
        """Returns the layout of a stage; raises ConfigError where the unit does not fit."""
        own = self.stages[stage]
        return self.model.layout(own.unit or self.model.num_layers, own.form, own.parts)

    def rows(self, stage: int) -> int:
        """Returns the rows of a batch of a stage."""
        return self.stages[stage].batch_size or self.batch_size

    def mesh_of(self, stage: int) -> Partitioning:
        """Returns the partitioning of a stage."""
        return self.stages[stage].partitioning or self.partitioning

    def offload_of(self, stage: int) -> OffloadPlan:
        """Returns the offload plan of a stage; the empty one where there is none."""
        return self.stages[stage].offload or OffloadPlan()

    def end_of(self, stage: int) -> Trigger:
        """Returns what ends a stage."""
        return self.stages[stage].until or AtStep(step=self.steps)

    def all_rows(self) -> int:
        """Returns the rows that the run takes, at most."""
        ends = [min(self.end_of(i).at_most, self.steps) for i in range(len(self.stages))]
        begins = [0, *ends[:-1]]
        return sum(
            self.rows(i) * max(end - begin, 0)
            for i, (begin, end) in enumerate(zip(begins, ends, strict=True))
        )

    def begin_of(self, stage: int) -> tuple[int, int]:
        """Returns the least and the largest number of updates made before a stage.

        They differ where a trigger of an earlier stage waits for what is measured.
        """
        if stage == 0:
            return 0, 0
        end = self.end_of(stage - 1)
        return max(self.begin_of(stage - 1)[0] + 1, end.at_least), end.at_most

    def compares_gradients(self, stage: int) -> bool:
        """Whether layers share weights in a stage, so that their gradients can be compared."""
        return shares(self.layout(stage), _layer_names(self.model))

    def _check_length(self) -> None:
        total = getattr(self.schedule, "total_steps", self.steps)
        if total < self.steps:
            name = type(self.schedule).__name__
            raise ConfigError(
                f"Experiment.steps: {self.steps} steps, but the learning rate ends at"
                f" {name}.total_steps = {total} (set both to the same: --gin.STEPS where the"
                " configuration has it)"
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
            step = self.end_of(i).at_most
            if not ends < step <= self.steps or (not last and step == self.steps):
                raise ConfigError(
                    f"Stage.until: {where} would end at step {step} at the latest; after {ends} and"
                    f" before the run's {self.steps} steps is needed"
                )
            ends = step
            self.end_of(i).check_stage(where, self.begin_of(i)[1], self.compares_gradients(i))
            if i == 0:
                continue
            self._check_growth(i)

    def _check_growth(self, stage: int) -> None:
        """Refuses a stage that has less distinct layers than the one before, of any part."""
        where = f"stage {self.stages[stage].name!r}"
        before, after = self.layout(stage - 1), self.layout(stage)
        policy = self.stages[stage].optimizer_state
        if policy in (Policy.RESCALE, Policy.MEASURED) and not self.optimizer.moments_known:
            raise ConfigError(
                f"Stage.optimizer_state: {policy.name} in {where} needs to know how the state of"
                f" {type(self.optimizer).__name__} grows with the gradients (choose COPY or RESET,"
                " or AdamW or Adafactor of m6jax)"
            )
        if before == after and self.stages[stage].optimizer_state is not None:
            raise ConfigError(
                f"Stage.optimizer_state: {where} has the layers of the stage before, so that there"
                " is nothing to delink (leave it None)"
            )
        for name in _layer_names(self.model):
            old, new = before.unit_of(name), after.unit_of(name)
            if new % old:
                raise ConfigError(
                    f"Stage.unit: {where} has {new} distinct layers of {name}, which is not a"
                    f" multiple of the {old} before it"
                )
            if new != old and self.stages[stage].optimizer_state is None:
                raise ConfigError(
                    f"Stage.optimizer_state: {where} delinks {old} layers of {name} into {new}; say"
                    f" what becomes of the optimizer's state (choices:"
                    f" {', '.join(Policy.__members__)})"
                )


@functools.cache
def _layer_names(model: ModelConfig) -> tuple[str, ...]:
    # Asked for several times a stage; describing the network takes a while.
    return tuple(Transformer(model).layer_names())
