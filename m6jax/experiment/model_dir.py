"""The directory of a run: what lies where, and whose it is.

Under MODEL_DIR are `config.gin` (every value as resolved; alone it repeats the run),
`vocabulary.model` and `identity.json` (see `identity`), `metrics.jsonl` (one object a line),
`checkpoints/` (see `checkpointing`), `tensorboard/` (the same metrics) and `report/` (plots), while
a run writes there `lock.json` (see `lock`), and `evaluations/` of --mode=eval.
"""

import contextlib
from collections.abc import Iterator

import jax
from etils import epath

from m6jax import configuration
from m6jax.experiment.experiment import Experiment
from m6jax.experiment.lock import Lock
from m6jax.foundation.validated import ConfigError

MACROS = {"MODEL_DIR": "Experiment.model_dir"}


class ModelDir:
    """Paths under one MODEL_DIR, local or on the network.

    Attributes:
      path: the directory.
      checkpoints: where checkpoints go.
      report: where plots go.
      evaluations: where evaluations go that no training made, a file for each set and step.
    """

    def __init__(self, path: str):
        self.path = epath.Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report"
        self.evaluations = self.path / "evaluations"

    def check(self, experiment: Experiment) -> None:
        """Makes sure that the directory can be written and is empty or this run's.

        Raises:
          ConfigError: it cannot be written, or holds a run of another configuration; the
            differences are named and nothing is changed.
        """
        with self._writable():
            self.check_same(experiment)
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe_{jax.process_index()}"
            probe.write_text("")
            probe.unlink()

    def check_same(self, experiment: Experiment) -> None:
        """Raises ConfigError if the directory holds a run of another configuration."""
        config = self.path / "config.gin"
        if config.exists():
            self._refuse_other_run(config.read_text(), self._text(experiment))

    def lock(self) -> Lock:
        """Returns the context in which this run alone writes the directory; one process holds it.

        Evaluating, continuing prompts and drawing the report need none.
        """
        return Lock(self.path, enabled=jax.process_index() == 0)

    def claim(self, experiment: Experiment) -> None:
        """Writes `config.gin`, which makes the directory this run's; raises as `check`."""
        with self._writable():
            (self.path / "config.gin").write_text(self._text(experiment))

    def _text(self, experiment: Experiment) -> str:
        return configuration.to_gin(experiment, macros=MACROS)

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"MODEL_DIR: {self.path} cannot be written ({error.strerror or error}); choose"
                " another directory"
            ) from error

    def _refuse_other_run(self, old: str, new: str) -> None:
        differences = configuration.compare(
            old,
            new,
            ignore=configuration.adjustable(Experiment),
            defaults=configuration.defaults(Experiment),
        )
        if differences:
            lines = "\n  ".join(differences)
            raise ConfigError(
                f"MODEL_DIR: {self.path} holds a run of another configuration:\n  {lines}\n"
                "Choose another MODEL_DIR, or give the configuration of that run"
                f" (--gin_file={self.path / 'config.gin'})."
            )
