import math
import subprocess
import sys

import numpy as np
import pytest

from m6jax.data.config import (
    Builtin,
    DataError,
    LanguageModelling,
    PrefixLM,
    SentencePiece,
    SpanDenoising,
    TextData,
    TextFiles,
    TokenIds,
)
from m6jax.foundation.validated import ConfigError

EIGHT = [3, 9, 1, 4, 2, 7, 5, 6]


@pytest.fixture
def held_out(numbered, tmp_path):
    """Makes data whose eight held-out documents are of 3 to 9 tokens, ends not counted."""

    def make(**options):
        lines = [" ".join([str(10 + i)] * n) for i, n in enumerate(EIGHT)]
        (tmp_path / "valid.txt").write_text("\n".join(lines) + "\n")
        (tmp_path / "train.txt").write_text("9 8 7 6 5 4 3 2 9 8 7 6 5 4 3 2\n")
        source = TextFiles(train=f"{tmp_path}/train.txt", validation=f"{tmp_path}/valid.txt")
        settings = {"sources": (source,), "vocabulary": TokenIds(size=20), "length": 10}
        return TextData(**(settings | options))

    return make


def test_importing_and_making_reads_nothing():
    code = (
        "import sys\n"
        "from m6jax.data.config import *\n"
        "TextData(sources=(Builtin(name='zh'), TextFiles(train='/missing/*'),"
        " TFRecords(train='/missing')), rates=(1, 2, 3))\n"
        "print([m for m in ('tensorflow', 'seqio', 'sentencepiece', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("process_count", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_every_held_out_document_once(held_out, packing, process_count, batch_size):
    """Behaviour B8's data half: any batch size, any number of processes, the same documents."""
    data = held_out(packing=packing, objective=PrefixLM())
    shares = [
        list(data.eval_batches("text", batch_size, i, process_count)) for i in range(process_count)
    ]
    assert len({len(batches) for batches in shares}) == 1
    share = math.ceil(batch_size / process_count)
    targets = [[b["targets"] for b in batches] for batches in shares]
    batches = [np.concatenate(parts) for parts in zip(*targets, strict=True)]
    assert {b["targets"].shape for s in shares for b in s} == {(share, 10)}
    documents = [r[:-1] for r in split_at_ends(np.concatenate(batches).ravel().tolist())]
    assert documents == [[10 + i] * n for i, n in enumerate(EIGHT)]
    weights = sum(float(b["loss_weights"].sum()) for s in shares for b in s)
    again = held_out(packing=packing, objective=PrefixLM(), seed=5).eval_batches("text", 8)
    assert weights == sum(float(b["loss_weights"].sum()) for b in again)


def split_at_ends(tokens):
    documents, document = [], []
    for token in tokens:
        document += [token] * (token != 0)
        if token == 1:
            documents.append(document)
            document = []
    assert not document
    return documents


def test_padding_rows_fill_the_last_batch(held_out):
    *_, last = held_out(packing=False).eval_batches("text", 5)
    assert (last["segment_ids"].max(axis=1) > 0).tolist() == [True] * 3 + [False] * 2
    assert last["loss_weights"][3:].sum() == 0


def test_long_documents_are_scored_token_by_token(held_out):
    """Length 4: a document of 9 tokens and its end is 4 + 4 + 2, each going on from the last."""
    batches = list(held_out(length=4, packing=False).eval_batches("text", 1))
    assert sum(float(b["loss_weights"].sum()) for b in batches) == sum(EIGHT) + 8
    pieces = [b["tokens"][0].tolist() for b in batches if 11 in b["targets"]]
    assert pieces == [[0, 11, 11, 11], [11] * 4, [11, 11, 0, 0]]


def test_bytes_of_held_out_text(held_out, tmp_path):
    data = held_out()
    assert data.eval_names() == ("text",)
    assert data.held_out_text("text") == (tmp_path / "valid.txt").read_bytes()
    assert data.predicted_bytes("text") == len(data.held_out_text("text"))


@pytest.mark.parametrize("objective", [PrefixLM(), SpanDenoising()])
def test_there_are_no_bits_per_byte_where_not_every_byte_is_predicted(held_out, objective):
    vocabulary = TokenIds(size=20, extra_ids=2)
    assert held_out(objective=objective, vocabulary=vocabulary).predicted_bytes("text") is None


def test_the_built_in_data_works_as_it_comes(tmp_path):
    data = TextData(vocabulary=SentencePiece(size=6000))
    vocabulary = data.vocab()
    assert vocabulary.size == 6000
    rows = data.train_rows()
    batch = rows.take(32)
    assert batch["tokens"].shape == (32, 128)
    assert (batch["segment_ids"] > 0).mean() > 0.9
    texts = [vocabulary.decode(row.tolist()) for row in batch["targets"]]
    assert any("e" in text for text in texts)
    assert any(not text.isascii() for text in texts)
    assert data.eval_names() == ("en", "zh")
    for name in data.eval_names():
        assert data.predicted_bytes(name) == len(data.held_out_text(name))
        scored = sum(b["loss_weights"].sum() for b in data.eval_batches(name, 64))
        documents = {"en": 9, "zh": 204}[name]
        encoded = [
            vocabulary.encode(d.decode()) for d in Builtin(name=name).documents("validation")
        ]
        assert scored == sum(map(len, encoded)) + documents


def test_best_fit_fills_rows_of_512():
    """At least 0.95 of the positions of the built-in text, with 256 examples to choose from."""
    rows = TextData(
        vocabulary=SentencePiece(size=6000), length=512, look_ahead=256, prefetch=0
    ).train_rows()
    filled = rows.filled(400)
    assert filled >= 0.95
    assert (rows.take(400)["segment_ids"] > 0).mean() == filled


def test_two_configurations_in_one_process(numbered):
    for size in (40, 50, 40):
        data = numbered([3] * 20, vocabulary=TokenIds(size=size), length=8)
        assert data.train_rows().take(2)["tokens"].shape == (2, 8)
        assert data.mixture() is data.mixture()


def test_rates_default_to_the_number_of_examples(numbered):
    few, many = numbered([2] * 10, name="few"), numbered([2] * 90, name="many")
    both = TextData(
        sources=few.sources + many.sources,
        vocabulary=TokenIds(size=200),
        length=4,
        packing=False,
        prefetch=0,
    )
    drawn = both.train_rows()
    drawn.take(512)
    counts = drawn.state()["place"]["start"]["drawn"]
    assert counts == [0, 0]  # of a round of 1,024
    drawn.take(1024)
    few_drawn, many_drawn = drawn.state()["place"]["start"]["drawn"]
    assert few_drawn + many_drawn == 1024
    assert abs(few_drawn - 102) < 39


def test_files_are_checked_when_read(tmp_path):
    missing = TextData(sources=(TextFiles(train=f"{tmp_path}/no/*.txt"),))
    for read in (missing.vocab, missing.train_rows, lambda: missing.eval_batches("text", 1)):
        with pytest.raises(DataError, match=r"TextFiles\.train: no file matches '.*/no/\*\.txt'"):
            read()


def test_shorter_than_one_row(numbered):
    data = numbered([3, 2], length=8)  # with their ends 4 + 3
    with pytest.raises(DataError, match=r"text has 7 tokens, less than one row .* = 8"):
        data.train_rows()


def test_no_document_long_enough(numbered):
    vocabulary = TokenIds(size=100, extra_ids=4)
    data = numbered([1] * 40, objective=SpanDenoising(), vocabulary=vocabulary, length=8)
    with pytest.raises(DataError, match="'text': no document is long enough for SpanDenoising"):
        data.train_rows()


def test_nothing_held_out(numbered):
    data = numbered([3] * 20)
    assert data.eval_names() == ()
    with pytest.raises(DataError, match="'text' holds out nothing"):
        data.eval_batches("text", 4)
    with pytest.raises(ConfigError, match=r"no source is named 'txt' \(did you mean 'text'\?\)"):
        data.eval_batches("txt", 4)


def test_evaluation_batches_that_cannot_be(held_out):
    with pytest.raises(ConfigError, match="rows of an evaluation batch, 0, must be positive"):
        held_out().eval_batches("text", 0)
    with pytest.raises(ConfigError, match=r"process_index 2 is not in 0 \.\.\. 1"):
        held_out().eval_batches("text", 4, 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ()}, r"TextData\.sources: there must be at least one"),
        ({"sources": (Builtin(), Builtin())}, r"TextData\.sources and held_out: 2 are named 'en'"),
        (
            {"sources": (Builtin(), TextFiles(train="x", name="all"))},
            r"'all' is what all of them together",
        ),
        ({"rates": (1,)}, r"TextData\.rates: 1 rates for 2 sources \(en, zh\)"),
        ({"rates": (1, 0)}, r"TextData\.rates: \(1\.0, 0\.0\) must be positive"),
        ({"rates": (1, math.inf)}, r"TextData\.rates"),
        ({"length": 0}, r"TextData: length and virtual_shards must be positive"),
        ({"virtual_shards": 0}, r"virtual_shards must be positive"),
        ({"prefetch": -1}, r"prefetch not negative"),
        ({"look_ahead": -1}, r"TextData\.look_ahead: -1 must not be negative"),
        ({"look_ahead": 9, "packing": False}, r"look_ahead: 9 .* needs packing"),
        ({"objective": SpanDenoising(), "length": 4}, "4 is too short for SpanDenoising"),
        (
            {"objective": SpanDenoising()},
            r"SpanDenoising with TextData\.length = 128 needs 6 sentinels, .* extra_ids = 0",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        TextData(**options)


@pytest.mark.parametrize(
    "objective", [LanguageModelling(), PrefixLM(), SpanDenoising(mean_span_length=2.0)]
)
def test_every_objective_fills_rows(numbered, objective):
    vocabulary = TokenIds(size=100, extra_ids=8)
    data = numbered([10 + i % 30 for i in range(60)], objective=objective, vocabulary=vocabulary)
    batch = data.train_rows().take(8)
    real = batch["segment_ids"] > 0
    assert real.mean() > 0.8
    assert (batch["loss_weights"][~real] == 0).all()
    assert batch["bidirectional"].any() == (type(objective) is not LanguageModelling)
    inside = (batch["bidirectional"][:, 1:] == 1) & (batch["positions"][:, 1:] > 0)
    assert (batch["loss_weights"][:, :-1][inside] == 0).all()  # its target is in the prefix
