"""When a stage ends: at a step, when the loss has flattened, or when layers stop agreeing.

A trigger is a setting. Its `watch` follows one stage of one run: the training loop shows it what
was measured after a step and asks whether the stage is over.

>>> watch = LossSlope(at_most=1000, window=2, least_decrease=100.0).watch(start=0, seen={})
>>> for step, loss in enumerate([5.0, 4.0, 3.9, 3.8], 1):   # means 4.5, 3.85: 0.325 a step
...   watch.see_loss(step, loss)
>>> watch.over(4)                                           # 325 nats in 1000 steps
False

What a watch has seen is JSON and goes into the checkpoint, floats and all, so that a resumed run
decides as a straight one would. It sees nothing but global values; where it may have decided
something, all processes take what the first one decided.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m6jax.foundation.validated import ConfigError, validated

Seen = dict[str, Any]
Correlations = Sequence[float] | np.ndarray


class Watch:
    """Follows a stage for a trigger; this one waits for the last possible step."""

    def __init__(self, at_most: int, seen: Mapping[str, Any]):
        """Goes on from what was seen.

        Args:
          at_most: the stage is over after so many updates in any case.
          seen: of `seen`; empty when the stage begins.
        """
        self._at_most = at_most
        self._over = bool(seen.get("over", False))

    def over(self, step: int) -> bool:
        """Whether the stage is over after `step` updates."""
        return self._over or step >= self._at_most

    @property
    def decided(self) -> bool:
        """Whether what was seen ends the stage."""
        return self._over

    def decide(self, over: bool) -> None:
        """Takes another process's decision in place of the own one."""
        self._over = over

    def wants_agreement(self, step: int) -> bool:
        """Whether gradients are to be compared after this step."""
        del step
        return False

    def see_loss(self, step: int, loss: Any) -> Mapping[str, float]:
        """Takes a step's loss, a number or a scalar on its way, which is not waited for.

        Returns:
          What was found, for the run's metrics; empty after most steps.
        """
        del step, loss
        return {}

    def see_agreement(self, step: int, correlations: Correlations) -> Mapping[str, float]:
        """Takes the correlation of every pair of layers after a step; returns as `see_loss`."""
        del step, correlations
        return {}

    def seen(self) -> Seen:
        """Returns what the checkpoint keeps; waits for losses on their way."""
        return {"over": self._over}


class Trigger(abc.ABC):
    """Says when a stage ends.

    Attributes:
      at_most: the number of updates, since the run began, after which the stage ends in any case.
      at_least: the number of updates, since the run began, before which it does not end.
    """

    at_most: int
    at_least: int

    @abc.abstractmethod
    def watch(self, start: int, seen: Mapping[str, Any]) -> Watch:
        """Returns what follows a stage.

        Args:
          start: updates made when the stage began.
          seen: see `Watch.seen`; empty when the stage begins.
        """

    def check_stage(self, where: str, begin: int, shared: bool) -> None:
        """Raises ConfigError if the trigger cannot work in a stage.

        Args:
          where: what to call the stage.
          begin: updates made when it begins at the latest.
          shared: whether its layers share weights.
        """
        del where, begin, shared


@validated
class AtStep(Trigger):
    """The stage ends when so many updates have been made since the run began.

    Attributes:
      step: number of updates.
    """

    step: int

    def check(self) -> None:
        """Raises ConfigError for a step that never comes after a first one."""
        if self.step < 1:
            raise ConfigError(f"AtStep.step: {self.step}; at least 1 is needed")

    @property
    def at_most(self) -> int:  # type: ignore[override]
        """The step."""
        return self.step

    @property
    def at_least(self) -> int:  # type: ignore[override]
        """The step."""
        return self.step

    def watch(self, start: int, seen: Mapping[str, Any]) -> Watch:
        """See `Trigger.watch`."""
        del start
        return Watch(self.step, seen)


@validated
class LossSlope(Trigger):
    """The stage ends when the training loss falls too slowly.

    The steps of the stage are cut into windows. When one is full, its mean loss is compared with
    that of the window before; the fall, divided by the window's length, is the slope of that
    moment. Of the steps between no one asks, so that a run need not wait for each step's loss.

    Attributes:
      at_most: the stage ends after so many updates (since the run began) in any case.
      least_decrease: nats a token in 1000 steps; a slower fall is flat.
      window: steps over which the loss is averaged.
      checks: flat windows in succession that end the stage.
      at_least: the stage does not end before so many updates since the run began.
    """

    at_most: int
    least_decrease: float
    window: int = 100
    checks: int = 2
    at_least: int = 0

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be."""
        _check_positive(self, "at_most", "window", "checks")
        _check_bounds(self)

    def watch(self, start: int, seen: Mapping[str, Any]) -> Watch:
        """See `Trigger.watch`."""
        return _SlopeWatch(self, start, seen)

    def check_stage(self, where: str, begin: int, shared: bool) -> None:
        """See `Trigger.check_stage`: a slope needs two windows, each flat one another."""
        del shared
        windows = self.checks + 1
        if begin + windows * self.window > self.at_most:
            raise ConfigError(
                f"LossSlope.window: {where} may begin at step {begin}, and {windows} windows of"
                f" {self.window} steps do not fit before at_most = {self.at_most}"
            )


class _SlopeWatch(Watch):
    def __init__(self, trigger: LossSlope, start: int, seen: Mapping[str, Any]):
        super().__init__(trigger.at_most, seen)
        self._trigger = trigger
        self._start = start
        self._sum: float = seen.get("sum", 0.0)  # of the losses of the window so far
        self._before: float | None = seen.get("before")  # mean of the window before
        self._flat: int = seen.get("flat", 0)
        self._coming: list[Any] = []

    def see_loss(self, step: int, loss: Any) -> Mapping[str, float]:
        self._coming.append(loss)
        if (step - self._start) % self._trigger.window:
            return {}
        self._add_up()
        mean, before = self._sum / self._trigger.window, self._before
        self._sum, self._before = 0.0, mean
        if before is None:
            return {}
        decrease = 1000 * (before - mean) / self._trigger.window
        self._flat = self._flat + 1 if decrease < self._trigger.least_decrease else 0
        self._over = self._flat >= self._trigger.checks and step >= self._trigger.at_least
        return {"loss_decrease": decrease, "flat_windows": self._flat}

    def seen(self) -> Seen:
        self._add_up()
        own = {"sum": self._sum, "before": self._before, "flat": self._flat}
        return super().seen() | own

    def _add_up(self) -> None:
        # One after another, so that the sum does not depend on how often it is asked for.
        for loss in self._coming:
            self._sum += float(loss)
        self._coming = []


@validated
class GradientAgreement(Trigger):
    """The stage ends when layers that share weights want to move them different ways.

    Every so many steps the gradients of a shared weight by each of its uses are compared with
    those by its next use, on one batch (see `gradient_agreement`). When the correlation of most
    pairs is low, several checks running, sharing holds the layers back (Lin et al. 2021, arXiv
    2110.03848).

    Attributes:
      at_most: the stage ends after so many updates (since the run began) in any case.
      every: steps between checks, counted since the run began.
      threshold: a pair whose correlation is below it does not agree.
      share: of the pairs; a check counts when more than this share does not agree.
      checks: such checks in succession that end the stage.
      at_least: the stage does not end before so many updates since the run began.
    """

    at_most: int
    every: int = 1000
    threshold: float = 0.5
    share: float = 0.5
    checks: int = 3
    at_least: int = 0

    def check(self) -> None:
        """Raises ConfigError for numbers that cannot be."""
        _check_positive(self, "at_most", "every", "checks")
        _check_bounds(self)
        if not -1 <= self.threshold <= 1:
            raise ConfigError(
                f"GradientAgreement.threshold: {self.threshold} is no correlation, from -1 to 1"
            )
        if not 0 <= self.share < 1:
            raise ConfigError(f"GradientAgreement.share: {self.share} is not in [0, 1)")

    def watch(self, start: int, seen: Mapping[str, Any]) -> Watch:
        """See `Trigger.watch`."""
        return _AgreementWatch(self, start, seen)

    def check_stage(self, where: str, begin: int, shared: bool) -> None:
        """See `Trigger.check_stage`: layers that share nothing have nothing to agree on."""
        if not shared:
            raise ConfigError(
                f"GradientAgreement: in {where} every layer has its own weights, so that there is"
                " no agreement to wait for (end it with AtStep or LossSlope, or set Stage.unit)"
            )
        room = self.at_most // self.every - begin // self.every
        if room < self.checks:
            raise ConfigError(
                f"GradientAgreement.every: {room} checks, at multiples of {self.every} steps, fit"
                f" in {where}, which may begin at step {begin} and ends at {self.at_most} at the"
                f" latest; {self.checks} are needed"
            )


class _AgreementWatch(Watch):
    def __init__(self, trigger: GradientAgreement, start: int, seen: Mapping[str, Any]):
        super().__init__(trigger.at_most, seen)
        self._trigger = trigger
        self._start = start
        self._low: int = seen.get("low", 0)

    def wants_agreement(self, step: int) -> bool:
        return step > self._start and step % self._trigger.every == 0

    def see_agreement(self, step: int, correlations: Correlations) -> Mapping[str, float]:
        share = float((np.asarray(correlations) < self._trigger.threshold).mean())
        self._low = self._low + 1 if share > self._trigger.share else 0
        self._over = self._low >= self._trigger.checks and step >= self._trigger.at_least
        return {"disagreeing_pairs": share, "low_checks": self._low}

    def seen(self) -> Seen:
        return super().seen() | {"low": self._low}


def _check_positive(trigger: Any, *fields: str) -> None:
    for field in fields:
        if getattr(trigger, field) < 1:
            raise ConfigError(
                f"{type(trigger).__name__}.{field}: {getattr(trigger, field)}; at least 1 is needed"
            )


def _check_bounds(trigger: LossSlope | GradientAgreement) -> None:
    if trigger.at_least > trigger.at_most:
        raise ConfigError(
            f"{type(trigger).__name__}.at_least: {trigger.at_least} comes after at_most ="
            f" {trigger.at_most}"
        )
