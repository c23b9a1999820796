"""A trained model for lm-evaluation-harness (`pip install 'm6jax[harness]'`).

>>> import lm_eval, m6jax
>>> from m6jax.run import harness
>>> model = harness.language_model(m6jax.load("runs/mine"))
>>> lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

Experts serve every choice, as in decoding, so that no score depends on the other rows of a batch.
Texts longer than the run's rows lose their beginning; rolling likelihoods go through windows of
that length, each token predicted once.

Axis letters: B rows, T length.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m6jax import layouts
from m6jax.decoding import PROMPT_MULTIPLE, Greedy, Sampling, decoding_model
from m6jax.experiment import Sample
from m6jax.experiment.sampling import batches, write_texts
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout
from m6jax.modeling.block import Batch
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.transformer import Transformer
from m6jax.run.trained import TrainedModel
from m6jax.training.losses import score_targets

_MOST_NEW_TOKENS = 256  # where a task does not say how many

Tokens = list[int]


def language_model(run: TrainedModel, batch_size: int = 16) -> Any:
    """Returns an `lm_eval.api.model.LM`.

    Args:
      run: an opened run.
      batch_size: B, rows that are scored at a time.

    Raises:
      ConfigError: lm-evaluation-harness is not installed, or the model cannot serve every choice.
    """
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise ConfigError(
            "harness: lm_eval is not installed (pip install 'm6jax[harness]')"
        ) from error
    return type("M6", (_Answers, base), {})(Scorer(run, batch_size))


class Scorer:
    """Log-likelihoods of tokens after others.

    Args:
      run: an opened run.
      batch_size: B.
    """

    def __init__(self, run: TrainedModel, batch_size: int = 16):
        self.run = run
        self.length = run.experiment.data.length
        divisor = run.program.rows_divisor
        self._rows = -(-batch_size // divisor) * divisor
        model = decoding_model(run.program.model)
        self._score = jax.jit(functools.partial(_scores, model=model, layout=run.program.layout))

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Returns, for (given, asked), the log-probability of what is asked, and whether greedy.

        Args:
          pairs: tokens without start id; what is given may be empty, what is asked not.
        """
        found: dict[int, tuple[float, bool]] = {}
        sizes = [len(given) + len(asked) for given, asked in pairs]
        for numbers in batches(sizes, self._rows):
            batch = self._features([pairs[i] for i in numbers])
            with self.run.program.activate():
                sums, greedy = jax.device_get(self._score(self.run.served, batch))
            found |= {i: (float(sums[row]), bool(greedy[row])) for row, i in enumerate(numbers)}
        return [found[i] for i in range(len(pairs))]

    def windows(self, tokens: Tokens) -> list[tuple[Tokens, Tokens]]:
        """Cuts a text in pairs (given, asked) in which every token is asked once."""
        T = self.length
        return [([], tokens[i : i + T]) for i in range(0, len(tokens), T)]

    def _features(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> dict[str, np.ndarray]:
        start, pad = self.run.vocabulary.start_id, self.run.vocabulary.pad_id
        whole = [([start, *given, *asked])[-(self.length + 1) :] for given, asked in pairs]
        longest = max(map(len, whole)) - 1
        T = min(-(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE, max(self.length, longest))
        tokens = np.full((self._rows, T), pad, np.int32)
        targets, weights = tokens.copy(), np.zeros((self._rows, T), np.float32)
        segments = np.zeros_like(tokens)
        for row, (text, (_, asked)) in enumerate(zip(whole, pairs, strict=True)):
            n = len(text) - 1
            tokens[row, :n], targets[row, :n], segments[row, :n] = text[:-1], text[1:], 1
            weights[row, max(n - len(asked), 0) : n] = 1
        positions = np.arange(T, dtype=np.int32) * segments
        return {
            "tokens": tokens,
            "targets": targets,
            "segment_ids": segments,
            "positions": positions,
            "loss_weights": weights,
        }


class _Answers:
    """What lm-evaluation-harness asks of a model; its base class is joined in `language_model`."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self._scorer = scorer
        self._encode = scorer.run.vocabulary.encode

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns (log-probability, is greedy) of each continuation after its context."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            given, whole = self._encode(context), self._encode(context + continuation)
            # Pieces may join over the border: what is asked begins where the two differ.
            same = next((i for i, x in enumerate(given) if whole[i : i + 1] != [x]), len(given))
            same = min(same, len(whole) - 1)
            pairs.append((whole[:same], whole[same:]))
        return self._scorer.score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each whole text."""
        cut = [self._scorer.windows(self._encode(request.args[0])) for request in requests]
        scores = iter(self._scorer.score([pair for pairs in cut for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in cut]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns what the model writes after each context, up to a stop string."""
        run = self._scorer.run
        texts = []
        for context, settings in (request.args for request in requests):
            until = settings.get("until", ())
            stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
            temperature = float(settings.get("temperature", 0.0))
            draws = settings.get("do_sample", temperature > 0) and temperature > 0
            sample = Sample(
                prompts=(context,),
                method=Sampling(temperature=temperature) if draws else Greedy(),
                max_new_tokens=int(settings.get("max_gen_toks", _MOST_NEW_TOKENS)),
                stop=stop,
            )
            seed = run.experiment.seed
            (text,) = write_texts(run.program, run.served, sample, run.vocabulary, seed)
            texts.append(text.text)
        return texts


def _scores(
    params: Tree, batch: Batch, *, model: Transformer, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Returns float32[B], sums of log-probabilities, and bool[B], whether all are the likeliest.

    Row by row, so that the logits of one row exist at a time.
    """
    output = apply_layers(model, params, batch, layout)
    rest, _ = layouts.split_stack(params, layout)
    head = model.head_params(rest)

    def one(row: Any) -> tuple[jax.Array, jax.Array]:
        x, targets, weights = row
        logits = model.logits(head, x[None])
        normalizer, logit = score_targets(logits, targets[None])
        likeliest = jnp.argmax(logits, -1)[0] == targets
        total = jnp.sum(weights * (logit - normalizer)[0])
        return total, jnp.all(likeliest | (weights == 0))

    return jax.lax.map(one, (output.x, batch["targets"], batch["loss_weights"]))
