import bz2
import gzip
import lzma
import os
import re

import pytest

from m6jax.data import files
from m6jax.data.documents import read_documents
from m6jax.data.errors import DataError
from m6jax.data.files import expand, scan

TEXT = b"a\n\n \nb\r\nc\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return str(path)


def test_gzip_and_urls_read_the_same(path):
    with gzip.open(path + ".gz", "wb") as file:
        file.write(TEXT)
    plain = list(read_documents(path, "line"))
    assert list(read_documents(path + ".gz", "line")) == plain
    assert list(read_documents(f"file://{path}", "line")) == plain
    assert list(read_documents(f"file://{path}.gz", "line")) == plain
    assert expand(f"file://{os.path.dirname(path)}/*.txt", "X.train") == (f"file://{path}",)
    assert scan([f"file://{path}"], text=True) == scan([path], text=True)


def test_expand_sorts_and_goes_deep(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [os.path.relpath(n, tmp_path) for n in expand(f"{tmp_path}/**/*.txt", "X.train")]
    assert names == ["a.txt", "b.txt", "deep/c.txt"]


def test_missing_files_name_setting_and_pattern(tmp_path):
    with pytest.raises(DataError, match=r"TextFiles.train: no file matches '.*/nothing\*'"):
        expand(f"{tmp_path}/nothing*", "TextFiles.train")


def test_what_exists_is_taken_literally(tmp_path):
    folder = tmp_path / "my [old] texts"
    folder.mkdir()
    for name in ("a[1].txt", "a1.txt"):
        (folder / name).write_text("x")
    assert expand(f"{folder}/a[1].txt", "X.train") == (f"{folder}/a[1].txt",)
    assert expand(f"{folder}/*.txt", "X.train") == (f"{folder}/a1.txt", f"{folder}/a[1].txt")
    assert expand(f"{folder}/a[12].txt", "X.train") == (f"{folder}/a1.txt",)
    with pytest.raises(DataError, match=r"which is a folder \(for all files in it: .*texts/\*\)"):
        expand(str(folder), "X.train")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, bytes])
def test_what_compresses_a_file_is_seen_from_its_content(tmp_path, compress):
    (tmp_path / "x.TXT").write_bytes(compress(TEXT))
    assert list(read_documents(f"{tmp_path}/x.TXT", "line")) == [b"a", b"b", b"c"]
    assert scan([f"{tmp_path}/x.TXT"], text=True).num_bytes == len(TEXT)


@pytest.mark.parametrize(("start", "kind"), files._NOT_READ.items())
def test_compression_that_is_not_read_is_named(tmp_path, start, kind):
    (tmp_path / "x").write_bytes(start + b"more than that")
    with pytest.raises(DataError, match=re.escape(f"x: compressed with {kind}, which is not read")):
        scan([str(tmp_path / "x")], text=True)


def test_no_such_file_system():
    with pytest.raises(
        DataError, match=r"TextFiles.train 'no://x/\*' cannot be read: .*scheme 'no'"
    ):
        expand("no://x/*", "TextFiles.train")


def test_remote_files_that_are_gone(tmp_path):
    for read in (lambda n: scan([n], text=True), lambda n: list(read_documents(n, "line"))):
        with pytest.raises(DataError, match=r"file://.*/gone cannot be read: "):
            read(f"file://{tmp_path}/gone")


def test_empty_file(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.txt: the file is empty"):
        scan([str(tmp_path / "empty.txt")], text=True)


def test_damaged_gzip(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"hello" * 100)[:-9])
    with pytest.raises(DataError, match=r"x\.gz: cannot be read"):
        scan([str(tmp_path / "x.gz")], text=True)


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset"),
    [(b"abc\xff", 3), ("爱".encode() + b"x\xe7\x88", 4), (b"ab\xe7\x88xyz", 2)],
)
def test_not_utf8_names_the_byte(monkeypatch, tmp_path, block, content, offset):
    monkeypatch.setattr(files, "_BLOCK", block)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.txt: not UTF-8 at byte {offset} "):
        scan([str(tmp_path / "bad.txt")], text=True)
    assert scan([str(tmp_path / "bad.txt")], text=False).num_bytes == len(content)


def test_characters_cut_by_a_block_are_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_BLOCK", 2)
    (tmp_path / "good.txt").write_text("爱a😀", encoding="utf-8")
    assert scan([str(tmp_path / "good.txt")], text=True).num_bytes == 8


def test_large_files_are_read_once(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_REMEMBER_FROM_BYTES", 1)
    path = tmp_path / "large.txt"
    path.write_text("one")
    first = scan([str(path)], text=True)
    monkeypatch.setattr(files, "_scan_file", None)
    assert scan([str(path)], text=True) == first
    monkeypatch.undo()
    path.write_text("other")
    assert scan([str(path)], text=True).fingerprint != first.fingerprint
