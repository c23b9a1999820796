"""How a state comes into a stage: delinked, moved, second moments measured where wanted."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from m6jax.experiment.experiment import Experiment
from m6jax.experiment.programs import HostBatch, StageProgram
from m6jax.layouts import Layout
from m6jax.modeling.block import Batch
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.second_moments import Observer
from m6jax.training.train_state import TrainState
from m6jax.training.train_step import Update


def delink(
    experiment: Experiment,
    program: StageProgram,
    state: TrainState,
    old: Layout,
    policy: Policy | None,
    batches: Iterable[HostBatch] = (),
) -> TrainState:
    """Returns another stage's state in a stage's layout and shardings.

    Args:
      experiment: the run.
      program: the stage.
      state: of the stage before.
      old: its layout; where it is the program's, the state only moves.
      policy: for the optimizer's state.
      batches: for MEASURED, at least one.
    """
    first = policy_of_copies(policy, experiment.update)
    with program.activate():
        state = delinking.delink_by_layer(state, old, program.layout, first, program.abstract)
    if policy is not Policy.MEASURED:
        return state
    return measure(experiment, program, state, old, batches)


def policy_of_copies(policy: Policy | None, update: Update) -> Policy | None:
    """Returns the policy that comes before measuring; any but MEASURED is its own."""
    if policy is not Policy.MEASURED:
        return policy
    return Policy.COPY if update.mean_shared_gradient else Policy.RESCALE


def measure(
    experiment: Experiment,
    program: StageProgram,
    state: TrainState,
    old: Layout,
    batches: Iterable[HostBatch],
) -> TrainState:
    """Returns the state with second moments of what was delinked from some batches.

    Args:
      experiment: the run.
      program: the stage.
      state: of the stage, delinked with `policy_of_copies`.
      old: the layout that it was delinked from.
      batches: at least one.

    Raises:
      ValueError: there is no batch.
    """
    update = dataclasses.replace(experiment.update, average_decay=None)

    def observe(state: TrainState, batch: Batch, number: jax.Array) -> TrainState:
        observer = Observer(experiment.optimizer, old, program.layout, number)
        step = program.step(lambda step: jnp.float32(0), observer, update)
        # Every batch as at a step of its own, for the sake of dropout.
        seen, _ = step(state.replace(step=state.step + number), batch)  # type: ignore[attr-defined]
        kept = state.extra
        extra = seen.extra.replace(router_bias=kept.router_bias, loss_scale=kept.loss_scale)
        return seen.replace(step=state.step, extra=extra)

    jitted = jax.jit(observe, donate_argnums=0, out_shardings=program.shardings)
    number = -1
    with program.activate():
        for number, batch in enumerate(batches):
            state = program.settled(jitted(state, program.put(batch), np.int32(number)))
    if number < 0:
        raise ValueError("MEASURED needs at least one batch to measure second moments on")
    return state
