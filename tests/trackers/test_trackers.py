"""Trackers, with services that are not there in the place of the real packages."""

import logging
import math
import sys
import types

import pytest

from m6jax import trackers
from m6jax.foundation.validated import ConfigError
from m6jax.reporting.writers import MetricWriter

CONFIG = "Experiment.steps = 3\n"
RECORD = {"step": 3, "stage": "real", "split": "train", "loss": 1.5, "grad_norm": math.nan}


class FakeWandB(types.ModuleType):
    """Notes what it is told."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.logged, self.finished = [], [], 0

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished += 1


class FakeMLflow(types.ModuleType):
    """A client whose runs live as long as it does."""

    def __init__(self):
        super().__init__("mlflow.tracking")
        self.runs, self.metrics, self.texts = {}, [], []

    def MlflowClient(self, uri):  # noqa: N802
        self.uri = uri
        return self

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if self.runs else None

    def create_experiment(self, name):
        return name

    def search_runs(self, places, query, max_results):
        return [run for tag, run in self.runs.items() if f"'{tag}'" in query]

    def create_run(self, place, run_name, tags):
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{place}/{run_name}"))
        self.runs[tags["m6jax"]] = run
        return run

    def log_text(self, run_id, text, name):
        self.texts.append((run_id, text, name))

    def log_metric(self, run_id, name, value, step):
        self.metrics.append((run_id, name, value, step))

    def set_terminated(self, run_id):
        self.ended = run_id


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", fake)
    return fake


def write(directory, services):
    tracked = trackers.start(services, str(directory), CONFIG)
    with MetricWriter(directory, trackers=tracked) as writer:
        writer.write(RECORD)
        writer.write(RECORD)  # there already


def test_wandb_gets_each_record_once_and_knows_the_run_again(wandb, tmp_path):
    for _ in range(2):
        write(tmp_path / "run", [trackers.WandB(project="giants", mode="offline")])
    first, second = wandb.begun
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("giants", "run", "allow")
    assert first["config"] == {"config.gin": CONFIG}
    assert wandb.logged == [{"step": 3, "train/loss": 1.5}] * 2
    assert wandb.finished == 2


def test_mlflow_goes_on_with_the_run_of_the_directory(mlflow, tmp_path):
    for _ in range(2):
        write(tmp_path / "run", [trackers.MLflow(experiment="giants", name="mine")])
    assert mlflow.texts == [("giants/mine", CONFIG, "config.gin")]
    assert mlflow.metrics == [("giants/mine", "train/loss", 1.5, 3)] * 2
    assert mlflow.ended == "giants/mine"


def test_a_service_that_fails_costs_no_run(wandb, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb, "log", lambda _: 1 / 0)
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "a", [trackers.WandB(project="p")])
        monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
        write(tmp_path / "b", [trackers.WandB(project="p")])
    assert [r.getMessage() for r in caplog.records] == [
        "WandB: division by zero; the run goes on without it"
    ] * 2
    assert (tmp_path / "b" / "metrics.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("service", "name"),
    [(trackers.WandB(project="p"), "wandb"), (trackers.MLflow(experiment="e"), "mlflow")],
)
def test_a_package_that_is_missing_is_named(service, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name} is not installed \(pip install 'm6jax\[{name}"):
        trackers.start([service], str(tmp_path), CONFIG)
