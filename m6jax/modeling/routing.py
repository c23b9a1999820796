"""Scores of experts, the choice of them, and what is reported of it.

E experts are cut in P prototypes of E / P. Every prototype has a softmax of its own and serves
every token with its K best experts; the outputs of all P * K experts are summed (M6-T, arXiv
2105.15082). P = 1, K = 1 is Switch, P = 1, K = 2 GShard's top-2. With E = 4, P = 2, K = 1 and the
probabilities

    token 0   (0.9 0.1) (0.2 0.8)      experts 0 and 3, weights 0.9 and 0.8

Padding gets the expert number E, which does not exist, so it is never moved, served or counted.
Other ways to choose are in `routers`; all arithmetic is float32.

Axis letters: B rows, T length, M width (embed), E experts, P prototypes, K choices in a prototype,
F = E / P experts of a prototype.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from m6jax.foundation.partitioning import constrain, declare
from m6jax.modeling import balancing
from m6jax.modeling.config import BalanceOver, MoEConfig
from m6jax.modeling.dispatch import check_groups, group_size_of, room_of
from m6jax.modeling.layers import matrix_init
from m6jax.modeling.routers import Asked, Routing


@struct.dataclass
class RouterStatistics:
    """What one sparse layer says of its routing; the leading axis L is added by the stack.

    Means are over real tokens (and prototypes); `tokens` is their weight when microbatches are put
    together.

    Attributes:
      load_balance_loss: 1.0 for a perfectly even routing whatever E, P and K.
      router_z_loss: mean squared log-sum-exp of the logits.
      entropy: mean entropy of the probabilities in nats.
      confidence: mean of the largest probability.
      chosen: float32[E], choices for each expert.
      served: float32[E], choices that found room.
      tokens: number of real tokens.
    """

    load_balance_loss: Float[Array, "*L"]
    router_z_loss: Float[Array, "*L"]
    entropy: Float[Array, "*L"]
    confidence: Float[Array, "*L"]
    chosen: Float[Array, "*L E"]
    served: Float[Array, "*L E"]
    tokens: Float[Array, "*L"]

    @property
    def fraction_dropped(self) -> Float[Array, "*L"]:
        """Share of the choices that found no room."""
        chosen = self.chosen.sum(-1)
        return (chosen - self.served.sum(-1)) / jnp.maximum(chosen, 1.0)


def is_kernel(name: str) -> bool:
    """Whether a leaf is a router's kernel or like one: `params/layers/moe/router/kernel`."""
    return name.endswith("/router/kernel")


class Router(nn.Module):
    """Linear scores and the choice of experts, all in float32.

    The `bias` of a router with biases is no weight and lies in a collection of its own: no gradient
    reaches it, no optimizer knows it; see `balancing`.

    Attributes:
      experts: numbers of experts, prototypes and choices, and who chooses.
      init_scale: factor on the initial standard deviation 1 / sqrt(M).
    """

    experts: MoEConfig
    init_scale: float

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T M"],
        token_mask: Bool[Array, "B T"],
        key: PRNGKeyArray | None,
        tokens: Int[Array, "B T"] | None = None,
    ) -> tuple[Routing, RouterStatistics]:
        """Routes tokens.

        Args:
          x: [B, T, M].
          token_mask: bool[B, T], False for padding.
          key: for the jitter; None in evaluation.
          tokens: int32[B, T], token ids, for routers that look at them.

        Returns:
          The choices, and statistics in which every choice counts as served.
        """
        experts = self.experts
        P, F = experts.num_prototypes, experts.experts_per_prototype
        logits = bias = None
        if experts.router.learned:
            logits = self._logits(x, key).reshape(*x.shape[:2], P, F)
        if experts.router.bias_rate > 0:
            zeros = declare(jax.nn.initializers.zeros, (None,))
            shape = (experts.num_experts,)
            variable = self.variable(balancing.COLLECTION, "bias", zeros, None, shape, jnp.float32)
            bias = variable.value.reshape(P, F)
        group_size = group_size_of(experts.group_size, *x.shape[:2])
        capacity = room_of(experts, group_size)
        if capacity is not None:
            check_groups(group_size, *x.shape[:2])
        choice = experts.router.choose(
            Asked(
                num_prototypes=P,
                experts_per_prototype=F,
                num_selected=experts.num_selected_experts,
                normalize=experts.normalize_weights,
                group_size=group_size,
                capacity=capacity,
                token_mask=token_mask,
                tokens=tokens,
                logits=logits,
                bias=bias,
            )
        )
        measured = statistics(
            logits, choice.probabilities, choice.chosen, token_mask, experts.balance_over
        )
        return choice.routing, measured

    def _logits(self, x: Float[Array, "B T M"], key: PRNGKeyArray | None) -> Float[Array, "B T E"]:
        """Returns float32[B, T, E]."""
        kernel = self.param(
            "kernel",
            declare(matrix_init(self.init_scale), ("embed", "expert")),
            (x.shape[-1], self.experts.num_experts),
            jnp.dtype(self.experts.router_dtype),
        )
        x, jitter = x.astype(jnp.float32), self.experts.router_jitter
        if key is not None and jitter > 0:
            x = x * jax.random.uniform(key, x.shape, minval=1 - jitter, maxval=1 + jitter)
        # At default precision TPUs and GPUs round float32 products, and choices would differ.
        highest = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("btm,me->bte", x, kernel.astype(jnp.float32), precision=highest)
        return constrain(logits, ("batch", "length", None))


def statistics(
    logits: Float[Array, "B T P F"] | None,
    probabilities: Float[Array, "B T P F"],
    chosen: Float[Array, "B T P F"],
    token_mask: Bool[Array, "B T"],
    balance_over: BalanceOver = BalanceOver.BATCH,
) -> RouterStatistics:
    """Measures a routing over all real tokens of the global batch.

    Args:
      logits: float32[B, T, P, F]; None for a router without, whose z-loss is 0.
      probabilities: float32[B, T, P, F].
      chosen: float32[B, T, P, F], 1 where chosen.
      token_mask: bool[B, T].
      balance_over: what the balance loss is measured over.
    """
    P = probabilities.shape[2]
    real = token_mask[:, :, None]
    pairs = jnp.maximum(token_mask.sum(dtype=jnp.float32) * P, 1.0)  # of tokens and prototypes

    def mean(values: Float[Array, "B T P"]) -> Float[Array, ""]:
        return jnp.where(real, values, 0.0).sum() / pairs

    counts = chosen.sum((0, 1)).reshape(-1)
    fixed = jax.lax.stop_gradient(probabilities)
    z = jnp.float32(0) if logits is None else mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return RouterStatistics(
        load_balance_loss=balance_loss(probabilities, chosen, token_mask, balance_over),
        router_z_loss=z,
        entropy=mean(jax.scipy.special.entr(fixed).sum(-1)),
        confidence=mean(fixed.max(-1)),
        chosen=counts,
        served=counts,
        tokens=token_mask.sum(dtype=jnp.float32),
    )


def balance_loss(
    probabilities: Float[Array, "B T P F"],
    chosen: Float[Array, "B T P F"],
    token_mask: Bool[Array, "B T"],
    over: BalanceOver,
) -> Float[Array, ""]:
    """Returns float32[], 1.0 for a perfectly even routing.

    For a prototype it is F * sum over experts of (share of choices) * (mean probability), as in
    Switch (arXiv 2101.03961, eq. 4) over the whole batch, or as in DeepSeek-V3 (arXiv 2412.19437,
    eq. 17) over each row, rows weighted by their tokens. Then the mean over prototypes.

    Args:
      probabilities: float32[B, T, P, F].
      chosen: float32[B, T, P, F], 1 where chosen; no gradient goes through it.
      token_mask: bool[B, T].
      over: BATCH or SEQUENCE.
    """
    axes = (0, 1) if over is BalanceOver.BATCH else (1,)
    counts = jax.lax.stop_gradient(chosen).sum(axes)  # [P, F] or [B, P, F], as what follows
    shares = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    sums = jnp.where(token_mask[:, :, None, None], probabilities, 0.0).sum(axes)
    # A mean of the rows weighted by their tokens: the tokens of a row cancel out of its mean.
    losses = probabilities.shape[-1] * (shares * sums).sum(-1).mean(-1)
    return losses.sum() / jnp.maximum(token_mask.sum(dtype=jnp.float32), 1.0)
