"""A model with more ids than its vocabulary uses none of the others."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import runs

from m6jax.decoding import Beam, Greedy, Sampling, generate
from m6jax.experiment import Sample, Stage
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.block import StackOutput
from m6jax.modeling.layers import NEVER
from m6jax.modeling.transformer import Transformer
from m6jax.run import train
from m6jax.training.losses import Loss, batch_weight, loss_sums

IDS, V = 5, 8


def test_the_loss_is_that_of_a_head_without_the_other_ids():
    """Smoothing, z-loss and gradients too."""
    x = jax.random.normal(jax.random.key(0), (2, 3, V))
    weights = jnp.ones((2, 3))
    batch = {"targets": jnp.array([[0, 1, 4], [2, 3, 0]]), "loss_weights": weights}
    batch["segment_ids"] = jnp.ones((2, 3), jnp.int32)
    loss = Loss(label_smoothing=0.3, z_loss=0.1)

    def masked(head, x):
        return jnp.where(jnp.arange(V) < IDS, x * head, NEVER)

    def cut(head, x):
        return (x * head)[..., :IDS]

    def total(logits_fn, x):
        weight = batch_weight(batch)
        return loss_sums(
            logits_fn, jnp.ones(V), StackOutput(x, None), batch, weight, loss, None
        ).total

    ours, theirs = (models.jit(jax.value_and_grad(partial(total, f)))(x) for f in (masked, cut))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-7)


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("method", [Greedy(), Sampling(temperature=9.0), Beam(num_beams=3)])
def test_no_method_gives_an_id_without_a_piece(method):
    """Whatever the logits: here the largest are those of the other ids."""
    config = models.tiny(num_ids=IDS, num_layers=1, tied_output=False)
    model, layout = Transformer(config), models.stacked(config, 1)
    params = models.draw(config, layout)
    params["head"]["kernel"][:, IDS:] *= 1e3
    texts = generate(
        model,
        params,
        layout,
        [[3, 4], [1]] * 4,
        method=method,
        max_new_tokens=4,
        eos_id=1,
        pad_id=0,
        start_id=0,
    )
    assert max(token for row in texts.tokens for token in row) < IDS


@pytest.mark.usefixtures("quick_runs")
def test_a_run_knows_its_vocabulary_and_a_failing_sample_costs_no_report(text, tmp_path, capsys):
    run = runs.experiment(
        text,
        tmp_path,
        model=models.tiny(
            vocab_size=384,
            max_length=16,
            positions="LEARNED",
            num_layers=1,
            moe=None,
            pattern=("DENSE",),
        ),
        stages=(Stage(name="only", unit=1),),
        steps=1,
        sample=Sample(prompts=("the whale " * 40,)),
    )
    result = train.run(run)
    assert result.finished
    assert result.samples == []
    assert result.report
    assert "sample   none: " in capsys.readouterr().out
    assert "num_ids = None" in (tmp_path / "config.gin").read_text()
    refused = dataclasses.replace(run, model=dataclasses.replace(run.model, num_ids=64))
    with pytest.raises(ConfigError, match=r"num_ids: 64 are not the 320 tokens"):
        train.run(dataclasses.replace(refused, model_dir=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"num_ids: 400 are more than vocab_size = 384"):
        dataclasses.replace(run.model, num_ids=400)
