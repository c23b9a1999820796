"""Delinking a whole training state: parameters, averages, and the optimizer's memory of them.

Parameters and averages are copied to the new layers. What the optimizer remembers of the shared
layer's gradients is not theirs as a matter of course, so the policy is always named:

* COPY: keep it. Right where the shared gradient was the mean over its uses, as it is by default.
* RESCALE: for runs that used the sum: first moments by U / L, second moments by its square.
  (Copied moments of sums nearly freeze training: the second moments keep L squared times their
  size long after the first have shrunk.)
* RESET: forget it, counts included. (Zero moments under an old count overshoot 3 to 6 times.)
* MEASURED: keep first moments, scaled where they are of sums, and measure second moments on a few
  batches (see `measuring`). Needs the new stage's step, so that `delink` alone cannot do it.

The state may be of any optimizer that keeps trees shaped like the parameters (see `moments`); what
a policy must know of it and does not is refused by name.
"""

import enum
from collections.abc import Callable
from typing import Any

import jax

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.layouts import Form, Layout, LayoutError, layer_slices, offload, state_building
from m6jax.optimizers import moments
from m6jax.training.train_state import TrainState, shardings_of


class Policy(enum.Enum):
    """What happens to the optimizer's state of the layers that are delinked."""

    COPY = "copy"
    RESCALE = "rescale"
    RESET = "reset"
    MEASURED = "measured"


def delink(state: TrainState, old: Layout, new: Layout, policy: Policy | None) -> TrainState:
    """Takes a state to a layout with more distinct layers, or from STACKED to UNROLLED.

    Pure; runs under jit with the target's shardings, and under eval_shape.

    Args:
      state: in the old layout.
      old: how it lies.
      new: how it shall lie.
      policy: for the optimizer's state; None only where the distinct layers stay the same.

    Raises:
      LayoutError: the new layout cannot be reached from the old one or is the old one, there is no
        policy, or one that does not know the optimizer's state.
    """
    if old == new:
        raise LayoutError(
            f"the state already has {new.unit} distinct of {new.depth} layers"
            f" ({new.form.name}{', parts of their own' if new.parts else ''}): there is nothing to"
            " delink"
        )
    opt_state = state.opt_state
    grown = [
        name
        for name, _ in pytrees.flatten_named(state.params)
        if layouts.LeafName.of(name).in_stack and old.unit_of(name) != new.unit_of(name)
    ]
    if grown:
        if policy is None:
            raise LayoutError(
                f"delinking {grown[0]} from {old.unit_of(grown[0])} layers into"
                f" {new.unit_of(grown[0])} needs a policy for the optimizer's state (choices:"
                f" {', '.join(Policy.__members__)})"
            )
        moments.check_shapes(opt_state, state.params)
        opt_state = apply_policy(opt_state, policy, old, new)

    def convert(tree: Any) -> Any:
        """Of what may have no layers, such as the state of an optimizer without memory."""
        layers = any(layouts.LeafName.of(name).in_stack for name in pytrees.names(tree))
        return layouts.convert(tree, old, new) if layers else tree

    return state.replace(  # type: ignore[attr-defined]
        params=layouts.convert(state.params, old, new),
        opt_state=convert(opt_state),
        extra=convert(state.extra),
    )


def delink_by_layer(
    state: TrainState, old: Layout, new: Layout, policy: Policy | None, abstract: TrainState
) -> TrainState:
    """Does what `delink` does, with one layer at a time on the device.

    Where the old layers are unrolled, or cut in runs, a whole leaf is on the device.

    Args:
      state: arrays, in the old layout.
      old: how it lies; where it is the new layout, the state only moves.
      new: how it shall lie.
      policy: for the optimizer's state.
      abstract: the new state's ShapeDtypeStructs with shardings.

    Raises:
      LayoutError: see `delink`.
    """
    if old == new:
        return jax.device_put(state, shardings_of(abstract))

    def whole(state: TrainState) -> TrainState:
        return delink(offload.to_device(state), old, new, policy)

    jax.eval_shape(whole, state)  # refuses what cannot be
    if old.form is Form.UNROLLED or old.borders:

        def make_leaf(name: str, leaf: Any) -> jax.Array:
            select = jax.jit(
                lambda state: dict(pytrees.flatten_named(whole(state)))[name],
                out_shardings=leaf.sharding,
            )
            return jax.block_until_ready(select(state))

        return pytrees.map_named(make_leaf, abstract)

    return state_building.build(one_layer(old, new, policy), abstract, state)


def one_layer(
    old: Layout, new: Layout, policy: Policy | None
) -> Callable[[jax.Array, TrainState], TrainState]:
    """Returns what gives a delinked state's layer of a number; see `state_building.build`."""

    def make(i: jax.Array, state: TrainState) -> TrainState:
        def take(name: str, leaf: jax.Array) -> jax.Array:
            if layouts.LeafName.of(name).in_stack:
                leaf = layer_slices.take(leaf, i, as_stack=True)
            return offload.to_device(leaf)

        layer = pytrees.map_named(take, state)
        opt_state = apply_policy(layer.opt_state, policy, old, new)
        layer = layer.replace(opt_state=opt_state)
        return layouts.unstack(layer) if new.form is Form.UNROLLED else layer

    return make


def apply_policy(opt_state: Any, policy: Policy | None, old: Layout, new: Layout) -> Any:
    """Returns an optimizer's state, still in the old layout, as a policy wants it.

    Args:
      opt_state: of all layers or of some.
      policy: None: as it is.
      old: the layout before.
      new: the layout after.
    """

    def share(name: str) -> float:
        """How much of the shared gradient is a new layer's; 1 for what is not delinked."""
        return old.unit_of(name) / new.unit_of(name) if layouts.LeafName.of(name).in_stack else 1.0

    if policy is Policy.MEASURED:
        raise LayoutError(
            "MEASURED needs batches and a step: delink with COPY (RESCALE where gradients were"
            " sums), then measure, as stage_switch.delink does"
        )
    if policy is None or policy is Policy.COPY:
        return opt_state
    if policy is Policy.RESET:
        return moments.reset_moments(opt_state, lambda name: share(name) != 1)
    return moments.scale_moments(opt_state, share)
