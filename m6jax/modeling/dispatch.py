"""Moving tokens to their experts and back: sort, gather, exchange.

Every choice (token, expert) is given a *slot*, a row in the expert's buffer of C rows, in order of
tokens; a choice that finds no room has none and its output is exactly zero. With E = 2, C = 2 and
the choices 0 0 1 0 of four tokens:

    slot of choice   0 1 2 -        choice of slot   0 1 | 2 -

One stable sort gives both tables. Rows then move by gathers in both directions, forward and
backward, since each slot has at most one choice and each choice at most one slot: no scatter, no
one-hot matrix of tokens x experts x capacity.

Axis letters: B rows, T length, P prototypes, K choices in a prototype, F = E / P experts of a
prototype, G groups, S tokens of a group, N = G * S tokens, Q = P * K choices of a token, E experts,
C capacity, R = E * G * C slots, M width (embed).
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from m6jax.foundation.validated import ConfigError
from m6jax.modeling.config import CapacityMode, MoEConfig


@struct.dataclass
class Slots:
    """Two tables, each the inverse of the other.

    Attributes:
      of_choice: int32[N, Q], slot of every choice; R where it has none.
      choice: int32[R], choice in every slot, counted through [N, Q]; N * Q where it is empty.
    """

    of_choice: Int[Array, "N Q"]
    choice: Int[Array, " R"]

    @property
    def token(self) -> Int[Array, " R"]:
        """int32[R], token in every slot; N where it is empty."""
        return self.choice // self.of_choice.shape[1]


def capacity_of(
    mode: CapacityMode, factor: float, group_size: int, choices: int, num_experts: int
) -> int:
    """Returns C, the rows that an expert has for a group.

    Args:
      mode: KX counts every one of a token's choices, ONE_X counts the token once.
      factor: room relative to an even load.
      group_size: S.
      choices: P * K.
      num_experts: E.
    """
    wanted = group_size * (choices if mode is CapacityMode.KX else 1)
    # An expert is chosen at most once by a token: more rows than tokens would stay empty.
    return min(group_size, math.ceil(wanted * factor / num_experts))


def group_size_of(group_size: int | None, B: int, T: int) -> int:
    """Returns S for B rows of length T: the stated number, one row, or all there are if fewer."""
    return min(group_size or T, B * T)


def check_groups(group_size: int, B: int, T: int) -> None:
    """Raises ConfigError unless B rows of length T divide into groups."""
    if (B * T) % group_size:
        raise ConfigError(
            f"MoEConfig.group_size: groups of {group_size} tokens do not divide the {B} rows of {T}"
            " tokens that one device has (choose a divisor or a multiple of the length, or other"
            " rows)"
        )


def room_of(experts: MoEConfig, group_size: int) -> int | None:
    """Returns C for groups of `group_size` tokens; None where experts serve every choice."""
    if experts.capacity_factor is None:
        return None
    choices = experts.num_prototypes * experts.num_selected_experts
    mode, factor = experts.capacity_mode, experts.capacity_factor
    return capacity_of(mode, factor, group_size, choices, experts.num_experts)


def first_tokens(mode: CapacityMode, group_size: int, num_prototypes: int) -> Int[Array, " P"]:
    """Returns int32[P], the token of a group at which each prototype begins to serve.

    With ONE_X a prototype has room for about S * factor / P tokens. If all began at token 0 the
    late tokens of a group would get no expert at all, so prototype p begins at p * S / P. Tokens
    before that are not served by it even where room is left: whether it is left depends on later
    tokens, which a causal model must not see.
    """
    if mode is CapacityMode.KX:
        return jnp.zeros((num_prototypes,), jnp.int32)
    return jnp.arange(num_prototypes, dtype=jnp.int32) * group_size // num_prototypes


def assign_slots(expert_index: Int[Array, "G S Q"], num_experts: int, capacity: int) -> Slots:
    """Gives slots to the choices of G groups, tokens in order.

    Args:
      expert_index: int32[G, S, Q], the expert of every choice; E or more for none.
      num_experts: E.
      capacity: C, of each expert for each group.

    Returns:
      Slots for tokens counted through [G, S] and slots through [E, G, C].
    """
    G, S, Q = expert_index.shape
    flat = expert_index.reshape(G, S * Q)
    order = jnp.argsort(flat, axis=-1, stable=True)
    ranked = jnp.take_along_axis(flat, order, axis=-1)
    experts = jnp.arange(num_experts + 1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, experts))(ranked)  # [G, E + 1]

    row_in_expert = jnp.arange(capacity)
    place = first[:, :-1, None] + row_in_expert  # [G, E, C], where in `order` the slot looks
    filled = place < first[:, 1:, None]
    choice = jnp.take_along_axis(order, place.reshape(G, -1), axis=-1, mode="clip")
    choice = choice.reshape(place.shape) + S * Q * jnp.arange(G)[:, None, None]
    choice = jnp.where(filled, choice, G * S * Q).transpose(1, 0, 2)  # [E, G, C]

    row = jnp.arange(S * Q) - jnp.take_along_axis(first, jnp.minimum(ranked, num_experts), axis=-1)
    slot = (ranked * G + jnp.arange(G)[:, None]) * capacity + row
    slot = jnp.where((row < capacity) & (ranked < num_experts), slot, num_experts * G * capacity)
    inverse = jnp.argsort(order, axis=-1)
    of_choice = jnp.take_along_axis(slot, inverse, axis=-1).reshape(G * S, Q)
    return Slots(of_choice.astype(jnp.int32), choice.reshape(-1).astype(jnp.int32))


def count_choices(expert_index: Int[Array, "B T P K"], num_experts: int) -> Int[Array, " E"]:
    """Returns int32[E], how many choices fall on each expert.

    Args:
      expert_index: int32[B, T, P, K], the expert of every choice, among those of its prototype; E
        for none.
      num_experts: E.
    """
    P = expert_index.shape[2]
    F = num_experts // P
    # Only within the prototype: comparing with all E experts costs P times as much.
    in_prototype = expert_index - F * jnp.arange(P, dtype=jnp.int32)[:, None]
    chosen = in_prototype[..., None] == jnp.arange(F)  # [B, T, P, K, F]
    return chosen.sum((0, 1, 3)).reshape(-1)


@jax.custom_vjp
def dispatch(x: Float[Array, "N M"], slots: Slots) -> Float[Array, "R M"]:
    """Returns [R, M]: the token of every slot, zeros in empty ones, from x [N, M]."""
    return _rows(x, slots.token)


def _dispatch_forward(x: Float[Array, "N M"], slots: Slots) -> tuple[Float[Array, "R M"], Slots]:
    return dispatch(x, slots), slots


def _dispatch_backward(
    slots: Slots, gradient: Float[Array, "R M"]
) -> tuple[Float[Array, "N M"], None]:
    return _rows(gradient, slots.of_choice).sum(1), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(
    y: Float[Array, "R M"], weights: Float[Array, "N Q"], slots: Slots
) -> Float[Array, "N M"]:
    """Returns [N, M]: each token's weighted sum over its choices, zero for those without a slot.

    Args:
      y: [R, M], outputs of the experts.
      weights: [N, Q].
      slots: where the choices are.
    """
    return jnp.einsum("nqm,nq->nm", _rows(y, slots.of_choice), weights.astype(y.dtype))


Saved = tuple[Float[Array, "R M"], Float[Array, "N Q"], Slots]


def _combine_forward(
    y: Float[Array, "R M"], weights: Float[Array, "N Q"], slots: Slots
) -> tuple[Float[Array, "N M"], Saved]:
    return combine(y, weights, slots), (y, weights, slots)


def _combine_backward(
    saved: Saved, gradient: Float[Array, "N M"]
) -> tuple[Float[Array, "R M"], Float[Array, "N Q"], None]:
    y, weights, slots = saved
    weight_of_slot = jnp.take(weights.reshape(-1), slots.choice, mode="fill", fill_value=0)
    to_experts = _rows(gradient, slots.token) * weight_of_slot[:, None].astype(gradient.dtype)
    to_weights = jnp.einsum(
        "nqm,nm->nq",
        _rows(y, slots.of_choice),
        gradient,
        preferred_element_type=jnp.float32,
    )
    return to_experts, to_weights.astype(weights.dtype), None


combine.defvjp(_combine_forward, _combine_backward)


def _rows(x: Float[Array, "n M"], index: Int[Array, "*I"]) -> Float[Array, "*I M"]:
    """Returns x[index], zeros where the index is past the end."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
