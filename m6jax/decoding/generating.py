"""`generate`: from prompts to texts.

One compiled program writes all; where somebody watches, it stops every few tokens, so that what is
there can be shown, and rows can be ended.

Axis letters: B rows, N new tokens, I patches of a row, F features of a patch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from m6jax.decoding.cached import decode_step, prefill
from m6jax.decoding.methods import Beam, Carry, Method, Task, Texts, advance, begin, best
from m6jax.decoding.prompts import check_prompts, prompt_batch
from m6jax.foundation.partitioning import fetched
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.modeling.block import Batch
from m6jax.modeling.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Generated:
    """New tokens of every row.

    Attributes:
      tokens: without the prompt; the end token is the last where the row ended.
      log_probabilities: sum of the model's log-probabilities of these tokens, the end included.
    """

    tokens: list[list[int]]
    log_probabilities: list[float]


# Gets the new tokens of every row so far; returns which rows are to end.
Watch = Callable[[list[list[int]]], Sequence[bool]]


def generate(
    model: Transformer,
    params: Tree,
    layout: Layout,
    prompts: Sequence[Sequence[int]],
    *,
    method: Method,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    start_id: int,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    bidirectional_prompt: bool = False,
    patches: Sequence[np.ndarray] | None = None,
    watch: Watch | None = None,
    watch_every: int = 8,
) -> Generated:
    """Continues prompts, until every row has ended.

    Args:
      model: one that `decoding_model` accepts; the program is kept for the same object.
      params: its parameters in the given layout.
      layout: how the stack lies.
      prompts: tokens of every row, without start id; of any lengths, 0 included.
      method: Greedy, Sampling or Beam.
      max_new_tokens: N, the end token included.
      eos_id: token that ends a text.
      pad_id: token that fills rows.
      start_id: input before the first token of a prompt.
      seed: of all randomness, together with the number of the row.
      rows: number of every prompt, where prompts are cut into several calls; None: 0, 1, ...
      bidirectional_prompt: prompts (patches, start and tokens) see themselves in full.
      patches: float [I, F] for every row, its picture; I may differ, and be 0 for none.
      watch: is asked every few tokens; not with Beam, whose texts change until the end.
      watch_every: how many tokens these are.

    Raises:
      ConfigError: prompts or lengths that the model cannot have.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"generate.max_new_tokens: {max_new_tokens} is not greater than 0")
    batch = prompt_batch(prompts, pad_id, start_id, bidirectional_prompt, patches)
    check_prompts(model.config, batch, max_new_tokens)
    numbers = jnp.arange(len(prompts)) if rows is None else jnp.asarray(rows)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    given = params, batch, keys, jnp.int32(eos_id), jnp.int32(pad_id)
    settings = model, layout, method, max_new_tokens
    if watch is None:
        return _generated(_generate(*given, *settings))
    assert not isinstance(method, Beam)
    carry = _begin(*given, *settings)
    while True:
        n, state, texts = carry
        stopped = np.asarray(watch(_generated(best(carry)).tokens))[:, None]
        carry = n, state, dataclasses.replace(texts, ended=texts.ended | stopped)
        if int(n) >= max_new_tokens or bool(carry[2].ended.all()):
            return _generated(best(carry))
        carry = _advance(carry, n + watch_every, *given, *settings)


def _generated(texts: Texts) -> Generated:
    texts = fetched(texts)
    rows = zip(texts.tokens, texts.length, strict=True)
    tokens = [row[:length].tolist() for row, length in rows]
    return Generated(tokens, texts.log_probability.tolist())


_STATIC = ("model", "layout", "method", "num_tokens")


@partial(jax.jit, static_argnames=_STATIC)
def _generate(
    params: Tree,
    batch: Batch,
    keys: jax.Array,
    eos_id: jax.Array,
    pad_id: jax.Array,
    model: Transformer,
    layout: Layout,
    method: Method,
    num_tokens: int,
) -> Texts:
    given = params, batch, keys, eos_id, pad_id, model, layout, method, num_tokens
    carry = _begin(*given)
    return best(_advance(carry, jnp.int32(num_tokens), *given))


@partial(jax.jit, static_argnames=_STATIC)
def _begin(
    params: Tree,
    batch: Batch,
    keys: jax.Array,
    eos_id: jax.Array,
    pad_id: jax.Array,
    model: Transformer,
    layout: Layout,
    method: Method,
    num_tokens: int,
) -> Carry:
    """Reads the prompts and chooses the first tokens."""
    num_slots = batch["tokens"].shape[1] + num_tokens - 1
    state = prefill(model, params, layout, batch, num_slots)
    task = _task(params, batch, keys, eos_id, pad_id, model, layout, num_tokens)
    return begin(method, state, task)


@partial(jax.jit, static_argnames=_STATIC)
def _advance(
    carry: Carry,
    until: jax.Array,
    params: Tree,
    batch: Batch,
    keys: jax.Array,
    eos_id: jax.Array,
    pad_id: jax.Array,
    model: Transformer,
    layout: Layout,
    method: Method,
    num_tokens: int,
) -> Carry:
    """Writes until there are so many tokens, at most N."""
    task = _task(params, batch, keys, eos_id, pad_id, model, layout, num_tokens)
    return advance(method, carry, task, jnp.minimum(until, num_tokens))


def _task(
    params: Tree,
    batch: Batch,
    keys: jax.Array,
    eos_id: jax.Array,
    pad_id: jax.Array,
    model: Transformer,
    layout: Layout,
    num_tokens: int,
) -> Task:
    step = partial(decode_step, model, params, layout)
    tokens, real = batch["tokens"], batch["segment_ids"] > 0
    if "patch_mask" in batch:
        real = real & (batch["patch_mask"] == 0)
    seen = jnp.zeros((len(tokens), model.config.vocab_size), bool)
    seen = seen.at[jnp.arange(len(tokens))[:, None], tokens].max(real)
    return Task(step, num_tokens, eos_id, pad_id, keys, seen)
