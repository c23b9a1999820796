"""Gin files in a directory of their own."""

import pathlib
from collections.abc import Callable

import fake_experiment
import pytest

from m6jax import configuration
from m6jax.foundation.validated import ConfigError

HEADER = "from __gin__ import dynamic_registration\nimport fake_experiment as fake\n"  # two lines

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes `text` below the imports to a file of the current directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.gin", header: str = HEADER) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + text, encoding="utf-8")
        return name

    return write_file


@pytest.fixture
def load(write: Write) -> Callable[..., fake_experiment.Experiment]:
    """Loads an experiment from the text below the imports and the bindings of a command line."""

    def load_text(text: str, *bindings: str) -> fake_experiment.Experiment:
        roots = [fake_experiment.Inference]
        return configuration.load(
            [write(text)], bindings, root=fake_experiment.Experiment, roots=roots
        ).value

    return load_text


@pytest.fixture
def problems(load: Callable[..., fake_experiment.Experiment]) -> Callable[..., list[str]]:
    """Loads what cannot be; returns the lines of the error."""

    def load_wrong(text: str, *bindings: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text, *bindings)
        assert "In call to configurable" not in str(error.value)
        return str(error.value).splitlines()

    return load_wrong
