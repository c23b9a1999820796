"""Evaluation on held-out documents: every token once, each with the same weight.

Sums are added over all batches before anything is divided, so the result does not depend on the
batch size: batches of 2 tokens with mean loss 4 and of 6 tokens with mean loss 2 have loss 2.5.
They are added in float64 on the host: float32 knows no token after the 16,777,216th.

Several held-out sets have two losses together: that of all their tokens, and the mean of their own.
"""

import gzip
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from m6jax.data.config import ALL_SETS, DataError, SeqioTask
from m6jax.data.task_metrics import task_metrics
from m6jax.experiment import Experiment
from m6jax.experiment.answering import ModelAnswerer
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
      The metrics of `losses.summarize`, with perplexity (of the cross-entropy alone, whatever is
      minimised), tokens (those that are predicted), and bits_per_byte if there are bytes.
      `total_loss` is left out: it is a training loss.

    Raises:
      DataError: there is no token to predict.
    """
    return _metrics(_add_up(step, params, batches), num_bytes)


def _add_up(
    step: Callable[[Tree, Any], LossSums], params: Tree, batches: Iterable[Mapping[str, Any]]
) -> LossSums:
    """Returns the sums of all batches, float64 on the host; raises as `evaluate`."""
    sums, under_way = None, None
    for batch in itertools.chain(batches, [None]):
        # The next batch is under way before the last one's sums are waited for.
        following = None if batch is None else step(params, batch)
        if under_way is not None:
            part = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(under_way))
            sums = part if sums is None else jax.tree.map(np.add, sums, part)
        under_way = following
    if sums is None or sums.tokens.targets == 0:
        raise DataError("no data: there is not one token to evaluate on")
    return sums


def _metrics(sums: LossSums, num_bytes: int | None) -> dict[str, Any]:
    metrics: dict[str, Any] = dict(losses.summarize(sums))
    del metrics["total_loss"]
    metrics["perplexity"] = perplexity(float(metrics["loss"]))
    metrics["tokens"] = float(sums.tokens.targets)
    if num_bytes is not None:
        metrics["bits_per_byte"] = float(sums.tokens.cross_entropy) / math.log(2) / num_bytes
    return metrics


def evaluate_sets(
    experiment: Experiment, program: StageProgram, params: Tree, names: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the metrics of held-out sets, and of several together.

    The latter are called `all`: what is measured of all tokens, and `mean_loss`, the mean of the
    sets' losses, in which a small set counts as much as a large one.

    Args:
      experiment: the run.
      program: of the stage in which the parameters are.
      params: parameters with router biases (`TrainState.served`).
      names: of the sets; None: all.
    """
    data = experiment.data
    processes = jax.process_index(), jax.process_count()
    sets = []
    for name in data.eval_names() if names is None else names:
        batches = data.eval_batches(name, program.eval_rows, *processes)
        sums = _add_up(program.evaluate, params, batches)
        sets.append(sums)
        yield name, _metrics(sums, data.predicted_bytes(name))
    if len(sets) > 1:
        together = _metrics(jax.tree.map(lambda *parts: sum(parts), *sets), None)
        yield ALL_SETS, together | {"mean_loss": mean_loss(sets)}


def evaluate_tasks(
    experiment: Experiment, program: StageProgram, params: Tree
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the metrics of every seqio task that has metrics of its own.

    Args:
      experiment: the run, with its own vocabulary.
      program: of the stage in which the parameters are.
      params: parameters with router biases (`TrainState.served`).
    """
    data = experiment.data
    tasks = [source for source in data.sources if isinstance(source, SeqioTask)]
    if not tasks:
        return
    vocabulary = data.vocab()
    answerer = ModelAnswerer(program, params, vocabulary, data.length)
    for source in tasks:
        yield from task_metrics(source, vocabulary, data.length, answerer)


def perplexity(loss: float) -> float:
    """Returns e to the cross-entropy in nats; infinity where no float64 holds it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def mean_loss(sets: Sequence[LossSums]) -> float:
    """Returns the mean of the losses of some sets, each with the same weight."""
    return float(np.mean([s.tokens.cross_entropy / s.tokens.targets for s in sets]))


def gzip_bits_per_byte(text: bytes) -> float:
    """Returns the bits a byte that `gzip -9` needs for the text: what a model has to beat."""
    return 8 * len(gzip.compress(text, compresslevel=9)) / len(text)
