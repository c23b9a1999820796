"""The metrics of seqio tasks, by `seqio.Evaluator`: `task.metric_fns` of what a model answers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from m6jax.data.errors import DataError
from m6jax.data.seqio_modules import INPUTS, TARGETS
from m6jax.data.seqio_sources import SeqioTask, TaskPart
from m6jax.data.source import VALIDATION
from m6jax.data.tensorflow_import import import_tensorflow, running
from m6jax.data.vocab import Vocabulary

Tokens = list[int]


class Answerer(Protocol):
    """A model that is asked."""

    def answer(
        self, prompts: Sequence[Tokens], max_new_tokens: int
    ) -> tuple[list[Tokens], list[float]]:
        """Returns what the model goes on with, and the log-probability of each answer."""

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        """Returns the log-probability of every second sequence after the first, in nats."""


def task_metrics(
    source: SeqioTask, vocabulary: Vocabulary, length: int, answerer: Answerer
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the metrics of every task of a source that has any and is held out.

    Args:
      source: the tasks.
      vocabulary: of the run.
      length: T, of a row.
      answerer: the model.

    Raises:
      DataError: a metric fails, or asks for what no language model gives.
    """
    if not source.has_held_out:
        return
    split = source.split(VALIDATION)
    for part in source.in_split(source.parts(vocabulary), VALIDATION):
        with running(f"the metrics of task {part.name!r}"):
            if part.task.metric_objs:
                lengths = source.lengths(part, length)
                asker = _Asker(part, vocabulary, lengths[TARGETS], answerer)
                yield part.name, _evaluate(source, part, split, lengths, asker)


def _evaluate(
    source: SeqioTask, part: TaskPart, split: str, lengths: Mapping[str, int], asker: "_Asker"
) -> dict[str, Any]:
    _, seqio = import_tensorflow()
    kinds = seqio.metrics.ModelOutputType
    functions = {
        kinds.PREDICTION: asker.predict,
        kinds.SCORE: asker.score,
        kinds.PREDICTION_WITH_AUX: asker.predict_with_scores,
    }
    for metric in part.task.metric_objs:
        if metric.model_output_type not in functions:
            raise DataError(
                f"task {part.name!r}: a metric asks for {metric.model_output_type.name}; there are"
                f" {', '.join(kind.name for kind in functions)}"
            )

    base: Any = seqio.PassThroughFeatureConverter

    class Features(base):
        pack = False  # seqio's own lacks both, and its Evaluator asks
        TASK_FEATURES: ClassVar[dict[str, Any]] = {}

    evaluator = seqio.Evaluator(
        part.task.name,
        Features(),
        eval_split=split,
        use_cached=source.use_cached,
        seed=source.seed,
        sequence_length=dict(lengths),
        async_compute_metrics=False,
    )
    found, _ = evaluator.evaluate(compute_metrics=True, model_fns=functions)
    return {name: _plain(value) for name, value in found.result()[part.task.name].items()}


class _Asker:
    """Asks a model what `seqio.Evaluator` wants to know."""

    def __init__(
        self, part: TaskPart, vocabulary: Vocabulary, max_new_tokens: int, answerer: Answerer
    ):
        self._part = part
        self._eos_id = vocabulary.eos_id
        self._most = max_new_tokens
        self._answerer = answerer

    def predict(self, dataset: Any) -> list[tuple[int, Tokens]]:
        """Returns number and answer of every example."""
        return self.predict_with_scores(dataset)[0]

    def predict_with_scores(self, dataset: Any) -> tuple[list[tuple[int, Tokens]], dict[str, Any]]:
        """Returns number and answer of every example, and `scores`, their log-probabilities.

        All answers are of one length, which seqio needs: ends fill them.
        """
        numbers, examples = _listed(dataset)
        prompts = [_tokens(example, INPUTS) for example in examples]
        answers, scores = self._answerer.answer(prompts, self._most)
        longest = max(map(len, answers)) + 1
        filled = [answer + [self._eos_id] * (longest - len(answer)) for answer in answers]
        return list(zip(numbers, filled, strict=True)), {"scores": scores}

    def score(self, dataset: Any) -> list[tuple[int, float]]:
        """Returns number and log-probability of the targets of every example."""
        numbers, examples = _listed(dataset)
        pairs = [(_tokens(example, INPUTS), _tokens(example, TARGETS)) for example in examples]
        return list(zip(numbers, self._answerer.score(pairs), strict=True))


def _listed(dataset: Any) -> tuple[list[int], list[Mapping[str, Any]]]:
    pairs = list(dataset.as_numpy_iterator())
    return [int(number) for number, _ in pairs], [example for _, example in pairs]


def _tokens(example: Mapping[str, Any], name: str) -> Tokens:
    return np.asarray(example.get(name, ())).astype(int).tolist()


def _plain(value: Any) -> Any:
    """Returns a number or a text for a metric's value."""
    value = getattr(value, "value", getattr(value, "textdata", value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else float(value)
