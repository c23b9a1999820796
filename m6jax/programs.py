"""What one stage of a run compiles: its mesh, its state's description, its two steps.

The loop asks for a `StageProgram` when a stage begins and then only calls it. Everything that can
be wrong about devices is found when the program is made, before anything is compiled.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from m6jax import decoding, delinking, offload, schedules, streaming, train_state, train_step
from m6jax.experiment import Experiment
from m6jax.layouts import Layout
from m6jax.losses import LossSums
from m6jax.modeling.transformer import Transformer
from m6jax.offload import OffloadPlan
from m6jax.pytrees import Tree
from m6jax.train_state import TrainState
from m6jax.validated import ConfigError

HostBatch = Mapping[str, np.ndarray]
LearningRate = Callable[[jax.Array], jax.Array]


class StageProgram:
    """Mesh, layout and compiled steps of one stage.

    Attributes:
      layout: how the stack lies.
      mesh: the devices.
      rows: rows of a global training batch.
      abstract: the state's ShapeDtypeStructs with shardings.
    """

    def __init__(self, experiment: Experiment, stage: int, start_step: int):
        """Describes a stage.

        Args:
          experiment: the run.
          stage: number of the stage.
          start_step: updates made when the stage began.

        Raises:
          ConfigError: the mesh does not fit the devices, the rows or the parameters.
        """
        self._experiment = experiment
        self._model = Transformer(experiment.model)
        self._partitioning = experiment.mesh_of(stage)
        self.layout: Layout = experiment.layout(stage)
        self.mesh = self._partitioning.make_mesh()
        self.rows = experiment.rows(stage)
        self._check_rows(self.rows // experiment.update.microbatches, "a microbatch")
        self._check_rows(self.eval_rows, "an evaluation batch")
        axes = train_state.logical_axes(self._model.parameters(self.layout))
        self._tx = experiment.optimizer.build(axes)
        plan = experiment.offload_of(stage)
        described = train_state.describe(
            self._model,
            self.layout,
            experiment.optimizer,
            self._partitioning,
            self.mesh,
            averaged=experiment.update.average_decay is not None,
        )
        self.abstract: TrainState = plan.place(described, self.layout)
        self._shardings = train_state.shardings_of(self.abstract)
        rewarmup = experiment.stages[stage].rewarmup_steps

        def learning_rate(step: jax.Array) -> jax.Array:
            return schedules.rewarmup(experiment.schedule(step), step, start_step, rewarmup)

        self._train = jax.jit(
            self._step(plan, learning_rate), donate_argnums=0, out_shardings=(self._shardings, None)
        )
        self._evaluate = jax.jit(
            functools.partial(train_step.evaluation_step, model=self._model, layout=self.layout)
        )

    def _step(self, plan: OffloadPlan, learning_rate: LearningRate) -> Any:
        """Returns the ordinary or the streamed step: (state, batch) -> (state, metrics)."""
        experiment, model, layout = self._experiment, self._model, self.layout
        common: dict[str, Any] = {
            "layout": layout,
            "learning_rate": learning_rate,
            "update": experiment.update,
        }
        if plan.streamed:
            return functools.partial(
                streaming.streamed_step,
                model=model,
                loss=experiment.loss,
                optimizer=experiment.optimizer,
                inputs_on_host=plan.activations,
                **common,
            )
        return functools.partial(
            train_step.train_step,
            loss_fn=train_step.model_loss(model, layout, experiment.loss, plan.activations),
            tx=self._tx,
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

    def delink(self, state: TrainState, old: Layout, policy: delinking.Policy | None) -> TrainState:
        """Returns another stage's state in this stage's layout and shardings.

        Args:
          state: of the stage before.
          old: its layout.
          policy: for the optimizer's state.
        """
        convert = functools.partial(delinking.delink, old=old, new=self.layout, policy=policy)

        def fn(state: TrainState) -> TrainState:
            return convert(offload.to_device(state))

        with self._partitioning.activate(self.mesh):
            return jax.jit(fn, out_shardings=self._shardings)(state)

    def compile(self, batch: HostBatch) -> Any:
        """Compiles the training step for batches like this one, and returns it: (state, batch)."""
        with self._partitioning.activate(self.mesh):
            compiled = self._train.lower(self.abstract, self.put(batch)).compile()
        return lambda state, batch: self._settled(compiled(state, batch))

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
