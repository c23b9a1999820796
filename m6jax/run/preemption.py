"""Stopping when asked to: SIGTERM (a machine is taken back) or Ctrl-C.

After the first signal to one process all of them save and stop after the step that they are in
(see `processes.group`). A second one ends at once: SIGTERM the process, Ctrl-C what is running, so
that a notebook lives on.
"""

import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from m6jax.processes import Group

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Context in which a signal asks to stop."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pipe: socket.socket | None = None
        self._previous_fd = -1

    def __enter__(self) -> "Preemption":
        self._group.begin()
        # Python lets only the main thread handle signals; elsewhere (a notebook's worker) the
        # owner of the main thread decides.
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._remember) for s in SIGNALS}
            self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._previous_fd)
            self._pipe.close()  # which ends the thread

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
        self._group.ask_to_stop(signal.Signals(number).name)

    def _listen(self) -> None:
        """Lets a thread hear signals while the main thread waits, perhaps for ever, for a step."""
        reading, self._pipe = socket.socketpair()
        self._pipe.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._pipe.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reading,), daemon=True).start()

    def _hear(self, reading: socket.socket) -> None:
        heard = 0
        with reading:
            while data := reading.recv(1):
                number = data[0]
                if number not in SIGNALS:
                    continue
                name = signal.Signals(number).name
                self._group.ask_to_stop(name)
                heard += 1
                if heard > 1 and (number == signal.SIGTERM or self._group.count > 1):
                    print(f"m6jax: {name} again: ended at once", file=sys.stderr, flush=True)
                    os._exit(128 + number)
