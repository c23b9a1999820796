"""Records of a run to the services that it names; a service that fails is left alone."""

import hashlib
import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from m6jax.foundation.validated import ConfigError
from m6jax.trackers.services import MLflow, Session, WandB

logger = logging.getLogger(__name__)


class Tracked:
    """A run at one service.

    Args:
      name: of the service, for messages.
      session: open.
    """

    def __init__(self, name: str, session: Session):
        self._name = name
        self._session: Session | None = session

    def log(self, record: Mapping[str, Any]) -> None:
        """Sends the finite numbers of a record of `metrics.jsonl`, as `{split}/{name}`."""
        values = {
            f"{record['split']}/{name}": float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, numbers.Real) and math.isfinite(value)
        }
        if self._session is not None:
            self._try("log", int(record["step"]), values)

    def close(self) -> None:
        """Returns when everything has been sent."""
        if self._session is not None:
            self._try("close")
        self._session = None

    def _try(self, what: str, *arguments: Any) -> None:
        try:
            getattr(self._session, what)(*arguments)
        except Exception as error:  # whatever a service does, the run goes on
            logger.warning("%s: %s; the run goes on without it", self._name, error)
            self._session = None


def start(services: Sequence[WandB | MLflow], model_dir: str, config: str) -> list[Tracked]:
    """Opens a run at every service; a run that is resumed goes on there too.

    Args:
      services: as `Experiment.trackers` names them.
      model_dir: of the run, which says whether it is the same one.
      config: its `config.gin`.

    Raises:
      ConfigError: a service's package is not installed.
    """
    run_id = hashlib.sha256(model_dir.encode()).hexdigest()[:16]
    tracked = []
    for service in services:
        name = type(service).__name__
        try:
            tracked.append(Tracked(name, service.open(model_dir, run_id, config)))
        except ConfigError:
            raise
        except Exception as error:  # no network, no account
            logger.warning("%s: %s; the run goes on without it", name, error)
    return tracked
