"""What one stage of a run compiles: its mesh, its state's description, its two steps.

The loop asks for a `StageProgram` when a stage begins and then only calls it. Everything that can
be wrong about devices is found when the program is made, before anything is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from m6jax import decoding
from m6jax.experiment.experiment import Experiment
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, state_building
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Batch, Transformer
from m6jax.optimizers import Optimizer, schedules
from m6jax.optimizers.rounding import Rounding
from m6jax.pseudo_to_real import delinking, gradient_agreement
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.gradient_agreement import Agreement
from m6jax.pseudo_to_real.second_moments import Observer
from m6jax.training import streaming, train_state, train_step
from m6jax.training.losses import LossSums
from m6jax.training.train_state import TrainState

HostBatch = Mapping[str, np.ndarray]
LearningRate = Callable[[jax.Array], jax.Array]


def describe_state(
    experiment: Experiment, layout: Layout, partitioning: Partitioning, mesh: Mesh
) -> TrainState:
    """Returns the description of a run's state in any layout, all of it on the devices.

    Raises:
      ConfigError: a parameter's dimension does not divide over the mesh.
    """
    return train_state.abstract_state(
        Transformer(experiment.model),
        layout,
        experiment.optimizer,
        partitioning,
        mesh,
        averaged=experiment.update.average_decay is not None,
        master=experiment.update.rounding is Rounding.MASTER,
    )


class StageProgram:
    """Mesh, layout and compiled steps of one stage.

    Attributes:
      layout: how the stack lies.
      mesh: the devices.
      rows: rows of a global training batch.
      abstract: the state's ShapeDtypeStructs with shardings.
    """

    def __init__(
        self,
        experiment: Experiment,
        stage: int,
        start_step: int,
        devices: Sequence[Any] | None = None,
    ):
        """Describes a stage.

        Args:
          experiment: the run.
          stage: number of the stage.
          start_step: updates made when the stage began.
          devices: what to compile for; None: all devices of all processes.

        Raises:
          ConfigError: the mesh does not fit the devices, the rows or the parameters.
        """
        self._experiment = experiment
        self._model = Transformer(experiment.model)
        self._partitioning = experiment.mesh_of(stage)
        plan = self._plan = experiment.offload_of(stage)
        self.layout: Layout = plan.split(experiment.layout(stage))
        self.mesh = self._partitioning.make_mesh(devices)
        self.rows = experiment.rows(stage)
        self._check_rows(self.rows // experiment.update.microbatches, "a microbatch")
        self._check_rows(self.eval_rows, "an evaluation batch")
        self._axes = train_state.logical_axes(self._model.parameters(self.layout))
        self._tx = experiment.optimizer.build(self._axes)
        described = describe_state(experiment, self.layout, self._partitioning, self.mesh)
        self.abstract: TrainState = plan.place(described, self.layout)
        self._shardings = train_state.shardings_of(self.abstract)
        rewarmup = experiment.stages[stage].rewarmup_steps

        def learning_rate(step: jax.Array) -> jax.Array:
            return schedules.rewarmup(experiment.schedule(step), step, start_step, rewarmup)

        self._train = jax.jit(
            self._step(learning_rate, experiment.optimizer, experiment.update),
            donate_argnums=0,
            out_shardings=(self._shardings, None),
        )
        self._evaluate = jax.jit(
            functools.partial(train_step.evaluation_step, model=self._model, layout=self.layout)
        )
        self._compare = jax.jit(
            functools.partial(
                gradient_agreement.gradient_agreement,
                model=self._model,
                layout=self.layout,
                loss=experiment.loss,
            ),
            out_shardings=self._shardings.step,
        )

    def _step(
        self, learning_rate: LearningRate, optimizer: Optimizer, update: train_step.Update
    ) -> Any:
        """Returns the ordinary or the streamed step: (state, batch) -> (state, metrics)."""
        experiment, model, layout = self._experiment, self._model, self.layout
        plan: OffloadPlan = self._plan
        common: dict[str, Any] = {
            "layout": layout,
            "learning_rate": learning_rate,
            "update": update,
        }
        if plan.streamed:
            return functools.partial(
                streaming.streamed_step,
                model=model,
                loss=experiment.loss,
                optimizer=optimizer,
                inputs_on_host=plan.activations,
                **common,
            )
        return functools.partial(
            train_step.train_step,
            loss_fn=train_step.model_loss(model, layout, experiment.loss, plan.activations),
            tx=optimizer.build(self._axes),
            balance=train_step.router_balance(model, layout),
            **common,
        )

    @property
    def model(self) -> Transformer:
        """The network."""
        return self._model

    @property
    def eval_rows(self) -> int:
        """Rows of a global evaluation batch."""
        return self._experiment.eval_batch_size or self._experiment.batch_size

    def initialize(self) -> TrainState:
        """Returns a new state."""
        with self._partitioning.activate(self.mesh):
            return train_state.initialize(
                self._model, self.layout, self._tx, self._experiment.seed, self.abstract
            )

    def initialize_optimizer(self) -> Any:
        """Returns the optimizer's state before its first step."""
        one_layer = train_state.one_layer(
            self._model, self.layout, self._tx, self._experiment.seed, self.abstract
        )
        with self._partitioning.activate(self.mesh):
            return state_building.build(lambda i: one_layer(i).opt_state, self.abstract.opt_state)

    def delink(
        self,
        state: TrainState,
        old: Layout,
        policy: Policy | None,
        batches: Iterable[HostBatch] = (),
    ) -> TrainState:
        """Returns another stage's state in this stage's layout and shardings.

        Args:
          state: of the stage before.
          old: its layout; where it is this stage's, the state only moves.
          policy: for the optimizer's state.
          batches: for MEASURED, at least one.
        """
        first = self.carried_by(policy)
        with self._partitioning.activate(self.mesh):
            state = delinking.delink_by_layer(state, old, self.layout, first, self.abstract)
        return self.measured(state, old, batches) if policy is Policy.MEASURED else state

    def carried_by(self, policy: Policy | None) -> Policy | None:
        """Returns the policy that comes before measuring; any but MEASURED is its own."""
        if policy is not Policy.MEASURED:
            return policy
        mean = self._experiment.update.mean_shared_gradient
        return Policy.COPY if mean else Policy.RESCALE

    def measured(self, state: TrainState, old: Layout, batches: Iterable[HostBatch]) -> TrainState:
        """Returns the state with second moments of what was delinked from some batches.

        Args:
          state: of this stage, delinked with `carried_by`.
          old: the layout that it was delinked from.
          batches: at least one.
        """
        with self._partitioning.activate(self.mesh):
            return self._measured(state, old, batches)

    def _measured(self, state: TrainState, old: Layout, batches: Iterable[HostBatch]) -> TrainState:
        experiment = self._experiment
        update = dataclasses.replace(experiment.update, average_decay=None)

        def observe(state: TrainState, batch: Batch, number: jax.Array) -> TrainState:
            observer = Observer(experiment.optimizer, old, self.layout, number)
            step = self._step(lambda step: jnp.float32(0), observer, update)
            # Every batch as at a step of its own, for the sake of dropout.
            seen, _ = step(state.replace(step=state.step + number), batch)  # type: ignore[attr-defined]
            extra = seen.extra.replace(router_bias=state.extra.router_bias)
            return seen.replace(step=state.step, extra=extra)

        jitted = jax.jit(observe, donate_argnums=0, out_shardings=self._shardings)
        number = -1
        for number, batch in enumerate(batches):
            state = self._settled(jitted(state, self.put(batch), np.int32(number)))
        if number < 0:
            raise ValueError("MEASURED needs at least one batch to measure second moments on")
        return state

    def agreement(self, state: TrainState, batch: HostBatch) -> Agreement:
        """Returns how much the gradients of shared layers agree; see `probing`."""
        with self._partitioning.activate(self.mesh):
            compared = self._compare(state.params, self.put(batch), state.extra.router_bias)
            return self._settled(compared)

    def compile(self, batch: HostBatch) -> Any:
        """Compiles the training step for batches like this one, and returns it: (state, batch)."""
        compiled = self.lower(self.put(batch)).compile()
        return lambda state, batch: self._settled(compiled(state, batch))

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Returns the training step, lowered but not compiled.

        Args:
          batch: global arrays, or ShapeDtypeStructs with shardings as from `describe_batch`.
        """
        with self._partitioning.activate(self.mesh):
            return self._train.lower(self.abstract, batch)

    def describe_batch(self, patches: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a global training batch without arrays: features, lengths and shardings.

        Args:
          patches: image patches of a row, for a model that takes them.
        """
        sharding = self._partitioning.batch_sharding(self.mesh)
        length, patch_dim = self._experiment.data.length, self._experiment.model.patch_dim

        def feature(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.rows, *shape), dtype, sharding=sharding)

        names = ["tokens", "targets", "segment_ids", "positions", "bidirectional"]
        batch = {name: feature(np.int32, length) for name in names}
        batch["loss_weights"] = feature(np.float32, length)
        if patch_dim is not None:
            batch["patches"] = feature(np.float32, patches, patch_dim)
            batch["patch_mask"] = feature(np.int32, length)
        return batch

    def evaluate(self, params: Tree, batch: HostBatch) -> LossSums:
        """Returns the sums of this process's part of an evaluation batch, over all processes."""
        with self._partitioning.activate(self.mesh):
            return self._settled(self._evaluate(params, self.put(batch)))

    def generate(self, params: Tree, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
        """Returns the new tokens of every prompt; see `decoding.generate`.

        A model trained with capacity ONE_X is decoded all the same, dropless.
        """
        # Rows are spread over the devices like those of a batch.
        divisor = self._partitioning.rows_divisor(self.mesh.size)
        filled = prompts + [[]] * (-len(prompts) % divisor)
        with self._partitioning.activate(self.mesh):
            generated = decoding.generate(
                decoding.decoding_model(self._model, force=True),
                params,
                self.layout,
                filled,
                seed=self._experiment.seed,
                **settings,
            )
        return generated.tokens[: len(prompts)]

    def put(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Makes global arrays, rows over the devices, from this process's rows."""
        sharding = self._partitioning.batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows)
            for name, rows in batch.items()
        }

    def _settled(self, results: Any) -> Any:
        """Waits for results on emulated devices, which share a few threads.

        With the programs of several steps under way at once, their collectives can take each
        other's threads and wait for ever. Real devices have queues of their own and need no wait.
        """
        emulated = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(results) if emulated else results

    def _check_rows(self, rows: int, what: str) -> None:
        divisor = self._partitioning.rows_divisor(self.mesh.size)
        if rows % divisor:
            raise ConfigError(
                f"Experiment.batch_size: {what} of {rows} rows does not divide over the"
                f" {divisor} devices that have rows of their own (choose a multiple of {divisor})"
            )
