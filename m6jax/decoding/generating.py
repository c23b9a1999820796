"""`generate`: from prompts to texts in one compiled program.

Axis letters: B rows, N new tokens, I patches of a row, F features of a patch.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from m6jax.decoding.cached import decode_step, prefill
from m6jax.decoding.methods import Method, Task, Texts
from m6jax.decoding.prompts import check_prompts, prompt_batch
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
    first_row: int = 0,
    bidirectional_prompt: bool = False,
    patches: Sequence[np.ndarray] | None = None,
) -> Generated:
    """Continues prompts, in one compiled program that stops when every row has ended.

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
      first_row: number of the first prompt, where prompts are cut into several calls.
      bidirectional_prompt: prompts (patches, start and tokens) see themselves in full.
      patches: float [I, F] for every row, its picture; I may differ, and be 0 for none.

    Raises:
      ConfigError: prompts or lengths that the model cannot have.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"generate.max_new_tokens: {max_new_tokens} is not greater than 0")
    batch = prompt_batch(prompts, pad_id, start_id, bidirectional_prompt, patches)
    check_prompts(model.config, batch, max_new_tokens)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold(jax.random.key(seed), first_row + jnp.arange(len(prompts)))
    ids = jnp.int32(eos_id), jnp.int32(pad_id)
    texts = jax.device_get(
        _generate(params, batch, keys, *ids, model, layout, method, max_new_tokens)
    )
    rows = zip(texts.tokens, texts.length, strict=True)
    tokens = [row[:length].tolist() for row, length in rows]
    return Generated(tokens, texts.log_probability.tolist())


@partial(jax.jit, static_argnames=("model", "layout", "method", "num_tokens"))
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
    num_slots = batch["tokens"].shape[1] + num_tokens - 1
    state = prefill(model, params, layout, batch, num_slots)
    step = partial(decode_step, model, params, layout)
    return method.search(state, Task(step, num_tokens, eos_id, pad_id, keys))
