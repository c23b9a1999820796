r"""Files of text: found by pattern, checked once, read as documents.

A document is a line, the lines between blank lines, or a whole file. The line end that closes a
document is no part of it (the end-of-document token stands for it), so `a\n\nb\nc\n` is, as lines,
`a`, `b`, `c`; as paragraphs `a`, `b\nc`; as one file `a\n\nb\nc`. Names that end in `.gz` are read
through gzip; names such as `gs://...` through tensorflow.
"""

import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from m6jax.data.cache import built, digest
from m6jax.data.errors import DataError
from m6jax.data.tensorflow_import import import_tensorflow, reading

_BLOCK = 1 << 20
_REMEMBER_FROM_BYTES = 1 << 20  # smaller files are hashed again each time, which takes no time


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a set of files holds: `fingerprint` of the contents, `num_bytes` uncompressed."""

    fingerprint: str
    num_bytes: int


def expand(pattern: str, where: str) -> tuple[str, ...]:
    """Returns the names that match a pattern (`*`, `?`, `[ab]`, and `**` for any depth), sorted.

    Raises:
      DataError: nothing matches; names `where` (the setting) and the pattern.
    """
    if "://" in pattern:
        tf, _ = import_tensorflow()
        with reading(f"{where} {pattern!r}"):
            names = tf.io.gfile.glob(pattern)
    else:
        names = [n for n in glob.glob(pattern, recursive=True) if os.path.isfile(n)]
    if not names:
        raise DataError(f"{where}: no file matches {pattern!r}")
    return tuple(sorted(names))


def scan(names: Sequence[str], *, text: bool) -> Scan:
    """Reads every file once, checking it; larger files are remembered by name, size and time.

    Raises:
      DataError: a file is empty, cannot be read or, if `text`, is not UTF-8 (with the offset).
    """
    scans = [_remembered_scan(name, text) for name in names]
    return Scan(digest([s.fingerprint for s in scans]), sum(s.num_bytes for s in scans))


def read_documents(name: str, document: str) -> Iterator[bytes]:
    """Yields the documents of a file as UTF-8; `document` is 'line', 'paragraph' or 'file'.

    Documents of nothing but white space are left out.
    """
    with open_file(name) as file:
        if document == "file":
            content = file.read().rstrip(b"\r\n")
            if content.strip():
                yield content
            return
        paragraph: list[bytes] = []
        for line in file:
            line = line.rstrip(b"\r\n")
            blank = not line.strip()
            if not blank:
                paragraph.append(line)
            if paragraph and (blank or document == "line"):
                yield b"\n".join(paragraph)
                paragraph = []
        if paragraph:
            yield b"\n".join(paragraph)


@contextlib.contextmanager
def open_file(name: str) -> Iterator[IO[bytes]]:
    """Opens a local or remote file for reading, uncompressed if its name ends in `.gz`."""
    with contextlib.ExitStack() as stack:
        if "://" in name:
            tf, _ = import_tensorflow()
            stack.enter_context(reading(name))
            file = stack.enter_context(tf.io.gfile.GFile(name, "rb"))
        else:
            file = stack.enter_context(open(name, "rb"))
        zipped = name.endswith(".gz")
        yield cast("IO[bytes]", stack.enter_context(gzip.open(file)) if zipped else file)


def _remembered_scan(name: str, text: bool) -> Scan:
    size, time = _stat(name)
    if size == 0:
        raise DataError(f"{name}: the file is empty")
    if size < _REMEMBER_FROM_BYTES:
        return _scan_file(name, text)

    def write(directory: Path) -> None:
        found = dataclasses.asdict(_scan_file(name, text))
        (directory / "scan.json").write_text(json.dumps(found))

    entry = built("scans", digest(os.path.abspath(name), size, time, text), write)
    return Scan(**json.loads((entry / "scan.json").read_text()))


def _stat(name: str) -> tuple[int, int]:
    if "://" in name:
        tf, _ = import_tensorflow()
        with reading(name):
            remote = tf.io.gfile.stat(name)
        return remote.length, remote.mtime_nsec
    local = os.stat(name)
    return local.st_size, local.st_mtime_ns


def _scan_file(name: str, text: bool) -> Scan:
    hasher = hashlib.blake2b(digest_size=16)
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    try:
        with open_file(name) as file:
            while block := file.read(_BLOCK):
                hasher.update(block)
                if text:
                    _check_utf8(name, decoder, block, num_bytes)
                num_bytes += len(block)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: cannot be read: {error}") from error
    if text:
        _check_utf8(name, decoder, b"", num_bytes, final=True)
    return Scan(hasher.hexdigest(), num_bytes)


def _check_utf8(
    name: str, decoder: codecs.IncrementalDecoder, block: bytes, offset: int, final: bool = False
) -> None:
    begun = len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError as error:
        at = offset - begun + error.start
        raise DataError(f"{name}: not UTF-8 at byte {at} ({error.reason})") from error
