"""Fetching the benchmarks' texts: reading packages, comparing sums, the cache. No network."""

import hashlib
import io
import json
import pathlib
import struct
import sys
import tarfile
import zlib

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import fetch


def r_strings(*strings: str) -> bytes:
    """A vector of strings as R serialises it: header, encoding, then one record a string."""
    parts = [b"X\n", struct.pack(">iii", 3, 0x040201, 0x030500), struct.pack(">i", 5), b"UTF-8"]
    parts.append(struct.pack(">ii", 16, len(strings)))
    for string in strings:
        content = string.encode()
        parts.append(struct.pack(">ii", 0x00040009, len(content)) + content)
    return b"".join(parts)


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def documents(read, files: dict[str, bytes]) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive(files))) as tar:
        return dict(read(tar))


def client(script: str) -> tuple[str, ...]:
    return sys.executable, "-c", script


@pytest.fixture
def sets(monkeypatch, tmp_path):
    """The sets that `fetch` knows, with a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known: dict[str, fetch.TextSet] = {}
    monkeypatch.setattr(fetch, "SETS", known)
    return known


def test_speeches_are_the_texts_alone():
    files = {
        "package/sotu/data/1791_b.txt": b"second",
        "package/sotu/data/1790_a.txt": b"first",
        "package/sotu/data/1790_a.json": b"{}",
        "package/other/data/1790_a.txt": b"no speech",
    }
    assert documents(fetch.speeches, files) == {"1790_a": "first", "1791_b": "second"}


def test_plays_are_latin_1():
    files = {"s/texts/lear_gut.txt": b"No\xebl\r\nto-day", "s/texts/readme.txt": b"no play"}
    assert documents(fetch.plays, files) == {"lear_gut": "Noël\nto-day"}


def test_poems_are_paragraphs():
    poems = [{"paragraphs": ["一", "二"]}, {"paragraphs": []}, {"paragraphs": ["三"]}]
    content = json.dumps(poems).encode()
    files = {"package/dist/songci/ci.song.0.json": content, "package/dist/songci/author.json": b""}
    assert documents(fetch.poems, files) == {"ci.song.0": "一\n二\n\n三"}


def test_novels_are_records_of_strings():
    books = [r_strings("EMMA", "", "Emma Woodhouse"), r_strings("MANSFIELD PARK", "", "About")]
    records = [struct.pack(">I", len(book)) + zlib.compress(book) for book in books]
    files = {"./usr/lib/janeaustenr/data/Rdata.rdb": b"".join(records)}
    assert documents(fetch.novels, files) == {
        "emma": "EMMA\n\nEmma Woodhouse",
        "mansfield_park": "MANSFIELD PARK\n\nAbout",
    }


def test_other_objects_of_r_are_refused():
    number = r_strings("x").replace(struct.pack(">ii", 16, 1), struct.pack(">ii", 14, 1))
    with pytest.raises(fetch.FetchError, match="type 14; 16, a vector of strings"):
        fetch.strings_of_r(number)


def test_a_set_is_fetched_once_and_then_found(sets, tmp_path):
    package = tmp_path / "package.tar"
    package.write_bytes(archive({"package/sotu/data/1790_a.txt": b"first"}))
    copy = f"import shutil; shutil.copy({str(package)!r}, 'got.tar')"
    sha256 = hashlib.sha256(package.read_bytes()).hexdigest()
    sets["sotu"] = fetch.TextSet(client(copy), sha256, fetch.speeches)
    with pytest.raises(fetch.NotFetched, match=r"python benchmarks/fetch\.py sotu"):
        fetch.fetched("sotu")
    directory = fetch.fetch("sotu")
    assert (directory / "1790_a.txt").read_text() == "first\n"
    package.unlink()
    assert fetch.fetch("sotu") == fetch.fetched("sotu") == directory


def test_another_package_is_refused_and_leaves_nothing(sets):
    sets["sotu"] = fetch.TextSet(client("open('got.tar', 'w')"), "0" * 64, fetch.speeches)
    with pytest.raises(fetch.FetchError, match=r"got.tar has sha256 e3b0c442.*; 0000"):
        fetch.fetch("sotu")
    with pytest.raises(fetch.NotFetched):
        fetch.fetched("sotu")


def test_a_client_that_fails_says_why(sets):
    sets["sotu"] = fetch.TextSet(client("raise SystemExit('no route')"), "", fetch.speeches)
    with pytest.raises(fetch.FetchError, match="failed:\nno route"):
        fetch.fetch("sotu")
    sets["sotu"] = fetch.TextSet(("no-such-client", "pack"), "", fetch.speeches)
    with pytest.raises(fetch.FetchError, match="no-such-client is needed for: no-such-client pack"):
        fetch.fetch("sotu")


def test_packages_are_pinned_and_no_address_is_written():
    source = pathlib.Path(fetch.__file__).read_text()
    assert "http" not in source
    for text_set in fetch.SETS.values():
        assert "@" in text_set.client[-1] or "=" in text_set.client[-1]
        assert len(text_set.sha256) == 64
