import functools
import types

import models
import numpy as np
import pytest

from m6jax.data.config import TokenIds
from m6jax.data.preprocessors import TaskTargets
from m6jax.experiment.answering import ModelAnswerer
from m6jax.foundation.partitioning import Partitioning
from m6jax.modeling.transformer import Transformer
from m6jax.training.train_step import evaluation_step

CONFIG = models.tiny(moe=None, pattern=("DENSE",))
LAYOUT = models.stacked(CONFIG)
PAIRS = [([5, 6, 7], [8, 9, 1]), ([], [4, 1]), ([9], [9, 9, 9, 1]), ([2, 3], [1])]


@pytest.fixture(scope="module")
def asked():
    """A model that is asked, its parameters and its vocabulary."""
    mesh = Partitioning().make_mesh()
    program = types.SimpleNamespace(
        model=Transformer(CONFIG),
        layout=LAYOUT,
        eval_rows=8,
        activate=functools.partial(Partitioning().activate, mesh),
        settled=lambda results: results,
    )
    params = models.draw(CONFIG, LAYOUT)
    vocabulary = TokenIds(size=32).load(())
    return ModelAnswerer(program, params, vocabulary, 8), params, vocabulary


def test_scores_are_what_evaluation_adds_up(asked):
    """Each pair alone in a batch has the loss of evaluation, whatever stands in other rows."""
    answerer, params, vocabulary = asked
    scores = answerer.score(PAIRS)
    step = models.jit(functools.partial(evaluation_step, model=Transformer(CONFIG), layout=LAYOUT))
    for (given, wanted), score in zip(PAIRS, scores, strict=True):
        document = np.array([*given, *wanted])
        example = TaskTargets().example(
            document, 0, len(document), 0, vocabulary, prompt=len(given)
        )
        batch = {name: np.zeros((1, 8), np.int32) for name in ("tokens", "targets", "positions")}
        n = len(document)
        batch["tokens"][0, :n], batch["targets"][0, :n] = example.tokens, example.targets
        batch["positions"][0, :n] = np.arange(n)
        inside = np.arange(8) < n
        batch["segment_ids"] = inside[None].astype(np.int32)
        batch["bidirectional"] = (np.arange(8) < example.prefix)[None].astype(np.int32)
        weights = inside & (np.arange(8) >= len(given))
        batch["loss_weights"] = weights[None].astype(np.float32)
        sums = step(params, batch)
        assert score == pytest.approx(-float(sums.tokens.cross_entropy), rel=1e-5)


def test_answers_are_the_likeliest_tokens(asked):
    """An answer's log-probability is that of the same tokens scored after its prompt."""
    answerer, _, _ = asked
    prompts = [given for given, _ in PAIRS] * 3  # more than one batch
    answers, scores = answerer.answer(prompts, 3)
    assert len(answers) == len(scores) == 12
    assert answers[:4] == answers[4:8]
    assert all(1 <= len(answer) <= 3 for answer in answers)
    again = answerer.score(list(zip(prompts, answers, strict=True)))
    np.testing.assert_allclose(scores, again, rtol=1e-4)
    other = [[*answer[:-1], (answer[-1] + 1) % 32] for answer in answers]
    assert all(np.array(answerer.score(list(zip(prompts, other, strict=True)))) < np.array(again))
