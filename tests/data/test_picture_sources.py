"""Pictures with texts: what comes with the package, and rows of them."""

import dataclasses

import numpy as np
import pytest

from m6jax.data.config import (
    Builtin,
    BuiltinPictures,
    DataError,
    LanguageModelling,
    Pictures,
    SentencePiece,
    TextData,
)
from m6jax.data.picture_records import Record, check_pairs, documents_of, label
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.foundation.validated import ConfigError

EMOJI, FASHION = BuiltinPictures(name="emoji"), BuiltinPictures(name="fashion")


@pytest.fixture(scope="module")
def data():
    return TextData(
        sources=(EMOJI, FASHION, Builtin(name="zh")),
        vocabulary=SentencePiece(size=6000),
        pictures=Pictures(grid=(2, 2), patch_size=4, per_row=3),
        rates=(8.0, 8.0, 1.0),
        length=64,
        prefetch=0,
    )


@pytest.mark.parametrize(("source", "train", "held_out"), [(EMOJI, 461, 51), (FASHION, 480, 120)])
def test_splits(source, train, held_out):
    trained, scored = list(source.records(TRAIN)), list(source.records(VALIDATION))
    assert (len(trained), len(scored)) == (train, held_out)
    assert not {r.where for r in trained} & {r.where for r in scored}


def test_every_fifth_product_of_each_class_is_held_out():
    classes = [record.fields["class"] for record in FASHION.records(VALIDATION)]
    assert {c: classes.count(c) for c in classes} == dict.fromkeys(classes, 12)
    assert len(set(classes)) == 10


def test_emoji_are_asked_for_in_both_languages():
    documents = documents_of(next(EMOJI.records(TRAIN)), EMOJI.pairs)
    assert [tuple(d) for d in documents] == [
        ("English: ", "file folder", 0),
        ("中文：", "文件夹", 1),
    ]
    assert [label(EMOJI.pairs, kind) for kind in (0, 1)] == ["en", "zh"]


def test_several_answers_and_questions():
    fields = {"question": "What?", "answers": ["cat", "kitten", "cat", " "], "year": 1999}
    pairs = (("{question} ", "{answers}"), ("", "{year}"))
    found = documents_of(Record("r", b"", fields), pairs)
    assert [tuple(d) for d in found] == [
        ("What? ", "cat", 0),
        ("What? ", "kitten", 0),
        ("", "1999", 1),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"texts": "a"}, r"there is no field 'text' \(did you mean 'texts'\?\)"),
        ({"text": {"a": 1}}, "field 'text' holds dict, wanted text"),
        ({"text": ["", " "]}, "every answer is empty"),
    ],
)
def test_records_that_cannot_be_used(fields, message):
    with pytest.raises(DataError, match=message):
        documents_of(Record("r", b"", fields), (("", "{text}"),))


def test_a_prompt_has_one_value():
    record = Record("r", b"", {"q": ["a", "b"], "text": "c"})
    with pytest.raises(DataError, match=r"the prompt '\{q\}' has 2 values, wanted one"):
        documents_of(record, (("{q}", "{text}"),))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ((), "there must be at least one prompt with its answer"),
        ((("", "text"),), "the answer 'text' names no field"),
        ((("{", "{text}"),), "Single '{' encountered"),
    ],
)
def test_wrong_pairs(pairs, message):
    with pytest.raises(ConfigError, match=message):
        check_pairs("X", pairs)


def test_rows_of_pictures_and_text(data):
    """Every picture's patches stand before its own text, at most three in a row, some rows none."""
    batch = data.train_rows().take(64)
    assert batch["patches"].shape == (64, 12, 48)
    assert data.patches_per_row == 12
    mask = batch["patch_mask"]
    per_row = mask.sum(axis=1)
    assert set(per_row.tolist()) <= {0, 4, 8, 12}
    assert per_row.max() == 12
    assert (per_row == 0).any()
    assert (batch["loss_weights"][mask == 1] == 0).all()
    assert (batch["bidirectional"][mask == 1] == 1).all()
    assert ((batch["positions"] < 4) >= mask).all()
    for patches, count in zip(batch["patches"], per_row, strict=True):
        assert np.abs(patches).max() <= 1
        assert not patches[count:].any()


def test_every_row_is_the_picture_and_its_answer(data):
    """Held-out fashion: a row's text is the class of the picture before it."""
    vocabulary = data.vocab()
    records = list(FASHION.records(VALIDATION))
    settings = dataclasses.replace(data, packing=False)
    batches = list(settings.eval_batches("fashion", 120))
    assert len(batches) == 1
    for row, record in enumerate(records):
        features = {name: values[row] for name, values in batches[0].items()}
        asked = features["targets"][features["loss_weights"] > 0]
        assert vocabulary.decode(asked.tolist()) == record.fields["class"]
        expected = data.pictures.patches(record.picture) / 127.5 - 1
        np.testing.assert_allclose(features["patches"][:4], expected, atol=1e-6)
        given = features["tokens"][(features["bidirectional"] > 0) & (features["patch_mask"] == 0)]
        assert vocabulary.decode(given[1:].tolist()) == "class: "


def test_rows_resume_and_are_dealt_with_pictures(data):
    rows = data.train_rows()
    rows.take(8)
    state = rows.state()
    straight = rows.take(8)
    halves = [data.train_rows(i, 2) for i in range(2)]
    for half in halves:
        half.restore(state)
    taken = [half.take(8) for half in halves]
    for name, values in straight.items():
        np.testing.assert_array_equal(np.concatenate([t[name] for t in taken]), values)


def test_a_source_may_have_its_own_objective(data):
    """Text with a causal objective beside pictures: only the pictures' prefixes see themselves."""
    assert data.predicted_bytes("zh") is not None
    assert data.predicted_bytes("emoji") is None
    causal = BuiltinPictures(name="emoji", objective=LanguageModelling())
    sources = (causal, Builtin(name="zh"))
    batch = dataclasses.replace(data, sources=sources, rates=(9.0, 1.0)).train_rows().take(8)
    assert not batch["bidirectional"].any()
    assert (batch["loss_weights"] == (batch["segment_ids"] > 0) * (1 - batch["patch_mask"])).all()


def test_no_room_for_a_picture(data):
    with pytest.raises(ConfigError, match="4 is too short for Answering beside 4 patches"):
        dataclasses.replace(data, length=4)


class TestBadPictures:
    """A source of which every third picture is damaged."""

    @pytest.fixture
    def damaged(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        whole = BuiltinPictures.records

        def records(source, split):
            for i, record in enumerate(whole(source, split)):
                yield record._replace(picture=b"x") if i % 3 == 0 else record

        monkeypatch.setattr(BuiltinPictures, "records", records)

    def make(self, on_bad):
        pictures = Pictures(grid=(2, 2), patch_size=4, on_bad=on_bad)
        vocabulary = SentencePiece(size=320)
        return TextData(
            sources=(FASHION,), vocabulary=vocabulary, pictures=pictures, length=64, prefetch=0
        )

    def test_are_an_error(self, damaged):
        with pytest.raises(DataError, match=r"fashion 0: not a JPEG.*on_bad = 'skip' leaves it"):
            self.make("error").train_rows()

    def test_are_left_out_and_counted(self, damaged):
        rows = self.make("skip").train_rows()
        (line,) = rows.skipped
        assert line.startswith("fashion: 160 records left out, such as fashion 0: not a JPEG")
