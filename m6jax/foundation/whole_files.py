"""Files of which nobody ever reads a half, whoever is killed when."""

import os

from etils import epath


def write_whole(path: epath.Path, content: bytes) -> None:
    """Writes a file, in the place of an older one; an object on a network appears whole by itself.

    Args:
      path: where; its directory is there.
      content: what.
    """
    if "://" in str(path):
        path.write_bytes(content)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)
