"""Files: found by name or pattern, opened whatever compresses them, checked once.

What compresses a file is seen from its first bytes, not from its name: gzip, bzip2 and xz are read,
other kinds are named and refused. Names such as `gs://...` are read through tensorflow.
"""

import bz2
import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from m6jax.data.cache import built, digest
from m6jax.data.errors import DataError
from m6jax.data.tensorflow_import import import_tensorflow, reading

_BLOCK = 1 << 20
_OPENERS: dict[bytes, tuple[str, Any]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\0": ("xz", lzma.open),
}
_NOT_READ = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
    b"\x1f\x9d": "compress (.Z)",
}
_REMEMBER_FROM_BYTES = 1 << 20  # smaller files are hashed again each time, which takes no time


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a set of files holds: `fingerprint` of the contents, `num_bytes` uncompressed.

    Of pictures with texts `num_bytes` is 0: how much of it is text shows only when it is read.
    """

    fingerprint: str
    num_bytes: int


def expand(pattern: str, where: str) -> tuple[str, ...]:
    """Returns the names that match a pattern (`*`, `?`, `[ab]`, and `**` for any depth), sorted.

    What exists is taken literally: a file whose own name is the pattern, and leading folders, so
    that `[` in the name of a folder is no pattern.

    Raises:
      DataError: nothing matches; names `where` (the setting) and the pattern.
    """
    if "://" in pattern:
        tf, _ = import_tensorflow()
        with reading(f"{where} {pattern!r}"):
            names = tf.io.gfile.glob(pattern)
    else:
        names = glob.glob(_with_literal_folders(pattern), recursive=True)
        names = [name for name in names if os.path.isfile(name)]
    if not names:
        folder = os.path.isdir(pattern)
        hint = f", which is a folder (for all files in it: {pattern.rstrip('/')}/*)" * folder
        raise DataError(f"{where}: no file matches {pattern!r}{hint}")
    return tuple(sorted(names))


def _with_literal_folders(pattern: str) -> str:
    """Returns the pattern for glob, with its longest beginning that exists as plain text."""
    parts = pattern.split("/")
    for number in range(len(parts), 0, -1):
        begin = "/".join(parts[:number])
        if begin and os.path.exists(begin):
            return "/".join([glob.escape(begin), *parts[number:]])
    return pattern


def walk(folder: str) -> tuple[str, ...]:
    """Returns the names of all files in a folder at any depth, sorted; none if it is no folder."""
    if "://" in folder:
        tf, _ = import_tensorflow()
        with reading(folder):
            found = list(tf.io.gfile.walk(folder)) if tf.io.gfile.isdir(folder) else []
    else:
        found = list(os.walk(folder))
    return tuple(sorted(os.path.join(top, name) for top, _, names in found for name in names))


def compressed_with(first: bytes) -> str | None:
    """Returns what compresses a file that begins with these bytes; None: nothing that is known."""
    kinds = {start: kind for start, (kind, _) in _OPENERS.items()} | _NOT_READ
    for start, kind in kinds.items():
        if first.startswith(start):
            return kind
    zlib_header = len(first) > 1 and first[0] & 15 == 8 and (first[0] << 8 | first[1]) % 31 == 0
    return "zlib" if zlib_header and first[0] >> 4 <= 7 else None


def is_whole(name: str) -> bool:
    """Whether the compressed data of a gzip or zlib file has its end."""
    with _opened(name) as file:
        stream = zlib.decompressobj(wbits=47)  # of either kind
        while block := file.read(_BLOCK):
            while block:
                stream.decompress(block, _BLOCK)
                block = stream.unconsumed_tail
                if stream.eof and stream.unused_data:  # another follows
                    block, stream = stream.unused_data, zlib.decompressobj(wbits=47)
        return stream.eof


def exists(name: str) -> bool:
    """Whether there is a local or remote file of this name."""
    return _stat_if_there(name)[0] >= 0


def read_file(name: str, most: int = -1) -> bytes:
    """Returns the bytes of a local or remote file as they are, the first `most` if that is given.

    Raises:
      DataError: it cannot be read.
    """
    try:
        with _opened(name) as file:
            return bytes(file.read(most))
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from error


def scan(names: Sequence[str], *, text: bool) -> Scan:
    """Reads every file once, checking it; larger files are remembered by name, size and time.

    Raises:
      DataError: a file is empty, cannot be read or, if `text`, is not UTF-8 (with the offset).
    """
    scans = [_remembered_scan(name, text) for name in names]
    return Scan(digest([s.fingerprint for s in scans]), sum(s.num_bytes for s in scans))


def scan_together(names: Sequence[str]) -> Scan:
    """Reads many small files once, remembered together; one that cannot be read counts as such."""
    stats = [_stat_if_there(name) for name in names]
    sizes = sum(size for size, _ in stats)

    def find() -> Scan:
        hasher = hashlib.blake2b(digest_size=16)
        for name in names:
            try:
                content = read_file(name)
            except DataError:
                hasher.update(b"unreadable")
            else:
                hasher.update(b"%d bytes" % len(content) + content)
        return Scan(hasher.hexdigest(), 0)

    key = ["together", *([os.path.abspath(n), *s] for n, s in zip(names, stats, strict=True))]
    return _remembered(key, sizes, find)


@contextlib.contextmanager
def open_file(name: str) -> Iterator[IO[bytes]]:
    """Opens a local or remote file for reading, uncompressed if it is compressed.

    Raises:
      DataError: it is compressed in a way that is not read.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_opened(name))
        first = file.read(6)
        file.seek(0)
        for start, kind in _NOT_READ.items():
            if first.startswith(start):
                raise DataError(
                    f"{name}: compressed with {kind}, which is not read (unpack it, or use gzip,"
                    " bzip2 or xz)"
                )
        opener = next((o for start, (_, o) in _OPENERS.items() if first.startswith(start)), None)
        yield stack.enter_context(opener(file)) if opener else file


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """Opens a local or remote file as it is."""
    if "://" in name:
        tf, _ = import_tensorflow()
        with reading(name), tf.io.gfile.GFile(name, "rb") as file:
            yield file
    else:
        with open(name, "rb") as file:
            yield file


def _remembered_scan(name: str, text: bool) -> Scan:
    size, time = _stat(name)
    if size == 0:
        raise DataError(f"{name}: the file is empty")
    key = [os.path.abspath(name), size, time, text]
    return _remembered(key, size, lambda: _scan_file(name, text))


def _remembered(key: Sequence[Any], size: int, find: Callable[[], Scan]) -> Scan:
    """Returns what was found before under the key, if there is much to read."""
    if size < _REMEMBER_FROM_BYTES:
        return find()

    def write(directory: Path) -> None:
        (directory / "scan.json").write_text(json.dumps(dataclasses.asdict(find())))

    entry = built("scans", digest(*key), write)
    return Scan(**json.loads((entry / "scan.json").read_text()))


def _stat(name: str) -> tuple[int, int]:
    if "://" in name:
        tf, _ = import_tensorflow()
        with reading(name):
            remote = tf.io.gfile.stat(name)
        return remote.length, remote.mtime_nsec
    local = os.stat(name)
    return local.st_size, local.st_mtime_ns


def _stat_if_there(name: str) -> tuple[int, int]:
    """Returns size and time; a size of -1 where there is nothing."""
    try:
        return _stat(name)
    except (OSError, DataError):
        return -1, 0


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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
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
