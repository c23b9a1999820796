"""When a stage ends.

A trigger is a value that the training loop asks after every step.

>>> AtStep(step=100).due(99), AtStep(step=100).due(100)
(False, True)
"""

from m6jax.validated import ConfigError, validated


@validated
class AtStep:
    """The stage ends when so many updates have been made since the run began.

    Attributes:
      step: number of updates.
    """

    step: int

    def check(self) -> None:
        """Raises ConfigError for a step that never comes after a first one."""
        if self.step < 1:
            raise ConfigError(f"AtStep.step: {self.step}; at least 1 is needed")

    def due(self, step: int) -> bool:
        """Whether the stage is over after `step` updates."""
        return step >= self.step
