"""What a model answers when it is asked about pictures, held against what is right.

Answers are decoded greedily. An answer is exact if it is one of the right ones, letter by letter;
its token F1 is that of the right answer nearest to it, over words and Chinese characters. Where
answers are classes, a ridge classifier on the same pixels says what a linear model gets right.
"""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from m6jax.data.config import TextData
from m6jax.data.pictures import Pictures, to_features
from m6jax.data.questions import Question, questions, sources_with_questions
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.data.vocab import Vocabulary
from m6jax.experiment.answering import ModelAnswerer
from m6jax.experiment.programs import StageProgram
from m6jax.experiment.sampling import continued
from m6jax.foundation.pytrees import Tree
from m6jax.reporting.report import captions as captions_report
from m6jax.reporting.report.captions import ACROSS, Caption
from m6jax.run import ridge

_MOST_TRAINED_ON = 1000  # questions of a training split: a look at it, not all of a large one
_MOST_FOR_RIDGE = 5000  # training pictures, whose products with each other it needs
_TOKEN = re.compile(r"[\u3400-\u9fff]|[^\s\u3400-\u9fff]+")  # a Chinese character, or a word


class Answered(NamedTuple):
    """The answers to the questions of a split of a source.

    Attributes:
      source: its name.
      split: 'train' or 'validation'.
      questions: what was asked.
      answers: to each.
      ridge: fraction that a ridge classifier gets right; None where answers are no classes.
    """

    source: str
    split: str
    questions: list[Question]
    answers: list[str]
    ridge: float | None = None

    @property
    def name(self) -> str:
        """What metrics call the set."""
        return f"answers/{self.source}/{self.split}"

    @property
    def title(self) -> str:
        """What a person calls the set."""
        return f"{self.source}, {'held out' if self.split == VALIDATION else 'trained on'}"

    def metrics(self) -> dict[str, float]:
        """Returns `exact` and `f1` of each label, such as `en_exact`."""
        found: dict[str, list[float]] = {}
        for question, answer in zip(self.questions, self.answers, strict=True):
            exact = float(answer in question.answers)
            f1 = max(token_f1(answer, right) for right in question.answers)
            found.setdefault(f"{question.label}_exact", []).append(exact)
            found.setdefault(f"{question.label}_f1", []).append(f1)
        means = {name: float(np.mean(values)) for name, values in found.items()}
        return means if self.ridge is None else means | {"ridge_exact": self.ridge}

    def __str__(self) -> str:
        metrics = self.metrics()
        parts = [
            f"{label} {metrics[f'{label}_exact']:.1%} exact, token F1 {metrics[f'{label}_f1']:.3f}"
            for label in dict.fromkeys(q.label for q in self.questions)
        ]
        number = len(self.questions)
        line = f"answers  {self.title} ({number:,} questions): {'; '.join(parts)}"
        if self.ridge is not None:
            line += f"; a ridge classifier on the same pixels {self.ridge:.1%}"
        return line


def answer_sets(
    data: TextData, program: StageProgram, params: Tree, vocabulary: Vocabulary
) -> Iterator[Answered]:
    """Yields the answers to all held-out questions, and to some that were trained on.

    Args:
      data: of the run.
      program: of the stage in which the parameters are.
      params: parameters with router biases (`TrainState.served`).
      vocabulary: of the run.
    """
    answerer = ModelAnswerer(program, params, vocabulary, data.length)
    for source in sources_with_questions(data):
        trained = questions(data, source, TRAIN)
        if source.has_held_out:
            held_out = questions(data, source, VALIDATION)
            answers = ask(held_out, answerer, vocabulary)
            linear = _ridge_exact(trained, held_out)
            yield Answered(source.name, VALIDATION, held_out, answers, linear)
        some = trained[:: -(-len(trained) // _MOST_TRAINED_ON)]
        yield Answered(source.name, TRAIN, some, ask(some, answerer, vocabulary))


def write_captions(report: epath.Path, sets: Sequence[Answered], pictures: Pictures) -> None:
    """Writes `captions.tsv` and `captions.png`, a line of pictures for each set and label."""
    everything, shown = [], []
    for found in sets:
        by_label: dict[str, list[Caption]] = {}
        for question, answer in zip(found.questions, found.answers, strict=True):
            pixels = pictures.pixels(question.patches)
            caption = Caption(pixels, found.title, question.prompt, answer, question.answers)
            by_label.setdefault(question.label, []).append(caption)
        for captions in by_label.values():
            everything += captions
            shown.append(captions[:: -(-len(captions) // ACROSS)])
    if shown:
        captions_report.write_captions(report, everything, shown)


def ask(asked: Sequence[Question], answerer: ModelAnswerer, vocabulary: Vocabulary) -> list[str]:
    """Returns what the model answers to each question."""
    most = max(len(vocabulary.encode(right)) for q in asked for right in q.answers)
    pictures = [to_features(q.patches) for q in asked]
    found, _ = answerer.answer([q.tokens for q in asked], most + 1, pictures)
    return [
        continued(vocabulary, q.prompt, q.tokens, new).removeprefix(q.prompt).strip()
        for q, new in zip(asked, found, strict=True)
    ]


def token_f1(answer: str, right: str) -> float:
    """Returns the harmonic mean of precision and recall of an answer's words and characters."""
    said, wanted = _TOKEN.findall(answer), _TOKEN.findall(right)
    common = sum((collections.Counter(said) & collections.Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _ridge_exact(trained: Sequence[Question], held_out: Sequence[Question]) -> float | None:
    """Returns what a linear classifier gets right; None where answers are no classes."""
    classes = {q.answers for q in trained}
    if (
        len({q.label for q in trained}) > 1
        or any(len(q.answers) > 1 for q in trained)
        or not {q.answers for q in held_out} <= classes
        or len(classes) * 4 > len(trained)
        or len(trained) > _MOST_FOR_RIDGE
    ):
        return None
    found = ridge.classify(_pixels(trained), [q.answers[0] for q in trained], _pixels(held_out))
    return float(np.mean([c == q.answers[0] for c, q in zip(found, held_out, strict=True)]))


def _pixels(asked: Sequence[Question]) -> Any:
    return np.stack([to_features(q.patches).reshape(-1) for q in asked])
