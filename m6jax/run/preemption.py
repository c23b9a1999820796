"""Stopping when asked to: SIGTERM (a machine is taken back) or Ctrl-C.

The first signal is remembered, and the loop saves and stops after the step it is in; a second
Ctrl-C interrupts at once.
"""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Context in which the signals are remembered.

    Attributes:
      requested: name of the signal that asked to stop; None so far.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        # Python lets only the main thread handle signals; elsewhere (a notebook's worker) the
        # owner of the main thread decides.
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._remember) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
