"""How much the gradients of a stage's shared layers agree, on the stage's devices."""

import functools

import jax

from m6jax.experiment.programs import HostBatch, StageProgram
from m6jax.pseudo_to_real.gradient_agreement import Agreement, gradient_agreement
from m6jax.training.losses import Loss
from m6jax.training.train_state import TrainState


class GradientComparison:
    """The comparison of one stage, compiled when it is first asked for."""

    def __init__(self, program: StageProgram, loss: Loss):
        self._program = program
        compare = functools.partial(
            gradient_agreement, model=program.model, layout=program.layout, loss=loss
        )
        self._compare = jax.jit(compare, out_shardings=program.shardings.step)

    def __call__(self, state: TrainState, batch: HostBatch) -> Agreement:
        """Returns the agreement on a batch; see `pseudo_to_real.gradient_agreement`."""
        program = self._program
        with program.activate():
            compared = self._compare(state.params, program.put(batch), state.extra.router_bias)
            return program.settled(compared)
