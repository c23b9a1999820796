import os
import subprocess
import sys

import pytest

from m6jax.data.cache import built, digest
from m6jax.data.errors import DataError
from m6jax.foundation.cache_root import cache_root

RACE = """
import sys, time
from m6jax.data.cache import built
def build(directory):
    time.sleep(0.3)
    (directory / "made_by").write_text(sys.argv[1])
    open(sys.argv[2], "a").write("x")
print((built("race", "key", build) / "made_by").read_text())
"""


def test_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "m6jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "m6jax"


def test_built_once_and_found_again():
    calls = []

    def build(directory):
        calls.append(directory)
        (directory / "x").write_text("1")

    first = built("kind", digest("once"), build)
    assert built("kind", digest("once"), build) == first
    assert (first / "x").read_text() == "1"
    assert len(calls) == 1


def test_error_leaves_nothing_behind():
    def fail(directory):
        (directory / "half").write_text("")
        raise DataError("no")

    with pytest.raises(DataError, match=r"^no$"):
        built("failing", "key", fail)
    left = [p.name for p in (cache_root() / "failing").iterdir() if not p.name.endswith(".lock")]
    assert left == []
    assert built("failing", "key", lambda d: None).is_dir()


def test_processes_build_one_entry(tmp_path):
    log = tmp_path / "log"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(i), str(log)], stdout=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    made_by = {job.communicate()[0] for job in jobs}
    assert len(made_by) == 1
    assert log.read_text() == "x"


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "file"))
    with pytest.raises(DataError, match="set XDG_CACHE_HOME"):
        built("kind", "key", lambda d: None)


def test_digest_tells_apart():
    assert digest("a", "b") != digest("ab") != digest(["a", "b"])
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})
