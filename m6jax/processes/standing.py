"""How far this process has come, and where it is to stop."""

import threading


class Standing:
    """What the main thread says of itself, and the watch's thread reads.

    Attributes:
      lock: held by the watch while processes agree on where to stop; the main thread waits for it
        before a step.
      run: number of the run in this process; a stop concerns one run.
      step: updates begun; -1 before the first question.
      position: grows with everything that the main thread says, in all processes alike.
      patient: whether what comes may take longer here than elsewhere.
      asked: why this process was asked to stop, until the others know.
    """

    def __init__(self) -> None:
        # A signal's handler may interrupt the main thread while it holds the lock.
        self.lock = threading.RLock()
        self.run = 0
        self.step = -1
        self.position = 0
        self.patient = True
        self.asked: str | None = None
        self._stop_at: int | None = None
        self._reason: str | None = None

    def begin(self) -> None:
        """See `Group.begin`."""
        with self.lock:
            self.run += 1
            self.step = -1
            self.asked = self._stop_at = self._reason = None

    def reached(self, step: int) -> str | None:
        """See `Group.reached`."""
        with self.lock:
            self.step = step
            self.position += 1
            self.patient = False
            stops = self._stop_at is not None and step >= self._stop_at
            return self._reason if stops else None

    def go_on(self, patient: bool) -> None:
        """See `Group.joins` and `Group.patient`."""
        with self.lock:
            self.position += 1
            self.patient = patient

    def stop_at(self, step: int, reason: str) -> None:
        """Decides: `reached` gives the reason from this step on."""
        with self.lock:
            self._stop_at, self._reason = step, reason

    @property
    def stopping(self) -> bool:
        """Whether it is decided where to stop."""
        return self._stop_at is not None
