"""Evaluation on held-out documents: every token once, each with the same weight.

Sums are added over all batches before anything is divided, so the result does not depend on the
batch size: batches of 2 tokens with mean loss 4 and of 6 tokens with mean loss 2 have loss 2.5.
"""

import gzip
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from m6jax.data.config import DataError
from m6jax.experiment import Experiment
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.pytrees import Tree
from m6jax.training import losses
from m6jax.training.losses import LossSums


def evaluate(
    step: Callable[[Tree, Any], LossSums],
    params: Tree,
    batches: Iterable[Mapping[str, Any]],
    num_bytes: int | None,
) -> dict[str, Any]:
    """Measures a model on held-out batches.

    Args:
      step: sums of one batch.
      params: parameters.
      batches: arrays that `step` takes.
      num_bytes: UTF-8 bytes of the text in all batches together; None where there is no text, or
        where not all of it is predicted.

    Returns:
      The metrics of `losses.summarize`, with perplexity and tokens, and bits_per_byte if there are
      bytes. `total_loss` is left out: it is a training loss.

    Raises:
      DataError: there is no token to predict.
    """
    sums = None
    for batch in batches:
        part = step(params, batch)
        sums = part if sums is None else losses.add(sums, part)
    if sums is None or float(sums.tokens.targets) == 0:
        raise DataError("no data: there is not one token to evaluate on")
    metrics = jax.tree.map(np.asarray, losses.summarize(sums))
    del metrics["total_loss"]
    metrics["perplexity"] = math.exp(min(float(metrics["loss"]), 700.0))
    metrics["tokens"] = float(sums.tokens.targets)
    if num_bytes is not None:
        metrics["bits_per_byte"] = float(sums.tokens.cross_entropy) / math.log(2) / num_bytes
    return metrics


def evaluate_sets(
    experiment: Experiment, program: StageProgram, params: Tree, names: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the metrics of held-out sets.

    Args:
      experiment: the run.
      program: of the stage in which the parameters are.
      params: parameters with router biases (`TrainState.served`).
      names: of the sets; None: all.
    """
    data = experiment.data
    processes = jax.process_index(), jax.process_count()
    for name in data.eval_names() if names is None else names:
        batches = data.eval_batches(name, program.eval_rows, *processes)
        yield name, evaluate(program.evaluate, params, batches, data.predicted_bytes(name))


def gzip_bits_per_byte(text: bytes) -> float:
    """Returns the bits a byte that `gzip -9` needs for the text: what a model has to beat."""
    return 8 * len(gzip.compress(text, compresslevel=9)) / len(text)
