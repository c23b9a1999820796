"""Eight emulated CPU devices for every test; must run before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import pathlib
from collections.abc import Callable

import pytest

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite tests/goldens/*.txt with what the code gives now, to be reviewed as a diff",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, list[str]], None]:
    """Compares lines with tests/goldens/<name>.txt, or writes them there if told to."""

    def compare(name: str, lines: list[str]) -> None:
        path = GOLDENS / f"{name}.txt"
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert lines == path.read_text(encoding="utf-8").splitlines()

    return compare
