import gzip
import re

import pytest

from m6jax.data.errors import DataError
from m6jax.data.sources import TRAIN, VALIDATION, Builtin, TextFiles
from m6jax.foundation.validated import ConfigError


def held_out_bits(name):
    source = Builtin(name=name)
    text = b"".join(d + source.separator for d in source.documents(VALIDATION))
    return len(gzip.compress(text, 9)) * 8 / len(text)


@pytest.mark.parametrize(("name", "train", "held_out"), [("en", 97, 9), ("zh", 1830, 204)])
def test_builtin_splits(name, train, held_out):
    source = Builtin(name=name)
    trained, scored = list(source.documents(TRAIN)), list(source.documents(VALIDATION))
    assert (len(trained), len(scored)) == (train, held_out)
    assert not set(trained) & set(scored)
    assert list(source.documents(TRAIN)) == trained


def test_builtin_documents_are_all_of_the_text():
    """Each English book: its last tenth of the paragraphs (212 of 2,126 and 82 of 823) held out."""
    source = Builtin(name="en")
    train = [p for d in source.documents(TRAIN) for p in d.split(b"\n")]
    held_out = [p for d in source.documents(VALIDATION) for p in d.split(b"\n")]
    assert (len(train), len(held_out)) == (2126 - 212 + 823 - 82, 212 + 82)
    chapters = [d for d in source.documents(TRAIN) if re.match(rb"chapter \d", d, re.IGNORECASE)]
    assert len(chapters) == 96  # all but the title page
    assert held_out[-1].endswith("that so stirred me?”".encode())


def test_what_gzip_makes_of_held_out_text():
    assert held_out_bits("zh") == pytest.approx(3.96, abs=0.01)
    assert held_out_bits("en") == pytest.approx(3.13, abs=0.01)


def test_every_tenth_document_is_held_out(tmp_path):
    for part in (0, 1):
        lines = [f"document {i}" for i in range(part * 12, part * 12 + 12)]
        (tmp_path / f"{part}.txt").write_text("\n".join(lines))
    source = TextFiles(train=f"{tmp_path}/*.txt")
    assert list(source.documents(VALIDATION)) == [b"document 9", b"document 19"]
    assert len(list(source.documents(TRAIN))) == 22
    assert not TextFiles(train="x", hold_out_every=0).has_held_out


def test_held_out_files(tmp_path):
    (tmp_path / "train.txt").write_text("a\nb\n")
    (tmp_path / "valid.txt").write_text("c\n")
    source = TextFiles(train=f"{tmp_path}/train.txt", validation=f"{tmp_path}/valid.txt")
    assert list(source.documents(TRAIN)) == [b"a", b"b"]
    assert list(source.documents(VALIDATION)) == [b"c"]
    overlapping = TextFiles(train=f"{tmp_path}/*.txt", validation=f"{tmp_path}/v*.txt")
    with pytest.raises(DataError, match=r"valid\.txt: matches both TextFiles\.train"):
        overlapping.scan()


def test_a_held_out_file_that_is_trained_on_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("a\nb\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "train.txt")
    (tmp_path / "copy.txt").write_bytes(gzip.compress(b"a\nb\n"))
    link = TextFiles(train=f"{tmp_path}/train.txt", validation=f"{tmp_path}/link.txt")
    with pytest.raises(DataError, match=r"link\.txt: matches both TextFiles\.train"):
        link.scan()
    copy = TextFiles(train=f"{tmp_path}/train.txt", validation=f"{tmp_path}/copy.txt")
    with pytest.raises(DataError, match=r"copy\.txt: TextFiles\.validation holds what .*train"):
        copy.scan()


def test_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("x\n")
    assert TextFiles(train="~/a.txt").train == f"{tmp_path}/a.txt"
    assert len(list(TextFiles(train="~/*.txt").documents(TRAIN))) == 1


def test_fingerprint_is_of_contents_and_options(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "b.txt").write_text("x\n")
    (tmp_path / "c.txt").write_text("y\n")
    a, b, c = (TextFiles(train=f"{tmp_path}/{n}.txt", name=n).scan() for n in "abc")
    assert a == b
    assert a.fingerprint != c.fingerprint
    for options in ({"document": "file"}, {"hold_out_every": 5}, {"validation": f"{tmp_path}/c*"}):
        other = TextFiles(train=f"{tmp_path}/a.txt", **options).scan()
        assert other.fingerprint != a.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "my text"}, r"TextFiles\.name: 'my text' may hold only"),
        ({"hold_out_every": 1}, r"hold_out_every: 1 leaves nothing to train on"),
        ({"hold_out_every": -1}, r"hold_out_every: -1"),
        ({"document": "word"}, r"TextFiles\.document"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        TextFiles(train="x", **options)
