"""A stage's model that is asked: what follows a prompt, and how likely a text is after another.

Axis letters: B rows, T length, I patches of a picture, F features of a patch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m6jax import decoding, layouts
from m6jax.data.feature_converters import RowShape, to_features
from m6jax.data.preprocessors import Example
from m6jax.data.vocab import Vocabulary
from m6jax.decoding import Greedy
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import fetched
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Layout
from m6jax.modeling.block import Batch
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.transformer import Transformer
from m6jax.training.losses import score_targets

Tokens = list[int]


class ModelAnswerer:
    """Answers greedily; prompts see themselves in full, as inputs do in training.

    Args:
      program: the stage.
      params: parameters in its layout, with router biases (`TrainState.served`).
      vocabulary: of the data.
      length: T, of a row.
    """

    def __init__(self, program: StageProgram, params: Tree, vocabulary: Vocabulary, length: int):
        self._program = program
        self._params = params
        self._vocabulary = vocabulary
        self._length = length
        self._decoder = decoding.decoding_model(program.model, force=True)
        self._log_likelihoods = jax.jit(
            functools.partial(log_likelihoods, model=program.model, layout=program.layout)
        )

    def answer(
        self,
        prompts: Sequence[Tokens],
        max_new_tokens: int,
        patches: Sequence[np.ndarray] | None = None,
    ) -> tuple[list[Tokens], list[float]]:
        """Returns what the model goes on with, and the log-probability of each answer.

        Args:
          prompts: tokens, without start id.
          max_new_tokens: the end included.
          patches: float [I, F] of the picture before each prompt; None: there are no pictures.
        """
        answers: list[Tokens] = []
        scores: list[float] = []
        rows = self._program.eval_rows
        for begin in range(0, len(prompts), rows):
            part = prompts[begin : begin + rows]
            padding = rows - len(part)
            pictures = None
            if patches is not None:
                pictures = [*patches[begin : begin + rows], *[np.zeros((0, 0))] * padding]
            with self._program.activate():
                generated = decoding.generate(
                    self._decoder,
                    self._params,
                    self._program.layout,
                    [*part, *[[]] * padding],
                    method=Greedy(),
                    max_new_tokens=max_new_tokens,
                    eos_id=self._vocabulary.eos_id,
                    pad_id=self._vocabulary.pad_id,
                    start_id=self._vocabulary.start_id,
                    bidirectional_prompt=True,
                    patches=pictures,
                )
            answers += generated.tokens[: len(part)]
            scores += generated.log_probabilities[: len(part)]
        return answers, scores

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        """Returns the log-probability of every second sequence after the first, in nats."""
        scores: list[float] = []
        rows = self._program.eval_rows
        shape = RowShape(self._length, self._vocabulary.pad_id)
        for begin in range(0, len(pairs), rows):
            part = [[self._example(*pair)] for pair in pairs[begin : begin + rows]]
            batch = to_features([*part, *[[]] * (rows - len(part))], shape)
            with self._program.activate():
                found = self._program.settled(self._log_likelihoods(self._params, batch))
            scores += fetched(found)[: len(part)].tolist()
        return scores

    def _example(self, given: Tokens, asked: Tokens) -> Example:
        whole = np.array([self._vocabulary.start_id, *given, *asked], np.int32)[: self._length + 1]
        return Example(whole[:-1], whole[1:], prefix=1 + len(given) if given else 0)


def log_likelihoods(params: Tree, batch: Batch, *, model: Transformer, layout: Layout) -> jax.Array:
    """Returns the summed log-probabilities of the targets of each row that carry loss, float32[B].

    Row by row, so that the logits of one row exist at a time.
    """
    output = apply_layers(model, params, batch, layout)
    rest, _ = layouts.split_stack(params, layout)
    head = model.head_params(rest)

    def one(row: Any) -> jax.Array:
        x, targets, weights = row
        normalizer, logit = score_targets(model.logits(head, x[None]), targets[None])
        return jnp.sum(weights * (logit - normalizer)[0])

    return jax.lax.map(one, (output.x, batch["targets"], batch["loss_weights"]))
