"""Weights & Biases and MLflow, each an optional installation.

A service is a `@validated` class whose `open` returns a `Session`. Another one is added here and to
the annotation of `Experiment.trackers`.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from m6jax.foundation.validated import ConfigError, validated


class Session(Protocol):
    """An open run of a service."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends numbers by name."""

    def close(self) -> None:
        """Returns when everything has been sent."""


@validated
class WandB:
    """Weights & Biases (`pip install 'm6jax[wandb]'`).

    Attributes:
      project: where the run is shown.
      entity: user or team; None: one's own.
      name: of the run; None: the last part of MODEL_DIR.
      mode: 'offline' writes under MODEL_DIR for `wandb sync`.
    """

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"

    def open(self, model_dir: str, run_id: str, config: str) -> Session:
        """Opens or goes on with a run; raises ConfigError where the package is not installed."""
        wandb = _installed("wandb", "wandb")
        run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or _last_part(model_dir),
            id=run_id,
            resume="allow",
            mode=self.mode,
            dir=model_dir if "://" not in model_dir else None,
            config={"config.gin": config},
        )
        # Records are written again after a resume; the service's own step only ever grows.
        run.define_metric("*", step_metric="step")
        return _WandBSession(run)


class _WandBSession:
    def __init__(self, run: Any):
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


@validated
class MLflow:
    """MLflow (`pip install 'm6jax[mlflow]'`).

    Attributes:
      experiment: where the run is shown.
      tracking_uri: of the server; None: as MLFLOW_TRACKING_URI says.
      name: of the run; None: the last part of MODEL_DIR.
    """

    experiment: str
    tracking_uri: str | None = None
    name: str | None = None

    def open(self, model_dir: str, run_id: str, config: str) -> Session:
        """Opens or goes on with a run; raises ConfigError where the package is not installed."""
        _installed("mlflow", "mlflow")
        client = importlib.import_module("mlflow.tracking").MlflowClient(self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else client.create_experiment(self.experiment)
        earlier = client.search_runs([place], f"tags.m6jax = '{run_id}'", max_results=1)
        if earlier:
            return _MLflowSession(client, earlier[0].info.run_id)
        name, tags = self.name or _last_part(model_dir), {"m6jax": run_id}
        run = client.create_run(place, run_name=name, tags=tags)
        client.log_text(run.info.run_id, config, "config.gin")
        return _MLflowSession(client, run.info.run_id)


class _MLflowSession:
    def __init__(self, client: Any, run_id: str):
        self._client = client
        self._run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _installed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Experiment.trackers: {module} is not installed (pip install 'm6jax[{extra}]', or"
            " leave trackers empty)"
        ) from error


def _last_part(model_dir: str) -> str:
    return model_dir.rstrip("/").rsplit("/", 1)[-1]
