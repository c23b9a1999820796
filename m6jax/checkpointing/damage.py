"""Which file of a checkpoint is damaged, found before anything is read from it.

The arrays of a step are pieces of a few large files, found through a tree whose leaves say, for
each piece, the file, the offset and the length:

    state/manifest.ocdbt -> state/d/bae9...  -> 'head/0.0' is bytes 0 to 8192 of
                                                state/ocdbt.process_0/d/946a...

When such a file is cut short, orbax names the piece and not the file, after a time, and with pages
of what its unfinished reads have to say. So the tree is walked first, and each file is asked for
its size. On network paths nothing is asked: their files are there in whole or not at all.
"""

import json
from collections.abc import Iterator

import tensorstore as ts
from etils import epath


def find(path: epath.Path) -> str | None:
    """Returns which file of the arrays in `path` is damaged, and how; None if none is."""
    if "://" in str(path):
        return None
    for file in (path / "_METADATA", *(path / "array_metadatas").glob("*")):
        try:
            json.loads(file.read_text())
        except (OSError, ValueError) as error:
            return f"{file} is damaged: {error}"
    return _in_tree(path)


def _in_tree(path: epath.Path) -> str | None:
    file = path / "manifest.ocdbt"
    sizes: dict[epath.Path, int | None] = {}
    store = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    try:
        for location, what in _locations(store):
            # Such as 'value:ocdbt.process_0/:d/946a:8192:8192', with the bytes' offset and length.
            _, base, below, offset, length = location.split(":")
            file, end = path / base / below, int(offset) + int(length)
            if file not in sizes:
                sizes[file] = file.stat().length if file.exists() else None
            size = sizes[file]
            if size is None:
                return f"{file} is damaged: it is gone, with {what}"
            if size < end:
                return f"{file} is damaged: it has {size} bytes, {what} ends at {end}"
    except ValueError as error:  # of the node that was yielded last, or before all of the manifest
        return f"{file} is damaged: {str(error).split(' [')[0]}"
    return None


def _locations(store: ts.KvStore) -> Iterator[tuple[str, str]]:
    """Yields (location, what it is) of every node and piece in the newest tree of `store`."""
    nodes = [ts.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]]
    while nodes:
        node = nodes.pop()
        yield node, "a node of the tree"  # before it is read
        for entry in ts.ocdbt.dump(store, node).result()["entries"]:
            if "location" in entry:
                nodes.append(entry["location"])
            elif "indirect_value" in entry:
                yield entry["indirect_value"], entry["key"].decode()
