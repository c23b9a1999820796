"""What one stage of a run compiles: its mesh, its state's description, its two steps.

The loop asks for a `StageProgram` when a stage begins and then only calls it. Everything that can
be wrong about devices is found when the program is made, before anything is compiled. What else is
done with a stage's state stands beside it: `stage_switch` takes a state to the next stage,
`sampling` generates, `gradient_comparison` compares gradients.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from m6jax.experiment.experiment import Experiment
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, state_building
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.block import Batch
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Optimizer, schedules
from m6jax.optimizers.rounding import Rounding
from m6jax.training import streaming, train_state, train_step
from m6jax.training.losses import LossSums
from m6jax.training.train_state import TrainState

HostBatch = Mapping[str, np.ndarray]
LearningRate = Callable[[jax.Array], jax.Array]


def state_shapes(
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
        scaled=experiment.model.dtype == "float16",
    )


class StageProgram:
    """Mesh, layout and compiled steps of one stage.

    Attributes:
      layout: how the stack lies.
      mesh: the devices.
      rows: rows of a global training batch.
      abstract: the state's ShapeDtypeStructs with shardings.
      shardings: those alone.
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
        described = state_shapes(experiment, self.layout, self._partitioning, self.mesh)
        self.abstract: TrainState = plan.place(described, self.layout)
        self.shardings: TrainState = train_state.shardings_of(self.abstract)
        rewarmup = experiment.stages[stage].rewarmup_steps

        def learning_rate(step: jax.Array) -> jax.Array:
            return schedules.rewarmup(experiment.schedule(step), step, start_step, rewarmup)

        self._train = jax.jit(
            self.step(learning_rate, experiment.optimizer, experiment.update),
            donate_argnums=0,
            out_shardings=(self.shardings, None),
        )
        self._evaluate = jax.jit(
            functools.partial(train_step.evaluation_step, model=self._model, layout=self.layout)
        )

    def step(
        self, learning_rate: LearningRate, optimizer: Optimizer, update: train_step.Update
    ) -> Any:
        """Returns the step, ordinary or streamed, not compiled: (state, batch) -> (state, metrics).

        Args:
          learning_rate: of a step.
          optimizer: in the place of the experiment's.
          update: likewise.
        """
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

    @property
    def rows_divisor(self) -> int:
        """Devices that have rows of their own; what every batch divides over."""
        return self._partitioning.rows_divisor(self.mesh.size)

    def activate(self) -> AbstractContextManager[Any]:
        """Returns the context in which what is traced knows the mesh."""
        return self._partitioning.activate(self.mesh)

    def initialize(self) -> TrainState:
        """Returns a new state."""
        with self.activate():
            return train_state.initialize(
                self._model, self.layout, self._tx, self._experiment.seed, self.abstract
            )

    def initialize_optimizer(self) -> Any:
        """Returns the optimizer's state before its first step."""
        one_layer = train_state.one_layer(
            self._model, self.layout, self._tx, self._experiment.seed, self.abstract
        )
        with self.activate():
            return state_building.build(lambda i: one_layer(i).opt_state, self.abstract.opt_state)

    def compile(self, batch: HostBatch) -> Any:
        """Compiles the training step for batches like this one, and returns it: (state, batch)."""
        compiled = self.lower(self.put(batch)).compile()
        return lambda state, batch: self.settled(compiled(state, batch))

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Returns the training step, lowered but not compiled; `batch` as for `trace`."""
        with self.activate():
            return self.trace(batch).lower()

    def trace(self, batch: Batch) -> jax.stages.Traced:
        """Returns the training step as jax sees it.

        Args:
          batch: global arrays, or ShapeDtypeStructs with shardings as from `batch_shapes`.
        """
        with self.activate():
            return self._train.trace(self.abstract, batch)

    def batch_shapes(self, patches: int) -> dict[str, jax.ShapeDtypeStruct]:
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
        with self.activate():
            return self.settled(self._evaluate(params, self.put(batch)))

    def put(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Makes global arrays, rows over the devices, from this process's rows."""
        sharding = self._partitioning.batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows)
            for name, rows in batch.items()
        }

    def settled(self, results: Any) -> Any:
        """Waits for results on emulated devices, which share a few threads.

        With the programs of several steps under way at once, their collectives can take each
        other's threads and wait for ever. Real devices have queues of their own and need no wait.
        """
        emulated = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(results) if emulated else results

    def _check_rows(self, rows: int, what: str) -> None:
        divisor = self.rows_divisor
        if rows % divisor:
            raise ConfigError(
                f"Experiment.batch_size: {what} of {rows} rows does not divide over the"
                f" {divisor} devices that have rows of their own (choose a multiple of {divisor})"
            )
