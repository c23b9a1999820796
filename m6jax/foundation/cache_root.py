"""The directory of what can be made again: vocabularies, fetched data, compiled programs."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Returns `${XDG_CACHE_HOME:-~/.cache}/m6jax`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "m6jax"
