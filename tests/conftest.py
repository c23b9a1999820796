"""Eight emulated CPU devices and quick compilation for every test."""

import os

# Before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import pathlib
from collections.abc import Callable, Iterator

import jax
import pytest
import runs

# Compiling takes most of the tests' time, and their programs run for milliseconds. These reach
# every program of a test, whoever compiles it; `models.EXACT` is what users have.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)


def compile_quickly() -> None:
    """Has jax read the flags, which it does once, and takes them back.

    libtpu reads them too, later, and ends the process for one that it does not know.
    """
    others = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = " ".join((others, *QUICK))
    jax.devices()
    os.environ["XLA_FLAGS"] = others


compile_quickly()

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite tests/goldens/*.txt with what the code gives now, to be reviewed as a diff",
    )
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail where a test is skipped: what it needs is said to be installed",
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="run the tests marked long too: further cases of what short tests show",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describes the marks; warnings about unknown ones are errors."""
    config.addinivalue_line(
        "markers", "long(*ids): only with --long; of a parametrised test these cases alone"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked long, unless it was asked for."""

    def is_long(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("long")
        return mark is not None and (not mark.args or item.callspec.id in mark.args)

    if config.getoption("--long"):
        return
    config.hook.pytest_deselected(items=[item for item in items if is_long(item)])
    items[:] = [item for item in items if not is_long(item)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--no-skips`, a run in which a test was skipped ends with 1."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("--no-skips"):
        return  # The workers of xdist have no reporter.
    skipped = reporter.stats.get("skipped", [])
    for report in skipped:
        reporter.write_line(f"\nskipped in spite of --no-skips: {report.nodeid}: {report.longrepr}")
    if skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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


@pytest.fixture(scope="session")
def quick_flags() -> tuple[str, ...]:
    """XLA_FLAGS for processes that a test starts, so that their programs are the tests' own."""
    return QUICK


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A text file to train on."""
    return runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where vocabularies and compiled programs are kept, for all runs of this process."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def quick_runs(caches: pathlib.Path) -> Iterator[None]:
    """Vocabularies and programs are made once for all runs of this process."""
    with pytest.MonkeyPatch.context() as patch, runs.kept_compilation(caches / "compiled"):
        patch.setenv("XDG_CACHE_HOME", str(caches))
        yield
