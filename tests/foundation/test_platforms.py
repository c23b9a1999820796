import pytest

from m6jax.foundation import platforms


@pytest.fixture
def machine(monkeypatch):
    """Sets which packages and device files there are; returns what jax is told."""

    def make(packages, files, **environment):
        for name in ("JAX_PLATFORMS", *platforms.TPU_SIGNS):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda n: n in packages or None)
        monkeypatch.setattr(platforms.glob, "glob", lambda pattern: files)
        platforms.leave_out_absent_tpus()
        return platforms.os.environ.get("JAX_PLATFORMS")

    return make


@pytest.mark.parametrize(
    ("packages", "files", "expected"),
    [
        ({"libtpu"}, [], "cpu"),
        ({"libtpu", "jax_cuda13_plugin"}, [], "cuda,cpu"),
        ({"libtpu"}, ["/dev/accel0"], None),
        (set(), [], None),
    ],
)
def test_tpus_are_left_out_only_where_there_are_none(machine, packages, files, expected):
    assert machine(packages, files) == expected


def test_the_environment_decides_for_itself(machine):
    assert machine({"libtpu"}, [], JAX_PLATFORMS="tpu") == "tpu"
    assert machine({"libtpu"}, [], TPU_NAME="local") is None
