"""Which checkpoint becomes another one."""

import enum

from m6jax.foundation.validated import ConfigError, PathName, validated


class LayoutChange(enum.Enum):
    """What is done to the layers; the names are modes of the command line."""

    DELINK = "delink"
    LINK = "link"
    STACK = "stack"
    UNSTACK = "unstack"


@validated
class Conversion:
    """Settings of the modes delink, link, stack and unstack.

    The Experiment says what comes out: the layers of one of its stages, what becomes of the
    optimizer's state (`Stage.optimizer_state`), and with `model_dir` where it goes.

    Attributes:
      source: MODEL_DIR of the run whose checkpoint is read.
      step: of the checkpoint; None: the newest.
      stage: name of the stage of the Experiment that the result is of; None: the last.
      average: for link: take the mean of layers that differ.
      restart: the result is at step 0, with all data before it, instead of at the source's step and
        place in the data.
    """

    source: PathName | None = None
    step: int | None = None
    stage: str | None = None
    average: bool = False
    restart: bool = False

    def check(self) -> None:
        """Raises ConfigError for a step that cannot be."""
        if self.step is not None and self.step < 0:
            raise ConfigError(f"Conversion.step: {self.step} is negative")
