"""A `gs://` of its own for tests: objects are written whole, never appended to or renamed."""

import os

import pytest
from etils.epath import backend, gpath


class NetworkBackend(backend._OsPathBackend):
    """Keeps `gs://bucket/...` below a local directory."""

    def __init__(self, root):
        self._root = root

    def _local(self, path):
        return os.path.join(self._root, os.fspath(path).removeprefix("gs://"))

    def open(self, path, mode):
        assert "a" not in mode, "an object cannot be appended to"
        return super().open(self._local(path), mode)

    def exists(self, path):
        return super().exists(self._local(path))

    def isdir(self, path):
        return super().isdir(self._local(path))

    def listdir(self, path):
        return super().listdir(self._local(path))

    def mkdir(self, path, *, exist_ok=False, mode=None):
        super().makedirs(self._local(path), exist_ok=exist_ok)

    makedirs = mkdir

    def remove(self, path):
        super().remove(self._local(path))

    def rename(self, path, dst):
        raise AssertionError("an object cannot be renamed")

    replace = rename


@pytest.fixture
def network(tmp_path, monkeypatch):
    """The local directory that holds what is under `gs://`."""
    fake = NetworkBackend(tmp_path / "network")
    real = gpath._GPath._backend.fget
    monkeypatch.setattr(
        gpath._GPath,
        "_backend",
        property(lambda self: fake if self._uri_scheme == "gs" else real(self)),
    )
    return tmp_path / "network"
