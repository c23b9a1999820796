"""Things made once and found again: `${XDG_CACHE_HOME:-~/.cache}/m6jax/<kind>/<key>/`.

The key is a hash of all that the thing is made from, so an entry is never stale and never changed.
Several processes may ask for one entry at once: one makes it, the others wait.

>>> path = built("greetings", digest("hello"), lambda d: (d / "text").write_text("hello"))
>>> (path / "text").read_text()
'hello'
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from m6jax.data.errors import DataError
from m6jax.foundation.cache_root import cache_root


def digest(*parts: Any) -> str:
    """Returns 32 hexadecimal digits that stand for `parts` (JSON-able values)."""
    text = json.dumps(parts, ensure_ascii=True, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def built(kind: str, key: str, build: Callable[[Path], Any]) -> Path:
    """Returns the directory of an entry, calling `build(empty directory)` if there is none yet.

    The entry appears by one rename of a finished directory: a killed process leaves nothing that
    could be taken for an entry. An error in `build` is passed on and leaves no entry.

    Raises:
      DataError: the cache cannot be written.
    """
    entry = cache_root() / kind / key
    if entry.is_dir():
        return entry
    with _written():
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.parent / f".{key}.lock"):
            if not entry.is_dir():
                _build(entry, build)
    return entry


def stored(kind: str, build: Callable[[Path], Any]) -> Path:
    """Returns the directory of what `build(empty directory)` makes, kept by its contents.

    For things that nobody can say beforehand what they are made from. Made twice, one is kept.

    Raises:
      DataError: the cache cannot be written.
    """
    with _written():
        parent = cache_root() / kind
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=parent) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            entry = parent / _contents(made)
            with _locked(parent / f".{entry.name}.lock"):
                if not entry.is_dir():
                    os.rename(made, entry)
        return entry


def _contents(directory: Path) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        hasher.update(f"{path.name} {path.stat().st_size} ".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
    return hasher.hexdigest()


def _build(entry: Path, build: Callable[[Path], Any]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private, the cache may be shared by a group
        os.rename(scratch, entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """Explains an error of writing to the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cache {cache_root()}: {error}; set XDG_CACHE_HOME to a place with room that can be "
            "written"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the system releases if the process dies."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
