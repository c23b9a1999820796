"""Learning rates as functions of the training step.

A schedule is a frozen object that is called with the step (an int or a traced int32 scalar) and
returns a float32 scalar. The step counts updates already made: the first update uses `schedule(0)`.

>>> schedule = WarmupStableDecay(peak=1.0, total_steps=100, warmup_steps=10, decay_fraction=0.2)
>>> [float(schedule(step)) for step in (0, 5, 10, 79, 80, 90, 100, 999)]
[0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]

Every warm-up is linear from 0 and reaches the peak at step `warmup_steps`. A schedule depends on
the step alone, so it goes on undisturbed when layers are delinked; `rewarmup` is the dip that a
stage may ask for there.
"""

import enum
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m6jax.foundation.validated import ConfigError, adjustable, validated

Step = int | np.ndarray | jax.Array


class Schedule(Protocol):
    """What a learning rate is to the training step."""

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate, float32[], of update number `step` (from 0)."""
        ...


class Decay(enum.Enum):
    """Share of the peak that is left in the last phase of `WarmupStableDecay`, x from 0 to 1.

    Attributes:
      LINEAR: 1 - x.
      SQRT: 1 - sqrt(x), steep at first (Hägele et al. 2024, arXiv 2405.18392).
      COSINE: (1 + cos(pi x)) / 2.
    """

    LINEAR = "linear"
    SQRT = "sqrt"
    COSINE = "cosine"


@validated
class Constant:
    """A warm-up, then one value.

    Attributes:
      peak: the learning rate.
      warmup_steps: steps of the warm-up.
    """

    peak: float
    warmup_steps: int = 0

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        _check(self)

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate, float32[]."""
        return _after_warmup(self, optax.constant_schedule(self.peak), step)


@validated
class InverseSquareRoot:
    """A warm-up, then peak * sqrt(warmup_steps / step) (Vaswani et al. 2017, arXiv 1706.03762).

    Attributes:
      peak: learning rate at step `warmup_steps`.
      warmup_steps: steps of the warm-up, at least 1: they set the scale of the decay too.
    """

    peak: float
    warmup_steps: int

    def check(self) -> None:
        """Raises ConfigError for values that cannot be."""
        _check(self)
        if self.warmup_steps == 0:
            raise ConfigError(
                "InverseSquareRoot.warmup_steps: 0 makes every learning rate 0; give at least 1"
            )

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate, float32[]."""

        def fall(after: Any) -> Any:  # `after` is negative in the warm-up, where it is not used
            steps = jnp.maximum(after + self.warmup_steps, self.warmup_steps)
            return self.peak * jnp.sqrt(self.warmup_steps / steps)

        return _after_warmup(self, fall, step)


@validated
class Cosine:
    """A warm-up, then half a period of a cosine (Loshchilov & Hutter 2017, arXiv 1608.03983).

    Attributes:
      peak: learning rate at step `warmup_steps`.
      total_steps: step at which `final` is reached; it stays there.
      warmup_steps: steps of the warm-up, fewer than total_steps.
      final: learning rate at the end.
    """

    peak: float
    total_steps: int = adjustable()
    warmup_steps: int = 0
    final: float = 0.0

    def check(self) -> None:
        """Raises ConfigError for values that cannot be, or if no step is left for the decay."""
        _check(self)
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"Cosine.warmup_steps: {self.warmup_steps} leaves nothing of total_steps ="
                f" {self.total_steps} for the decay (lower warmup_steps or raise total_steps)"
            )

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate, float32[]."""
        fall = optax.cosine_decay_schedule(
            self.peak, self.total_steps - self.warmup_steps, alpha=self.final / self.peak
        )
        return _after_warmup(self, fall, step)


@validated
class WarmupStableDecay:
    """A warm-up, a constant phase, and a decay at the end (Hu et al. 2024, arXiv 2404.06395).

    The decay takes the last round(decay_fraction * total_steps) steps, the constant phase what is
    left between warm-up and decay.

    Attributes:
      peak: learning rate of the constant phase.
      total_steps: step at which `final` is reached; it stays there.
      warmup_steps: steps of the warm-up.
      decay_fraction: share of total_steps spent in the decay, 0 to 1; with 0 the peak stays.
      final: learning rate at the end of the decay.
      decay: shape of the decay.
    """

    peak: float
    total_steps: int = adjustable()
    warmup_steps: int = 0
    decay_fraction: float = 0.1
    final: float = 0.0
    decay: Decay = Decay.LINEAR

    def check(self) -> None:
        """Raises ConfigError for values that cannot be, or phases that exceed total_steps."""
        _check(self)
        if not 0 <= self.decay_fraction <= 1:
            raise ConfigError(
                f"WarmupStableDecay.decay_fraction: {self.decay_fraction} is not between 0 and 1"
            )
        if self.stable_steps < 0:
            raise ConfigError(
                f"WarmupStableDecay: warmup_steps = {self.warmup_steps} and a decay of"
                f" {self.decay_steps} steps exceed total_steps = {self.total_steps}"
                " (lower warmup_steps or decay_fraction, or raise total_steps)"
            )

    @property
    def decay_steps(self) -> int:
        """Number of steps of the decay."""
        return round(self.decay_fraction * self.total_steps)

    @property
    def decay_start(self) -> int | None:
        """Updates made before the decay; None where there is none."""
        return self.total_steps - self.decay_steps if self.decay_steps else None

    @property
    def stable_steps(self) -> int:
        """Number of steps at the peak."""
        return self.total_steps - self.warmup_steps - self.decay_steps

    def __call__(self, step: Step) -> jax.Array:
        """Returns the learning rate, float32[]."""
        if self.decay_steps == 0:
            return _after_warmup(self, optax.constant_schedule(self.peak), step)

        def fall(after: Any) -> Any:
            x = jnp.clip((after - self.stable_steps) / self.decay_steps, 0.0, 1.0)
            left = {
                Decay.LINEAR: 1 - x,
                Decay.SQRT: 1 - jnp.sqrt(x),
                Decay.COSINE: (1 + jnp.cos(jnp.pi * x)) / 2,
            }[self.decay]
            return self.final + (self.peak - self.final) * left

        return _after_warmup(self, fall, step)


def same_until(first: Schedule, second: Schedule, steps: int) -> int:
    """Returns how many of the first `steps` updates have the same learning rate in two schedules.

    They are counted up to the first that differs.
    """
    numbers = np.arange(steps)
    differ = np.flatnonzero(np.asarray(first(numbers)) != np.asarray(second(numbers)))
    return int(differ[0]) if differ.size else steps


def rewarmup(
    learning_rate: jax.Array,
    step: Step,
    start_step: Step,
    steps: int,
    start_fraction: float = 0.01,
) -> jax.Array:
    """Lowers the learning rate for some steps after a switch of stages.

    The factor is linear from `start_fraction` at `start_step` to 1 at `start_step + steps`. Before
    `start_step` and with `steps` = 0 the learning rate is returned as it is.

    Args:
      learning_rate: the schedule's value at `step`, float32[].
      step: updates made so far; an int or a traced scalar.
      start_step: step of the switch; an int or a traced scalar.
      steps: length of the re-warm-up in steps.
      start_fraction: factor of the first update after the switch, above 0 up to 1.

    Returns:
      The learning rate to use, float32[].

    Raises:
      ConfigError: `steps` is negative or `start_fraction` not in (0, 1].
    """
    if steps < 0:
        raise ConfigError(f"re-warm-up: {steps} steps; 0 or more are needed")
    if not 0 < start_fraction <= 1:
        raise ConfigError(f"re-warm-up: start_fraction = {start_fraction} is not in (0, 1]")
    learning_rate = jnp.asarray(learning_rate, jnp.float32)
    if steps == 0:
        return learning_rate
    after = jnp.asarray(step) - start_step
    factor = start_fraction + (1 - start_fraction) * jnp.clip(after / steps, 0.0, 1.0)
    return jnp.where(after < 0, learning_rate, learning_rate * factor)


def _after_warmup(schedule: Any, rest: optax.Schedule, step: Step) -> jax.Array:
    """Linear from 0 to `schedule.peak`, then `rest`, which counts from the end of the warm-up."""
    if schedule.warmup_steps:
        warmup = optax.linear_schedule(0.0, schedule.peak, schedule.warmup_steps)
        rest = optax.join_schedules([warmup, rest], [schedule.warmup_steps])
    return jnp.asarray(rest(jnp.asarray(step)), jnp.float32)


def _check(schedule: Any) -> None:
    """Raises ConfigError for rates and step counts that make no sense in any schedule."""
    name = type(schedule).__name__
    if not schedule.peak > 0:
        raise ConfigError(f"{name}.peak: {schedule.peak}; a learning rate above 0 is needed")
    if schedule.warmup_steps < 0:
        raise ConfigError(f"{name}.warmup_steps: {schedule.warmup_steps}; 0 or more are needed")
    final = getattr(schedule, "final", 0.0)
    if not 0 <= final <= schedule.peak:
        raise ConfigError(f"{name}.final: {final} is not between 0 and the peak {schedule.peak}")
    total_steps = getattr(schedule, "total_steps", None)
    if total_steps is not None and total_steps < 1:
        raise ConfigError(f"{name}.total_steps: {total_steps}; at least 1 is needed")
