"""Where a run stands, for a person who looks at it.

On a terminal it is one bar over all steps; in log files, notebooks and pipes, where a bar would
leave thousands of half lines, it is a line now and then:

    pseudo: step 120/1000 (12%), loss 5.123, 30.1k tokens/s, 12:34 left
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import SupportsFloat, TextIO

from tqdm import tqdm

from m6jax.foundation.streams import Lasting


class Progress:
    """A bar on a terminal, lines elsewhere."""

    def __init__(
        self,
        total_steps: int,
        *,
        initial_step: int = 0,
        enabled: bool = True,
        quiet: bool = False,
        every_seconds: float = 30.0,
        stream: TextIO | None = None,
    ):
        """Starts at `initial_step`.

        Args:
          total_steps: The last step of the run.
          initial_step: The steps that are done.
          enabled: False on all processes but the first: nothing is shown.
          quiet: Show results alone.
          every_seconds: The least time between two lines where there is no terminal.
          stream: Where to; if None, standard error, and standard output for messages.
        """
        self._enabled, self._quiet = enabled, quiet
        self._stream = Lasting(stream or sys.stderr)
        self._messages = Lasting(stream or sys.stdout)
        self._total, self._every_seconds = total_steps, every_seconds
        self._shown: dict[str, float] = {}
        self._first: tuple[int, float] | None = None
        self._printed = -math.inf
        self._bar = None
        if enabled and not quiet and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}{postfix}]",
            )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(
        self,
        step: int,
        stage: str,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        """Shows that `step` is done; what is None is shown as it was before."""
        if not self._enabled or self._quiet:
            return
        new = {"loss": loss, "tokens_per_second": tokens_per_second}
        self._shown |= {name: float(value) for name, value in new.items() if value is not None}
        if self._bar is not None:
            self._bar.set_description(stage, refresh=False)
            self._bar.set_postfix_str(", ".join(self._numbers()), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        if now - self._printed >= self._every_seconds or step >= self._total:
            self._printed = now
            percent = 100 * step // max(self._total, 1)
            parts = [f"{stage}: step {step}/{self._total} ({percent}%)", *self._numbers()]
            line = ", ".join([*parts, *self._time_left(step, now)])
            print(line, file=self._stream, flush=True)

    def say(self, text: str, *, result: bool = False) -> None:
        """Shows a message, above the bar if there is one.

        Args:
          text: The message.
          result: Whether it is one of those that are wanted of a quiet run.
        """
        if self._bar is not None:
            self._bar.write(text, file=self._messages)
        elif self._enabled and (result or not self._quiet):
            print(text, file=self._messages, flush=True)

    def close(self) -> None:
        """Leaves the bar as it is and ends its line."""
        if self._bar is not None:
            self._bar.close()

    def _numbers(self) -> list[str]:
        parts = []
        if "loss" in self._shown:
            parts.append(f"loss {self._shown['loss']:.4g}")
        if "tokens_per_second" in self._shown:
            parts.append(f"{tqdm.format_sizeof(self._shown['tokens_per_second'])} tokens/s")
        return parts

    def _time_left(self, step: int, now: float) -> list[str]:
        """Counts from the first step that was shown: before it lies the compilation."""
        first_step, first_time = self._first or (step, now)
        if step <= first_step:
            return []
        seconds = (now - first_time) / (step - first_step) * (self._total - step)
        return [f"{tqdm.format_interval(seconds)} left"]


class Pace:
    """What the steps since the last reading were like, pauses left out.

    Seconds a step, tokens a second, the share of the time in which the loop waited for data, and
    the share of the rows' positions that was used.

    Tokens are those of all processes that are no padding: what fills rows up is no work done.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins anew, after a pause."""
        self._since = time.perf_counter()
        self._tokens: list[SupportsFloat] = []
        self._positions = 0
        self._waited = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what is done within as waiting for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def add(self, real_tokens: SupportsFloat, positions: int) -> None:
        """Counts a step, of whose positions this many were no padding; it is not waited for."""
        self._tokens.append(real_tokens)
        self._positions += positions

    def leave_out(self, seconds: float) -> None:
        """Does not count so many seconds, in which no step was under way."""
        self._since += seconds

    def read(self) -> dict[str, float]:
        """Returns the averages since the last reading, once the steps are done."""
        tokens = sum(map(float, self._tokens))  # waits for the steps
        seconds = time.perf_counter() - self._since
        metrics = {
            "step_seconds": seconds / max(len(self._tokens), 1),
            "tokens_per_second": tokens / seconds,
            "data_wait_fraction": self._waited / seconds,
            "filled_fraction": tokens / max(self._positions, 1),
        }
        self.restart()
        return metrics
