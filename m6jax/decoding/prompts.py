"""Prompts as features of a batch, as training would give them.

A row is one document: patches of its picture, the start id, the tokens, padding. Two patches before
`a b`, with the start `0`:

    tokens        -  -  0  a  b  -       patch_mask   1 1 0 0 0 0
    segment_ids   1  1  1  1  1  0       positions    0 1 2 3 4 0

Axis letters: B rows, T length, I patches of a row, F features of a patch.
"""

from collections.abc import Sequence

import numpy as np

from m6jax.foundation.validated import ConfigError
from m6jax.modeling.config import ModelConfig, Positions

# T is a multiple of this, so that other prompts seldom mean another compilation.
PROMPT_MULTIPLE = 64


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    start_id: int,
    bidirectional: bool = False,
    patches: Sequence[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the features of prompts, one a row; the arguments are those of `generate`.

    Raises:
      ConfigError: no prompt, or pictures that do not belong together.
    """
    if not prompts:
        raise ConfigError("generate.prompts: there is no prompt (an empty one would be [])")
    pictures = [np.zeros((0, 0))] * len(prompts) if patches is None else patches
    if len(pictures) != len(prompts):
        raise ConfigError(
            f"generate.patches: {len(pictures)} pictures for {len(prompts)} prompts (a row without"
            " a picture has an array of 0 patches)"
        )
    firsts = np.array([len(picture) for picture in pictures])  # slot of the start id
    texts = [[start_id, *prompt] for prompt in prompts]
    lengths = firsts + [len(text) for text in texts]
    T = -(-int(lengths.max()) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    slots = np.broadcast_to(np.arange(T, dtype=np.int32), (len(prompts), T))
    real = (slots < lengths[:, None]).astype(np.int32)
    batch = {"tokens": np.full_like(slots, pad_id), "segment_ids": real, "positions": slots * real}
    for row, first, text in zip(batch["tokens"], firsts, texts, strict=True):
        row[first : first + len(text)] = text
    if bidirectional:
        batch["bidirectional"] = real
    if firsts.any():
        features = sorted({picture.shape[1] for picture in pictures if len(picture)})
        if len(features) > 1:
            raise ConfigError(f"generate.patches: pictures differ in their features: {features}")
        batch["patches"] = np.zeros((len(prompts), firsts.max(), features[0]), np.float32)
        for row, picture in zip(batch["patches"], pictures, strict=True):
            if len(picture):  # no picture has no number of features either
                row[: len(picture)] = picture
        batch["patch_mask"] = (slots < firsts[:, None]).astype(np.int32)
    return batch


def check_prompts(config: ModelConfig, batch: dict[str, np.ndarray], num_tokens: int) -> None:
    """Raises ConfigError for what the model would answer with NaN, or a shape error far away."""
    tokens = batch["tokens"]
    outside = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if outside.size:
        raise ConfigError(
            f"generate.prompts: token {outside[0]} (of prompt, start or padding) is outside the"
            f" vocabulary of {config.vocab_size} tokens"
        )
    given = batch["patches"].shape[2] if "patches" in batch else config.patch_dim
    if given != config.patch_dim:
        raise ConfigError(
            f"generate.patches: patches of {given} features, ModelConfig.patch_dim is"
            f" {config.patch_dim}"
        )
    prompt = int(batch["segment_ids"].sum(1).max())
    needed = prompt + num_tokens - 1  # the last token is never fed
    if config.positions is Positions.LEARNED and needed > config.max_length:
        raise ConfigError(
            f"generate.max_new_tokens: a prompt of {prompt} positions (start and patches included)"
            f" and {num_tokens} new tokens need {needed} positions, ModelConfig.max_length is"
            f" {config.max_length} (shorten one of them)"
        )
