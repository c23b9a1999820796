"""The vocabulary and the held-out text belong to the run, whatever becomes of the text."""

import dataclasses
import json
import shutil

import pytest
import runs

from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.data.config import HeldOutFiles, SentencePiece, TextData, TextFiles
from m6jax.experiment import Initial, Stage
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.run import modes, train

pytestmark = pytest.mark.usefixtures("quick_runs")
STEPS = 2


def short(texts, directory, **changes):
    data = TextData(
        sources=(TextFiles(train=f"{texts}/*.txt"),),
        vocabulary=SentencePiece(size=runs.VOCABULARY),
        length=16,
    )
    data = dataclasses.replace(data, **changes.pop("data", {}))
    settings = {"data": data, "stages": (Stage(name="only", unit=1),), "steps": STEPS}
    return runs.experiment(texts, directory, **(settings | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, its texts and its directory; each test takes copies."""
    root = tmp_path_factory.mktemp("identity")
    (root / "texts").mkdir()
    runs.write_text(root / "texts")
    train.run(short(root / "texts", root / "run"))
    return root


@pytest.fixture
def copies(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "texts", tmp_path / "run"


@pytest.fixture
def said(capsys):
    def read():
        return [x for x in capsys.readouterr().out.splitlines() if x.startswith(("held", "samp"))]

    return read


def test_carried_away_and_without_text_a_run_says_the_same(finished, copies, said, monkeypatch):
    texts, directory = copies
    modes.evaluate(short(finished / "texts", finished / "run"))
    modes.infer(short(finished / "texts", finished / "run"))
    before = said()
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory.parent / "empty cache"))

    modes.evaluate(short(texts, directory))
    shutil.rmtree(texts)
    modes.infer(short(texts, directory))

    assert said() == before
    assert len(before) == 2


def test_an_added_file_is_refused_and_other_sets_are_not(copies, said):
    texts, directory = copies
    (texts / "more.txt").write_text("quite other words\n" * 100, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"held-out documents of text are not those .*held_out"):
        modes.evaluate(short(texts, directory))
    shutil.move(texts / "more.txt", directory.parent / "more.txt")
    other = HeldOutFiles(files=str(directory.parent / "more.txt"), name="other")

    modes.evaluate(short(texts, directory, data={"held_out": (other,)}))

    sets = ["held-out text", "held-out other", "held-out all"]
    assert [line.split(":")[0] for line in said()] == sets


def test_held_out_sets_touch_neither_vocabulary_nor_training(copies):
    texts, _ = copies
    more = texts / "other.text"
    more.write_text("ΩΨΦ\n" * 100, encoding="utf-8")
    plain = short(texts, "run").data
    other = dataclasses.replace(plain, held_out=(HeldOutFiles(files=str(more), name="other"),))
    assert other.vocab().fingerprint == plain.vocab().fingerprint
    assert other.train_rows().state() == plain.train_rows().state()
    assert other.predicted_bytes("other") == len(more.read_bytes())
    assert list(other.held_out[0].documents("train")) == []


def test_another_validation_file_and_another_configuration_are_refused(copies):
    texts, directory = copies
    (texts / "held").write_text("nothing was seen\n" * 30, encoding="utf-8")
    source = TextFiles(train=f"{texts}/*.txt", validation=f"{texts}/held")
    with pytest.raises(ConfigError, match="held-out documents of text"):
        modes.evaluate(short(texts, directory, data={"sources": (source,)}))
    for mode in (modes.evaluate, modes.infer):
        with pytest.raises(ConfigError, match="length: 16 became 8"):
            mode(short(texts, directory, data={"length": 8}))


def test_another_vocabulary_is_refused(copies, tmp_path):
    texts, directory = copies
    model = (directory / "vocabulary.model").read_bytes()
    (tmp_path / "same").write_bytes(model)
    (tmp_path / "other").write_bytes(model + b"\n\x00")
    (directory / "config.gin").unlink()  # which would refuse first
    modes.infer(
        short(texts, directory, data={"vocabulary": SentencePiece(path=f"{tmp_path}/same")})
    )
    for vocabulary, message in (
        (SentencePiece(path=f"{tmp_path}/other"), r"other is another vocabulary than"),
        (SentencePiece(size=330), r"size=330.* is not the vocabulary of the run"),
    ):
        with pytest.raises(ConfigError, match=message):
            modes.infer(short(texts, directory, data={"vocabulary": vocabulary}))


def test_weights_without_their_vocabulary_are_refused(copies):
    texts, directory = copies
    (directory / "identity.json").unlink()
    with pytest.raises(ConfigError, match=r"does not hold the vocabulary of its weights"):
        modes.infer(short(texts, directory))


def test_converting_and_beginnings_take_the_vocabulary_along(copies, tmp_path):
    """Other texts alone would have trained another one."""
    texts, directory = copies
    (texts / "text.txt").write_text("never seen before\n" * 200, encoding="utf-8")
    model = (directory / "vocabulary.model").read_bytes()
    begun = short(
        texts,
        tmp_path / "begun",
        stages=(Stage(name="only", unit=1),),
        initial=Initial(model_dir=str(directory), restart=True),
    )

    train.run(begun)
    real = Stage(name="only", form=Form.UNROLLED, optimizer_state=Policy.COPY)
    converted = short(texts, tmp_path / "made", stages=(real,))
    convert(converted, Conversion(source=str(directory), restart=True), LayoutChange.DELINK)
    modes.infer(converted)

    for made in ("begun", "made"):
        assert (tmp_path / made / "vocabulary.model").read_bytes() == model
    old, new = (
        json.loads((d / "identity.json").read_text()) for d in (directory, tmp_path / "begun")
    )
    assert old["vocabulary"] == new["vocabulary"]
    assert old["held_out"] != new["held_out"]
    other = dataclasses.replace(begun.data, vocabulary=SentencePiece(size=330))
    refused = dataclasses.replace(begun, data=other, model_dir=str(tmp_path / "third"))
    with pytest.raises(ConfigError, match="is not the vocabulary of the run"):
        train.run(refused)
