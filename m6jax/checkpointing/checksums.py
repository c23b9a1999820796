"""Checksums of the files of a step: a bit that flips on a disk is found before it is a weight.

Nothing in a file of arrays says whether it is what orbax wrote. So each process lists the files
that it has written, before the step counts as complete, and the first process lists what is small:

    100/checksums.json            {"state/_METADATA": [CRC-32, bytes], "state/manifest.ocdbt": ...,
                                   "state/checksums.0.json": ..., "description/metadata": ...}
        state/checksums.0.json    {"ocdbt.process_0/d/946a": [CRC-32, bytes], ...}

What is read is held against the lists: documents alone, arrays in shares, one for each process, so
that every file is read once more over all of them. Object stores (`gs://`) have checksums of their
own; there, and for steps that were written before there were lists, nothing is compared.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

_LIST = "checksums.json"
_PROCESS_LISTS = "checksums.*.json"
_BY_PROCESS = "ocdbt.process_"
_BLOCK_BYTES, _THREADS = 2**20, 4


class ListingHandler(ocp.CompositeCheckpointHandler):
    """Writes the items of a step and the lists of their files."""

    async def async_save(self, directory: epath.Path, args: "Items") -> list[Any]:
        """See `orbax.checkpoint.AsyncCheckpointHandler`."""
        futures = await super().async_save(directory, args) or []
        return [*futures, _Listing(epath.Path(directory))]  # which is asked after all others

    def finalize(self, directory: epath.Path) -> None:
        """See `orbax.checkpoint.CheckpointHandler`; called in the first process alone."""
        super().finalize(directory)
        if "://" not in str(directory):
            files = (path for item in directory.iterdir() if item.is_dir() for path in _in(item))
            small = (path for path in files if _BY_PROCESS not in str(path.relative_to(directory)))
            _write(directory / _LIST, directory, small)


@ocp.args.register_with_handler(ListingHandler, for_save=True, for_restore=True)
class Items(ocp.args.Composite):
    """What `ListingHandler` writes, by name; orbax asks for a class of each handler's own."""


class _Listing:
    """Lists what this process has written; see `orbax.checkpoint.future.Future`."""

    def __init__(self, directory: epath.Path):
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        del timeout  # as long as reading once takes
        if "://" in str(self._directory):
            return
        index = jax.process_index()
        # The item has a name of its own until it is complete.
        for own in self._directory.glob(f"*/{_BY_PROCESS}{index}"):
            _write(own.parent / _PROCESS_LISTS.replace("*", str(index)), own.parent, _in(own))

    def cancel(self) -> None:
        """Has nothing to do: who writes has been waited for."""


def find(path: epath.Path, share: int | None = None, shares: int = 1) -> str | None:
    """Returns which file of a step is damaged, and how; None if none is.

    Args:
      path: directory of the step.
      share: which part of the large files is read, with the first one the small files too; None:
        the small files alone.
      shares: how many parts there are.
    """
    small = _read(path / _LIST)
    if small is None:
        return None
    if isinstance(small, str):
        return small
    problem = None if share else _first(path, small.items())
    if problem is not None or share is None:
        return problem
    for file in sorted((path / "state").glob(_PROCESS_LISTS)):
        large = _read(file)
        if isinstance(large, str):
            return large
        problem = _first(path / "state", sorted((large or {}).items())[share::shares])
        if problem is not None:
            return problem
    return None


def find_in(path: epath.Path, name: str) -> str | None:
    """Returns how one small file of a step is damaged; None if it is not, or is not listed.

    Args:
      path: directory of the step.
      name: of the file, from there.
    """
    small = _read(path / _LIST)
    if isinstance(small, str):
        return small
    return _first(path, [(name, small[name])]) if small and name in small else None


def _in(directory: epath.Path) -> Iterator[epath.Path]:
    """Yields the files below a directory."""
    for path in directory.iterdir():
        if path.is_dir():
            yield from _in(path)
        else:
            yield path


def _write(file: epath.Path, root: epath.Path, paths: Iterable[epath.Path]) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        there = list(paths)
        sums = zip(there, threads.map(_checksum, there), strict=True)
        listed = {str(path.relative_to(root)): found for path, found in sums}
    file.write_text(json.dumps(listed, indent=0, sort_keys=True))


def _read(file: epath.Path) -> dict[str, Sequence[int]] | str | None:
    """Returns a list, None if there is none, or how it is damaged."""
    if "://" in str(file) or not file.exists():
        return None
    try:
        listed = json.loads(file.read_bytes())
        if all(len(found) == 2 for found in listed.values()):
            return dict(listed)
        raise ValueError("not two numbers for each file")
    except (ValueError, TypeError, AttributeError) as error:
        return f"{file} is damaged: {error}"


def _first(root: epath.Path, listed: Iterable[tuple[str, Sequence[int]]]) -> str | None:
    """Returns how the first damaged file is damaged."""

    def problem(entry: tuple[str, Sequence[int]]) -> str | None:
        name, written = entry
        file = root / name
        try:
            found = _checksum(file)
        except (OSError, ValueError) as error:
            return f"{file} is damaged: {getattr(error, 'strerror', None) or error}"
        if found == list(written):
            return None
        if found[1] != written[1]:
            return f"{file} is damaged: it has {found[1]} bytes, {written[1]} were written"
        return f"{file} is damaged: its bytes are not those that were written"

    with ThreadPoolExecutor(_THREADS) as threads:
        return next((found for found in threads.map(problem, listed) if found), None)


def _checksum(file: epath.Path) -> list[int]:
    """Returns the CRC-32 of a file and its bytes."""
    checksum = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return [checksum, size]
