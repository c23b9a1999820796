"""Runs that begin with another model's parameters: of Hugging Face's folder, or upcycled."""

import dataclasses

import models
import numpy as np
import pytest
import runs
import source_runs
from source_runs import DATA_STATE, DEPTH, STEP, experiment, layout

from m6jax.converting import starting
from m6jax.data.config import SentencePiece, TextData, TextFiles, TokenIds
from m6jax.experiment import Initial, Stage
from m6jax.formats import Export, exporting
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.modeling.config import Activation, LayerKind
from m6jax.modeling.routers import TopK
from m6jax.training.train_step import Update

V = 32
EXPERTS = models.experts(
    num_prototypes=1, normalize_weights=True, load_balance_loss=0.0, router_z_loss=0.0
)
MIXTRAL = models.tiny(
    num_layers=DEPTH,
    moe=EXPERTS,
    gated_mlp=True,
    activation=Activation.SILU,
    scale_embedding=False,
    tied_output=False,
)
DENSE = dataclasses.replace(MIXTRAL, moe=None, pattern=(LayerKind.DENSE,))
REAL = Stage(name="real", form=Form.UNROLLED)
BATCH = models.make_batch()


def write(directory, config, vocabulary=None):
    """A folder in Hugging Face's format; returns the parameters, unrolled."""
    lies = models.unrolled(config)
    params = models.draw(config, lies)
    vocabulary = vocabulary or TokenIds(size=V).load(())
    settings = Export(format="HUGGING_FACE")
    exporting.export(params, config, lies, vocabulary, settings, directory, {})
    return params


def begun(tmp_path, model, stage=REAL, go_to=lambda place: None, initial=None, **changes):
    start = Initial(model_dir=str(tmp_path / "source"), **(initial or {}))
    run = experiment(tmp_path / "target", stage, model=model, initial=start, **changes)
    return starting.begin(run, go_to)


def logits(config, lies, params):
    dropless = config
    if config.moe is not None:
        moe = dataclasses.replace(config.moe, capacity_factor=None)
        dropless = dataclasses.replace(config, moe=moe)
    real = BATCH["segment_ids"] > 0
    return np.asarray(models.logits_fn(dropless, lies)(params, BATCH))[real]


def test_mixtral_is_put_where_it_rests(tmp_path):
    params = write(tmp_path / "source", MIXTRAL)
    places = []
    model = dataclasses.replace(
        MIXTRAL,
        vocab_size=40,
        num_ids=V,
        moe=dataclasses.replace(EXPERTS, router=TopK(bias_rate=1e-3)),
    )
    start = begun(
        tmp_path,
        model,
        Stage(name="real"),
        places.append,
        partitioning=Partitioning(data=2, expert=4),
        update=Update(average_decay=0.9),
    )
    assert (start.stage, start.step, places, int(start.state.step)) == (0, 0, [{}], 0)
    got = dict(pytrees.flatten_named(start.state.params))
    for name in ("attention/query", "moe/up", "moe/router/kernel"):
        one, two = (name.split("/"), got[f"layers/{name}"])
        for i in range(DEPTH):
            leaf = params[f"layers_{i}"]
            for part in one:
                leaf = leaf[part]
            np.testing.assert_array_equal(two[i], leaf)
    np.testing.assert_array_equal(got["embedder/table"][:V], params["embedder"]["table"])
    assert not np.asarray(got["head/kernel"])[:, V:].any()
    for ours, wanted in zip(
        pytrees.flatten_named(start.state),
        pytrees.flatten_named(start.program.abstract),
        strict=True,
    ):
        assert ours[1].sharding == wanted[1].sharding, ours[0]
    averaged = start.state.extra.averaged["layers"]["moe"]["up"]
    np.testing.assert_array_equal(averaged, got["layers/moe/up"])
    assert not any(
        np.asarray(x).any() for _, x in pytrees.flatten_named(start.state.extra.router_bias)
    )
    assert "missing" in str(start)


def test_a_dense_folder_is_upcycled(tmp_path):
    params = write(tmp_path / "source", DENSE)
    start = begun(tmp_path, MIXTRAL, initial={"upcycle": True, "parameters_only": True})
    got = start.state.params
    assert got["layers_0"]["moe"]["up"].shape == (8, 16, 16)
    expected = logits(DENSE, models.unrolled(DENSE), params)
    models.assert_close(logits(MIXTRAL, start.program.layout, got), expected, 1e-5)


def test_a_dense_run_with_shared_layers_is_upcycled_and_delinked(tmp_path):
    source = experiment(tmp_path / "source", model=DENSE)
    state = source_runs.make_state(source, layout(1))
    source_runs.save(tmp_path / "source", state, layout(1))
    places = []
    pattern = (LayerKind.DENSE, LayerKind.SPARSE)
    model = dataclasses.replace(MIXTRAL, pattern=pattern)
    unit = Stage(name="real", form=Form.UNROLLED)
    # A round of two layers is shared; both are copies of the one.
    source_runs.save(tmp_path / "pairs", source_runs.make_state(source, layout(2)), layout(2))
    with pytest.raises(ConfigError, match="unit"):
        begun(tmp_path, model, unit, initial={"upcycle": True, "parameters_only": True})
    start = begun(
        tmp_path, MIXTRAL, unit, places.append, {"upcycle": True, "parameters_only": True}
    )
    assert (start.step, int(start.state.step), places) == (STEP, STEP, [DATA_STATE])
    expected = logits(DENSE, models.stacked(DENSE, 1), state.params)
    models.assert_close(logits(MIXTRAL, start.program.layout, start.state.params), expected, 1e-5)
    assert "upcycled" in str(start)


@pytest.mark.parametrize(
    ("model", "initial", "message"),
    [
        (dataclasses.replace(MIXTRAL, rope_base=5.0), {}, r"rope_base = 10000.0 there, 5.0 here"),
        (
            dataclasses.replace(MIXTRAL, moe=dataclasses.replace(EXPERTS, num_selected_experts=1)),
            {},
            "moe.num_selected_experts = 2 there, 1 here",
        ),
        (dataclasses.replace(MIXTRAL, vocab_size=16), {}, "16 is less than the 32 ids"),
        (
            MIXTRAL,
            {"upcycle": True, "parameters_only": True},
            "the other model's layers are SPARSE already",
        ),
    ],
)
def test_models_that_compute_something_else_are_refused(tmp_path, model, initial, message):
    write(tmp_path / "source", MIXTRAL)
    with pytest.raises(ConfigError, match=message):
        begun(tmp_path, model, initial=initial)


def test_other_things_that_cannot_be(tmp_path):
    write(tmp_path / "source", DENSE)
    with pytest.raises(
        ConfigError, match=r"DENSE.*there, .*SPARSE.* here \(Initial.upcycle = True"
    ):
        begun(tmp_path, MIXTRAL)
    with pytest.raises(ConfigError, match=r"Stage.unit: .* 4 distinct layers.* with 2 cannot have"):
        begun(tmp_path, DENSE, Stage(name="pseudo", unit=2))
    upcycle = {"upcycle": True, "parameters_only": True}
    with pytest.raises(ConfigError, match=r"Initial.upcycle: .* cannot become the model"):
        begun(tmp_path, MIXTRAL, Stage(name="pseudo", unit=2), initial=upcycle)
    with pytest.raises(ConfigError, match=r"Initial\.parameters_only = True"):
        Initial(model_dir="there", upcycle=True)


def test_the_folders_vocabulary_is_asked_for(tmp_path, text):
    vocabulary = SentencePiece(size=runs.VOCABULARY)
    sources = (TextFiles(train=str(text)),)
    data = TextData(sources=sources, vocabulary=vocabulary, length=16)
    model = dataclasses.replace(MIXTRAL, vocab_size=runs.VOCABULARY)
    write(tmp_path / "source", model, data.vocab())
    other = dataclasses.replace(data, vocabulary=SentencePiece(size=300))
    with pytest.raises(ConfigError, match=r"set SentencePiece.path = '.*tokenizer.model'"):
        begun(tmp_path, model, data=other)
    path = str(tmp_path / "source" / "tokenizer.model")
    again = dataclasses.replace(data, vocabulary=SentencePiece(path=path))
    assert begun(tmp_path, model, data=again).step == 0
