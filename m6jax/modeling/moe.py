"""The sparse feed-forward: route, move tokens to experts, compute, bring them back.

`routing` decides, `dispatch` moves rows, this file puts them together for the devices of a mesh:
every device routes and sorts its own tokens, one exchange over the mesh axis of `expert` brings the
rows to the devices that hold the experts, one brings the results back.

Axis letters: B rows, T length, M width (embed), E experts, P prototypes, K choices in a prototype,
Q = P * K, S tokens of a group, C capacity.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from m6jax.foundation.partitioning import exchange, sharded, total
from m6jax.modeling.config import Activation, CapacityMode, MoEConfig
from m6jax.modeling.dispatch import (
    Slots,
    assign_slots,
    check_groups,
    combine,
    count_choices,
    dispatch,
    first_tokens,
    group_size_of,
    room_of,
)
from m6jax.modeling.grouped import grouped_matmul
from m6jax.modeling.layers import FeedForward, ffn_hidden, ffn_weights
from m6jax.modeling.routers import Routing
from m6jax.modeling.routing import Router, RouterStatistics

# Of every matrix by its name: up and gate [E, M, H], down [E, H, M].
Weights = dict[str, Float[Array, "E _ _"]]
# (rows, matrices, product) -> hidden rows, see `ffn_hidden`.
Hidden = Callable[[Float[Array, "*rows M"], Weights, Any], Float[Array, "*rows H"]]


@struct.dataclass
class MoEOutput:
    """What the sparse feed-forward gives back: x [B, T, M] and what its router did."""

    x: Float[Array, "B T M"]
    router: RouterStatistics


class MoE(nn.Module):
    """Sparse feed-forward layer.

    Attributes:
      experts: numbers of experts, prototypes, choices and their capacity.
      mlp_dim: H, width of an expert.
      gated: gated experts with three matrices.
      init_scale: factor on the initial standard deviation 1 / sqrt(fan in).
      dtype: type of the experts' arithmetic (the router's is float32).
      param_dtype: type of the experts' weights.
      activation: of the experts.
    """

    experts: MoEConfig
    mlp_dim: int
    gated: bool
    init_scale: float
    dtype: Any
    param_dtype: Any
    activation: Activation = Activation.GELU

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        token_mask: Bool[Array, "B T"],
        key: PRNGKeyArray | None,
        tokens: Int[Array, "B T"] | None = None,
    ) -> MoEOutput:
        """Sends every real token through its experts.

        Args:
          x: [B, T, M].
          token_mask: bool[B, T], False for padding, whose output is exactly 0.
          key: for the router's jitter; None in evaluation.
          tokens: int32[B, T], token ids, for routers that look at them.
        """
        experts = self.experts
        routing, router = Router(experts, self.init_scale, name="router")(
            x, token_mask, key, tokens
        )
        weights = ffn_weights(self, x.shape[-1], experts.num_experts)
        inward, outward = ("expert", None, "mlp"), ("expert", "mlp", None)
        rows, choices = ("batch", None, None), ("batch", None, None, None)
        group_size = group_size_of(experts.group_size, *x.shape[:2])

        def local(
            x: Float[Array, "b T M"],
            index: Int[Array, "b T P K"],
            scale: Float[Array, "b T P K"],
            *matrices: Float[Array, "e _ _"],
        ) -> tuple[Float[Array, "b T M"], Int[Array, " E"]]:
            own, routing = dict(zip(weights, matrices, strict=True)), Routing(index, scale)
            hidden = partial(ffn_hidden, activation=self.activation)
            if experts.capacity_factor is None:
                y, served = apply_dropless(x, routing, own, experts, hidden)
            else:
                y, served = apply_with_capacity(x, routing, own, experts, group_size, hidden)
            return total(y, "mlp"), total(served, "batch")

        run = sharded(
            local,
            (rows, choices, choices, *(outward if name == "down" else inward for name in weights)),
            (rows, (None,)),
        )
        y, served = run(x, routing.expert_index, routing.weights, *weights.values())
        if experts.num_shared_experts:
            y = y + self._shared(x, token_mask)
        router = dataclasses.replace(router, served=served.astype(jnp.float32))
        return MoEOutput(y, router)

    def _shared(
        self, x: Float[Array, "B T M"], token_mask: Bool[Array, "B T"]
    ) -> Float[Array, "B T M"]:
        """Returns [B, T, M], what the shared experts, as one wide feed-forward, make of x."""
        shared = FeedForward(
            self.experts.num_shared_experts * self.mlp_dim,
            self.gated,
            self.init_scale,
            self.dtype,
            self.param_dtype,
            self.activation,
            name="shared",
        )
        # Without biases a feed-forward makes 0 of 0, so padding stays 0 and has no gradient.
        return shared(jnp.where(token_mask[..., None], x, jnp.zeros_like(x)))


def apply_with_capacity(
    x: Float[Array, "B T M"],
    routing: Routing,
    weights: Weights,
    experts: MoEConfig,
    group_size: int,
    hidden: Hidden = ffn_hidden,
) -> tuple[Float[Array, "B T M"], Int[Array, " E"]]:
    """Serves the tokens of one device from buffers of C rows for each expert and group.

    Args:
      x: [B, T, M], this device's rows.
      routing: their choices.
      weights: this device's experts (and part of their width).
      experts: the numbers.
      group_size: S, the same on every mesh.
      hidden: what an expert makes of a row before its last matrix.

    Returns:
      [B, T, M], to be summed over the parts of the width, and int32[E], choices served here.

    Raises:
      ConfigError: this device's tokens do not divide into groups.
    """
    B, T, M = x.shape
    E, S = experts.num_experts, group_size
    P, K = routing.expert_index.shape[2:]
    Q, capacity = P * K, room_of(experts, S)
    assert capacity is not None
    check_groups(S, B, T)
    start = first_tokens(experts.capacity_mode, S, experts.num_prototypes)
    index = routing.expert_index.reshape(-1, S, P, K)
    if experts.capacity_mode is CapacityMode.ONE_X:
        index = jnp.where(jnp.arange(S)[:, None, None] >= start[:, None], index, E)
    slots = assign_slots(index.reshape(-1, S, Q), E, capacity)

    rows = dispatch(x.reshape(-1, M), slots).reshape(E, -1, M)
    rows = exchange(rows, "expert", split=0, concat=1)  # [E of this device, C of all devices, M]
    inner = hidden(rows, weights, lambda a, w: jnp.einsum("ecm,emh->ech", a, w))
    rows = jnp.einsum("ech,ehm->ecm", inner, weights["down"])
    rows = exchange(rows, "expert", split=1, concat=0)
    y = combine(rows.reshape(-1, M), routing.weights.reshape(-1, Q), slots)
    filled = (slots.choice < B * T * Q).reshape(E, -1)
    return y.reshape(B, T, M), filled.sum(-1)


def apply_dropless(
    x: Float[Array, "B T M"],
    routing: Routing,
    weights: Weights,
    experts: MoEConfig,
    hidden: Hidden = ffn_hidden,
) -> tuple[Float[Array, "B T M"], Int[Array, " E"]]:
    """Serves every choice of one device's tokens, however uneven, with grouped products.

    Buffer rule: to every device that holds experts a device sends as many rows as it could have to
    at worst, all its tokens times the choices that can fall there, so nothing is ever dropped; only
    the real rows are computed. Arguments and results as in `apply_with_capacity`.
    """
    B, T, M = x.shape
    E, Q = experts.num_experts, experts.num_prototypes * experts.num_selected_experts
    own = weights["up"].shape[0]  # experts on this device
    index = routing.expert_index.reshape(1, B * T, Q)
    served = count_choices(routing.expert_index, E)
    if own == E:
        y = _grouped_experts(x.reshape(-1, M), routing, index, weights, hidden)
        return y.reshape(B, T, M), served

    capacity = B * T * most_choices(experts, own)
    device = index // own  # E (none) becomes the number of devices
    slots = assign_slots(device, E // own, capacity)
    rows = dispatch(x.reshape(-1, M), slots).reshape(E // own, capacity, M)
    expert = jnp.take(index.reshape(-1) % own, slots.choice, mode="fill", fill_value=own)
    rows = exchange(rows, "expert", split=0, concat=1).reshape(-1, M)
    expert = exchange(expert.reshape(E // own, capacity), "expert", split=0, concat=1)
    served_rows = Routing(expert.reshape(1, -1, 1, 1), jnp.ones((1, rows.shape[0], 1, 1)))
    y = _grouped_experts(rows, served_rows, expert.reshape(1, -1, 1), weights, hidden)
    y = exchange(y.reshape(1, -1, M), "expert", split=1, concat=0)
    y = combine(y.reshape(-1, M), routing.weights.reshape(-1, Q), slots)
    return y.reshape(B, T, M), served


def _grouped_experts(
    x: Float[Array, "N M"],
    routing: Routing,
    index: Int[Array, "_ _ Q"],
    weights: Weights,
    hidden: Hidden,
) -> Float[Array, "N M"]:
    """Returns [B * T, M]: rows sorted by expert, one grouped product a matrix, rows put back."""
    own, Q = weights["up"].shape[0], index.shape[-1]
    flat = index.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    of_choice = jnp.argsort(order).reshape(-1, Q)
    slots = Slots(of_choice.astype(jnp.int32), order.astype(jnp.int32))
    sizes = jnp.diff(jnp.searchsorted(flat[order], jnp.arange(own + 1))).astype(jnp.int32)

    def product(a: Float[Array, "R M"], w: Float[Array, "E M H"]) -> Float[Array, "R H"]:
        return grouped_matmul(a, w, sizes)

    rows = dispatch(x, slots)
    y = product(hidden(rows, weights, product), weights["down"])
    return combine(y, routing.weights.reshape(-1, Q), slots)


def most_choices(experts: MoEConfig, own: int) -> int:
    """Returns how many of a token's choices can fall on one device that holds `own` experts."""
    in_prototype = experts.experts_per_prototype
    overlaps = [
        min(last, (p + 1) * in_prototype) - max(first, p * in_prototype)
        for first, last in ((d * own, (d + 1) * own) for d in range(experts.num_experts // own))
        for p in range(experts.num_prototypes)
    ]
    by_device = [
        sum(
            min(experts.num_selected_experts, max(0, n))
            for n in overlaps[d * experts.num_prototypes : (d + 1) * experts.num_prototypes]
        )
        for d in range(experts.num_experts // own)
    ]
    return max(by_device)
