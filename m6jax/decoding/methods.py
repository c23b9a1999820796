"""How new tokens are chosen: greedy, sampling, beam search.

A method extends texts by one token, and knows nothing of the model. All run in one loop over texts
[B, K, N], K = 1 but for beam search; the loop stops when every text has ended, and may stop earlier
to be looked at (`begin`, `advance`). With N = 3, the end `.` and padding `-`:

    d e .
    f . -        not fed again

Axis letters: B rows, V vocabulary, N new tokens, K beams.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

from m6jax.decoding.cached import DecodingState
from m6jax.foundation.validated import ConfigError, validated
from m6jax.modeling.config import require_positive


@struct.dataclass
class Texts:
    """New tokens of the beams of every row, the best beam first; without an axis K: the best alone.

    Attributes:
      tokens: int32[B, K, N], padding after the end.
      log_probability: float32[B, K], sum over the tokens, the end included.
      length: int32[B, K], number of tokens, the end included.
      ended: bool[B, K], nothing more is to be added.
    """

    tokens: jax.Array
    log_probability: jax.Array
    length: jax.Array
    ended: jax.Array


@dataclasses.dataclass(frozen=True)
class Task:
    """What a method works with.

    Attributes:
      step: (state, tokens int32[B], active bool[B]) -> state, see `decode_step`.
      num_tokens: N.
      eos_id: int32[], token that ends a text.
      pad_id: int32[], token after the end.
      keys: [B], a random key for each row.
      seen: bool[B, V], tokens of the prompts; None where no method asks for them.
    """

    step: Callable[[DecodingState, jax.Array, jax.Array], DecodingState]
    num_tokens: int
    eos_id: jax.Array
    pad_id: jax.Array
    keys: jax.Array
    seen: jax.Array | None = None


Extended = tuple[DecodingState, Texts]
Carry = tuple[jax.Array, DecodingState, Texts]  # with how many tokens there are


@runtime_checkable
class Method(Protocol):
    """How new tokens are chosen."""

    @property
    def num_beams(self) -> int:
        """K, texts of a row that are kept beside each other."""

    def extend(self, task: Task, state: DecodingState, texts: Texts, n: jax.Array) -> Extended:
        """Adds new token number n, int32[], to all texts that have not ended."""


@validated
class Greedy:
    """The most probable token, one after the other.

    Attributes:
      repetition_penalty: logits of tokens that the prompt or the text has are divided by it if they
        are positive, else multiplied (arXiv 1909.05858); 1: no penalty.
    """

    repetition_penalty: float = 1.0

    num_beams = 1

    def check(self) -> None:
        """Raises ConfigError for a penalty that cannot be."""
        require_positive(self, "repetition_penalty")

    def extend(self, task: Task, state: DecodingState, texts: Texts, n: jax.Array) -> Extended:
        """See `Method`."""
        logits = _penalised(self.repetition_penalty, task, state, texts, n)
        token = jnp.argmax(logits, axis=-1)[:, None]
        return state, _append(state, texts, token, n, task)


@validated
class Sampling:
    """Random tokens: temperature, then top_k, then top_p of what is left, made to sum to 1 again.

    Attributes:
      temperature: logits are divided by it.
      top_k: only so many most probable tokens.
      top_p: only the fewest most probable tokens that have this probability together.
      repetition_penalty: before all of these; as in `Greedy`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    num_beams = 1

    def check(self) -> None:
        """Raises ConfigError for numbers out of range."""
        require_positive(self, "temperature", "top_k", "top_p", "repetition_penalty")
        if self.top_p is not None and self.top_p > 1:
            raise ConfigError(f"Sampling.top_p: {self.top_p} is not in (0, 1]")

    def extend(self, task: Task, state: DecodingState, texts: Texts, n: jax.Array) -> Extended:
        """See `Method`; log-probabilities are the model's own, before temperature and cuts."""
        keys = jax.vmap(jax.random.fold_in, (0, None))(task.keys, n)
        logits = _penalised(self.repetition_penalty, task, state, texts, n)
        token = self.choose(logits, keys)[:, None]
        return state, _append(state, texts, token, n, task)

    def choose(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draws int32[B] from logits float32[B, V] with a key for each row."""
        V = logits.shape[-1]
        # Sorted, not compared with a threshold: equal logits must not exceed top_k.
        ranked, token = jax.lax.top_k(logits / self.temperature, min(self.top_k or V, V))
        if self.top_p is not None:
            probabilities = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities
            ranked = jnp.where(before < self.top_p, ranked, -jnp.inf)
        drawn = jax.vmap(jax.random.categorical)(keys, ranked)
        return jnp.take_along_axis(token, drawn[:, None], axis=-1)[:, 0]


@validated
class Beam:
    """The best text found by keeping the K best beginnings; with one beam the same as `Greedy`.

    Every step keeps the K best of all one-token extensions, where a text that has ended competes as
    it is. Texts are ranked by log-probability / ((5 + length) / 6) ** length_penalty (Wu et al.,
    arXiv 1609.08144, eq. 14); what is reported is the log-probability itself. A row stops when no
    text in work can overtake its best ended one.

    Attributes:
      num_beams: K.
      length_penalty: 0 ranks by probability, more favours long texts.
    """

    num_beams: int
    length_penalty: float = 0.0

    def check(self) -> None:
        """Raises ConfigError for numbers out of range."""
        require_positive(self, "num_beams")
        if self.length_penalty < 0:
            raise ConfigError(f"Beam.length_penalty: {self.length_penalty} is less than 0")

    def extend(self, task: Task, state: DecodingState, texts: Texts, n: jax.Array) -> Extended:
        """See `Method`."""
        B, K = texts.length.shape
        log_probs = jax.nn.log_softmax(state.logits).reshape(B, K, -1)
        V = log_probs.shape[-1]
        # A text that has ended has one extension, itself; token 0 stands for it.
        itself = jnp.where(jnp.arange(V) == 0, 0.0, -jnp.inf)
        added = jnp.where(texts.ended[..., None], itself, log_probs)
        length = (texts.length + ~texts.ended)[..., None]
        rank = self._rank(texts.log_probability[..., None] + added, length)
        _, best = jax.lax.top_k(rank.reshape(B, K * V), K)  # sorted
        row, parent, token = jnp.arange(B)[:, None], best // V, best % V
        state = state.take((row * K + parent).reshape(-1))
        texts = jax.tree.map(lambda leaf: leaf[row, parent], texts)
        texts = _append(state, texts, token, n, task)

        # More tokens make the sum smaller and, as there are at most N, its divisor larger.
        bound = self._rank(texts.log_probability, task.num_tokens)
        bound = jnp.where(texts.ended, -jnp.inf, bound).max(1, keepdims=True)
        rank = jnp.where(texts.ended, self._rank(texts.log_probability, texts.length), -jnp.inf)
        decided = rank.max(1, keepdims=True) > bound
        return state, dataclasses.replace(texts, ended=texts.ended | decided)

    def _rank(self, log_probability: jax.Array, length: jax.Array | int) -> jax.Array:
        return log_probability / ((5 + length) / 6) ** self.length_penalty


def _append(
    state: DecodingState, texts: Texts, token: jax.Array, n: jax.Array, task: Task
) -> Texts:
    """Adds new token number n, int32[B, K], to all texts that have not ended."""
    log_probs = jax.nn.log_softmax(state.logits).reshape(*token.shape, -1)
    added = jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]
    token = jnp.where(texts.ended, task.pad_id, token).astype(jnp.int32)
    return Texts(
        tokens=texts.tokens.at[..., n].set(token),
        log_probability=texts.log_probability + jnp.where(texts.ended, 0.0, added),
        length=texts.length + ~texts.ended,
        ended=texts.ended | (token == task.eos_id),
    )


def _penalised(
    penalty: float, task: Task, state: DecodingState, texts: Texts, n: jax.Array
) -> jax.Array:
    """Returns the logits [B, V] with a penalty on tokens that have been there; K is 1."""
    if penalty == 1.0:
        return state.logits
    assert task.seen is not None  # `generate` looks at the method
    tokens = texts.tokens[:, 0]
    new = jnp.broadcast_to(jnp.arange(tokens.shape[1]) < n, tokens.shape)
    seen = task.seen.at[jnp.arange(len(tokens))[:, None], tokens].max(new)
    logits = state.logits
    lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, lower, logits)


def search(method: Method, state: DecodingState, task: Task) -> Texts:
    """Extends the texts of all rows until they have ended or N tokens.

    Returns:
      One text (no axis K) for every row of the state that `prefill` gave.
    """
    carry = advance(method, begin(method, state, task), task, task.num_tokens)
    return best(carry)


def best(carry: Carry) -> Texts:
    """Returns the best text of every row (no axis K)."""
    return jax.tree.map(lambda leaf: leaf[:, 0], carry[2])


def begin(method: Method, state: DecodingState, task: Task) -> Carry:
    """Returns texts of one token for every row of the state that `prefill` gave."""
    num_beams = method.num_beams
    shape = (state.lengths.shape[0], num_beams)
    # Beams begin alike: only the first counts, or all would stay copies of it.
    log_probability = jnp.zeros(shape).at[:, 1:].set(-jnp.inf)
    length, ended = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
    tokens = jnp.full((*shape, task.num_tokens), task.pad_id, jnp.int32)
    texts = Texts(tokens, log_probability, length, ended)
    state = state.take(jnp.repeat(jnp.arange(shape[0]), num_beams))
    return jnp.int32(1), *method.extend(task, state, texts, jnp.int32(0))


def advance(method: Method, carry: Carry, task: Task, until: jax.Array | int) -> Carry:
    """Extends texts until all have ended, or there are `until` tokens (at most N)."""

    def unfinished(carry: Carry) -> jax.Array:
        n, _, texts = carry
        return (n < until) & ~texts.ended.all()

    def one_more(carry: Carry) -> Carry:
        n, state, texts = carry
        last = texts.tokens[..., n - 1].reshape(-1)
        state = task.step(state, last, ~texts.ended.reshape(-1))
        return n + 1, *method.extend(task, state, texts, n)

    return jax.lax.while_loop(unfinished, one_more, carry)
