"""Who decides which experts serve a token: small values, one of which is MoEConfig.router.

>>> MoEConfig(num_experts=8, num_selected_experts=2, normalize_weights=True,
...           router=TopK(scores="SIGMOID", bias_rate=1e-3))        # as DeepSeek-V3 balances

A router gets what is known of the tokens (`Asked`) and gives back a `Choice`. It says of itself

* learned: whether it has scores, and so can be trained;
* causal: whether a token's experts depend on no later token;
* balanced: whether its load is even by itself.

Axis letters: B rows, T length, E experts, P prototypes, F = E / P experts of a prototype, K choices
in a prototype, S tokens of a group, G groups, C capacity.
"""

import contextlib
import contextvars
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, UInt32

from m6jax.foundation.validated import ConfigError, validated

# What recomputation in the backward pass takes over instead of deciding again: a score that is
# rounded otherwise there would send a token to another expert.
SAVED = "chosen_experts"

# What `_keep` keeps: experts of tokens, or which tokens an expert takes.
Decision = Int[Array, "B T P K"] | Bool[Array, "B T P F"]

# Where a step recomputes layers by itself: what becomes of choices while it traces them.
_hand_over: contextvars.ContextVar[Callable[[Decision], Decision]] = contextvars.ContextVar(
    "hand_over", default=lambda choice: choice
)


@struct.dataclass
class Routing:
    """The choices of all tokens.

    Attributes:
      expert_index: int32[B, T, P, K], number of the expert among all E; E for padding and for no
        choice.
      weights: float32[B, T, P, K], what the expert's output is multiplied with.
    """

    expert_index: Int[Array, "B T P K"]
    weights: Float[Array, "B T P K"]


@struct.dataclass
class Choice:
    """What a router decided.

    Attributes:
      routing: for those who move tokens.
      probabilities: float32[B, T, P, F], how it weighed the experts; sums to 1 over F.
      chosen: float32[B, T, P, F], 1 where a real token goes to the expert.
    """

    routing: Routing
    probabilities: Float[Array, "B T P F"]
    chosen: Float[Array, "B T P F"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a router decides from.

    Attributes:
      num_prototypes: P.
      experts_per_prototype: F.
      num_selected: K.
      normalize: make the weights of a token in a prototype sum to 1.
      group_size: S.
      capacity: C, rows that an expert has for a group; None: dropless.
      token_mask: bool[B, T], False for padding.
      tokens: int32[B, T], token ids; None if they are not known.
      logits: float32[B, T, P, F]; None for a router that is not learned.
      bias: float32[P, F], added to the scores for the choice alone; None: no such bias.
    """

    num_prototypes: int
    experts_per_prototype: int
    num_selected: int
    normalize: bool
    group_size: int
    capacity: int | None
    token_mask: Bool[Array, "B T"]
    tokens: Int[Array, "B T"] | None = None
    logits: Float[Array, "B T P F"] | None = None
    bias: Float[Array, "P F"] | None = None


class Scores(enum.Enum):
    """What a logit becomes: probabilities inside a prototype, or each by itself in (0, 1)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@validated
class TopK:
    """Every token takes the K best experts of every prototype.

    Attributes:
      scores: SOFTMAX or SIGMOID.
      bias_rate: after a step, the bias of an expert that got less than the mean load rises by this
        and of one that got more falls by it (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437:
        1e-3). The bias moves choices, never weights. 0: no biases.
    """

    scores: Scores = Scores.SOFTMAX
    bias_rate: float = 0.0

    learned = True
    causal = True
    balanced = False

    def check(self) -> None:
        """Raises ConfigError for a rate that cannot be."""
        if self.bias_rate < 0:
            raise ConfigError(f"TopK.bias_rate: {self.bias_rate} is negative")

    def choose(self, asked: Asked) -> Choice:
        """Returns the choices of all tokens, each for itself."""
        assert asked.logits is not None  # learned
        probabilities = scores = jax.nn.softmax(asked.logits, axis=-1)
        if self.scores is Scores.SIGMOID:
            scores = jax.nn.sigmoid(asked.logits)
            # scores / sum of scores, where all of them may be tiny.
            probabilities = jax.nn.softmax(jax.nn.log_sigmoid(asked.logits), axis=-1)
        routing, chosen = choose(
            scores, asked.token_mask, asked.num_selected, asked.normalize, asked.bias
        )
        return Choice(routing, probabilities, chosen)


@validated
class TokenHash:
    """A fixed hash of the token id: the baseline that learns nothing (arXiv 2106.04426).

    All layers use one hash; every prototype has its own. The K choices in a prototype are
    neighbours. All weights are 1 (1 / K where they are to be normalised).

    Attributes:
      seed: of the hash.
    """

    seed: int = 0

    learned = False
    causal = True
    balanced = False
    bias_rate = 0.0

    def check(self) -> None:
        """Raises ConfigError for a seed that cannot be."""
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"TokenHash.seed: {self.seed} is not in [0, 2**32)")

    def choose(self, asked: Asked) -> Choice:
        """Returns the choices of all tokens, each for itself.

        Raises:
          ValueError: the token ids are not known.
        """
        if asked.tokens is None:
            raise ValueError(
                "TokenHash needs token ids: give the layer `tokens`, or choose the router TopK"
            )
        P, F, K = asked.num_prototypes, asked.experts_per_prototype, asked.num_selected
        prototype = np.arange(P, dtype=np.uint32)
        hashed = mix(asked.tokens.astype(jnp.uint32)[..., None] ^ mix(prototype + self.seed))
        index = (hashed[..., None] % F + np.arange(K, dtype=np.uint32)) % F  # [B, T, P, K]
        weights = jnp.full(index.shape, 1 / K if asked.normalize else 1.0)
        one_hot = jax.nn.one_hot(index, F, dtype=jnp.float32)
        index = index.astype(jnp.int32)
        routing, chosen = _without_padding(index, weights, one_hot, asked.token_mask)
        return Choice(routing, one_hot.sum(-2) / K, chosen)


@validated
class ExpertChoice:
    """Every expert takes the C tokens of a group that score best with it (arXiv 2202.09368).

    The load is even, a token gets any number of experts, K * capacity_factor in the mean. Whether a
    token is taken depends on the later ones, so a causal model refuses it. A token may be taken by
    all experts, so memory grows with tokens * E rather than tokens * P * K.
    """

    learned = True
    causal = False
    balanced = True
    bias_rate = 0.0

    def choose(self, asked: Asked) -> Choice:
        """Returns the choices of all experts; K is F in the result."""
        assert asked.logits is not None  # learned
        assert asked.capacity is not None  # MoEConfig.check
        B, T, P, F = asked.logits.shape
        probabilities = jax.nn.softmax(asked.logits, axis=-1)
        real = asked.token_mask[:, :, None, None]
        ranked = jnp.where(real, jax.lax.stop_gradient(probabilities), -1.0)
        ranked = -ranked.reshape(-1, asked.group_size, P, F)  # [G, S, P, F], the best first
        place = jnp.argsort(jnp.argsort(ranked, axis=1, stable=True), axis=1)
        taken = (place < asked.capacity).reshape(B, T, P, F) & real
        taken = _keep(taken)
        weights = jnp.where(taken, probabilities, 0.0)
        if asked.normalize:
            weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _TINY)
        index = jnp.where(taken, jnp.arange(P * F, dtype=jnp.int32).reshape(P, F), P * F)
        return Choice(Routing(index, weights), probabilities, taken.astype(jnp.float32))


@contextlib.contextmanager
def recorded() -> Iterator[list[Decision]]:
    """Gives a list that gets the choices of all routers that are called (traced) inside."""
    choices: list[Decision] = []

    def record(choice: Decision) -> Decision:
        choices.append(choice)
        return choice

    token = _hand_over.set(record)
    try:
        yield choices
    finally:
        _hand_over.reset(token)


@contextlib.contextmanager
def taken_over(choices: Sequence[Decision]) -> Iterator[None]:
    """Routers that are called (traced) inside take these choices, in the order of `recorded`."""
    rest = iter(choices)
    token = _hand_over.set(lambda _: next(rest))
    try:
        yield
    finally:
        _hand_over.reset(token)


def _keep(choice: Decision) -> Decision:
    """Marks a choice, or takes over another one for it."""
    return checkpoint_name(_hand_over.get()(choice), SAVED)


# Its square must not vanish in float32, or gradients are NaN.
_TINY = 1e-15


def choose(
    scores: Float[Array, "B T P F"],
    token_mask: Bool[Array, "B T"],
    num_selected: int,
    normalize: bool,
    bias: Float[Array, "P F"] | None = None,
) -> tuple[Routing, Float[Array, "B T P F"]]:
    """Takes the K best experts of every prototype.

    Args:
      scores: float32[B, T, P, F], not negative.
      token_mask: bool[B, T].
      num_selected: K.
      normalize: make the K weights sum to 1.
      bias: float32[P, F], added to the scores for the choice alone.

    Returns:
      The routing, and float32[B, T, P, F] with 1 where a real token chose the expert.
    """
    preferred = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if num_selected == 1:
        index = jnp.argmax(preferred, axis=-1)[..., None]
    else:
        index = jax.lax.top_k(preferred, num_selected)[1]
    index = _keep(index.astype(jnp.int32))
    # A product with one-hot rows instead of a gather: its gradient has no scatter.
    one_hot = jax.nn.one_hot(index, scores.shape[-1], dtype=scores.dtype)  # [B, T, P, K, F]
    weights = jnp.einsum("btpkf,btpf->btpk", one_hot, scores)
    if normalize:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _TINY)
    return _without_padding(index, weights, one_hot, token_mask)


def _without_padding(
    index: Int[Array, "B T P K"],
    weights: Float[Array, "B T P K"],
    one_hot: Float[Array, "B T P K F"],
    token_mask: Bool[Array, "B T"],
) -> tuple[Routing, Float[Array, "B T P F"]]:
    """Returns what `choose` does, from choices inside the prototypes [B, T, P, K]."""
    P, F = one_hot.shape[2], one_hot.shape[-1]
    real = token_mask[:, :, None, None]
    expert_index = index + F * jnp.arange(P, dtype=jnp.int32)[:, None]
    routing = Routing(
        expert_index=jnp.where(real, expert_index, P * F),
        weights=jnp.where(real, weights, 0.0),
    )
    return routing, one_hot.sum(-2) * real


def mix(x: UInt32[Array | np.ndarray, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns uint32 whose bits all depend on all bits of x, uint32 (MurmurHash3's last step)."""
    x = jnp.asarray(x, jnp.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
