"""Delinking a whole training state: parameters, averages, and the optimizer's memory of them.

Parameters and averages are copied to the new layers. What the optimizer remembers of the shared
layer's gradients is not theirs as a matter of course, so the policy is always named:

* COPY: keep it. Right where the shared gradient was the mean over its uses, as it is by default.
* RESCALE: for runs that used the sum: first moments by U / L, second moments by its square.
  (Copied moments of sums nearly freeze training: the second moments keep L squared times their
  size long after the first have shrunk.)
* RESET: forget it, counts included. (Zero moments under an old count overshoot 3 to 6 times.)
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from m6jax import layouts, pytrees
from m6jax.layouts import Layout, LayoutError
from m6jax.optimizers import scale_moments
from m6jax.train_state import TrainState


class Policy(enum.Enum):
    """What happens to the optimizer's state of the layers that are delinked."""

    COPY = "copy"
    RESCALE = "rescale"
    RESET = "reset"


def delink(state: TrainState, old: Layout, new: Layout, policy: Policy | None) -> TrainState:
    """Takes a state to a layout with more distinct layers, or from STACKED to UNROLLED.

    Pure; runs under jit with the target's shardings, and under eval_shape.

    Args:
      state: in the old layout.
      old: how it lies.
      new: how it shall lie.
      policy: for the optimizer's state; None only where the distinct layers stay the same.

    Raises:
      LayoutError: the new layout cannot be reached from the old one, or there is no policy.
    """
    opt_state = state.opt_state
    if new.unit != old.unit:
        if policy is None:
            raise LayoutError(
                f"delinking {old.unit} layers into {new.unit} needs a policy for the optimizer's"
                f" state (choices: {', '.join(Policy.__members__)})"
            )
        opt_state = _apply_policy(state, policy, old.unit / new.unit)
    return state.replace(  # type: ignore[attr-defined]
        params=layouts.convert(state.params, old, new),
        opt_state=layouts.convert(opt_state, old, new),
        extra=layouts.convert(state.extra, old, new)
        if jax.tree.leaves(state.extra)
        else state.extra,
    )


def _apply_policy(state: TrainState, policy: Policy, share: float) -> Any:
    if policy is Policy.COPY:
        return state.opt_state
    if policy is Policy.RESET:
        return pytrees.map_named(
            lambda name, x: jnp.zeros_like(x) if layouts.stack_key(name) else x, state.opt_state
        )
    factors = pytrees.map_named(
        lambda name, _: share if layouts.stack_key(name) else 1.0, state.params
    )
    return scale_moments(state.opt_state, factors)
