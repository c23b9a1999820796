"""Settings classes to configure in the tests, with one field of every kind."""

import enum
from collections.abc import Callable
from typing import Literal

from m6jax.foundation.validated import ConfigError, adjustable, validated


class Form(enum.Enum):
    STACKED = "stacked"
    UNROLLED = "unrolled"


@validated
class Model:
    layers: int
    width: int = 64
    form: Form = Form.STACKED
    dropout: float | None = None


@validated
class Adam:
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


@validated
class Adafactor:
    rate: float = 0.01
    clip: float | None = 1.0


@validated
class Stage:
    unit: int
    steps: int = adjustable(default=10)
    optimizer: Adam | Adafactor = Adam()


@validated
class Experiment:
    model: Model
    batch_size: int
    microbatches: int = 1
    name: str = "run"
    stages: tuple[Stage, ...] = ()
    optimizer: Adam | Adafactor = Adam()
    rules: dict[str, tuple[str, ...]] | None = None
    mixture: dict[str, Adam] | None = None
    loss: Literal["sum", "mean"] = "mean"
    activation: Callable[[float], float] | None = None
    model_dir: str | None = adjustable(default=None)

    def check(self) -> None:
        if self.batch_size % self.microbatches:
            raise ConfigError(
                f"Experiment.microbatches: {self.microbatches} do not divide a batch of"
                f" {self.batch_size}"
            )


@validated
class Inference:
    model: Model
    prompt: str
    adam: Adam = Adam()


def double(x: float) -> float:
    return 2 * x
