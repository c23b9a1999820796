"""A thread that looks after the other processes, and ends this one where they cannot go on.

Under `watch/` in the store each process keeps

    beat/I         [beats, position, patient, step]: that it lives, and how far it has come
    stop/RUN       why someone was asked to stop
    begun/RUN/I    the step that process I had begun when it heard so
    ended/I        [exit code, message] of a process that ended because of an error

A process is lost if its beat does not change for `timeout` seconds, or if it stays where it is
while another process has gone on and waits, unless it said that it may take long. Where work with
the others fails (a connection breaks when a process dies), a few missing beats are enough.
"""

import json
import os
import sys
import threading
import time
from typing import Any, NoReturn

from m6jax.processes import aborting
from m6jax.processes.standing import Standing
from m6jax.processes.store import Store, StoreError

_MISSED_BEATS = 5
_GRACE_SECONDS = 3.0  # in which a process that hears of an error may have the same


class _Seen:
    """What is known of another process."""

    def __init__(self) -> None:
        self.beat: list[Any] = [0, 0, True, -1]
        self.changed = self.moved = time.monotonic()

    def see(self, beat: list[Any], now: float) -> None:
        if beat != self.beat:
            self.changed = now
        if beat[1:3] != self.beat[1:3]:
            self.moved = now
        self.beat = beat

    @property
    def position(self) -> int:
        return int(self.beat[1])

    @property
    def patient(self) -> bool:
        return bool(self.beat[2])

    @property
    def step(self) -> int:
        return int(self.beat[3])


class Watch:
    """The thread and what it has seen."""

    def __init__(self, store: Store, standing: Standing, timeout: float):
        """Starts the thread.

        Args:
          store: what the processes share.
          standing: of this process.
          timeout: seconds after which a process that gives no sign counts as lost.
        """
        self._store = store
        self._standing = standing
        self._timeout = timeout
        self._interval = min(1.0, timeout / 10)
        self._seen = {i: _Seen() for i in range(store.count)}
        self._answered = time.monotonic()  # when the store did so last
        self._beats = 0
        self._ending = threading.Event()
        aborting.intercept(self._aborted)
        self._thread = threading.Thread(target=self._run, name="m6jax watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()
        aborting.leave_alone()
        self._thread.join()

    def end(self, code: int, message: str) -> NoReturn:
        """See `Group.end`."""
        self._ending.set()
        ended = self._tell_and_wait(code, message)
        first = min((i for i, (_, said) in ended.items() if said == message), default=None)
        if first in (None, self._store.index):
            print(message, file=sys.stderr, flush=True)
        self._exit(code)

    def end_lost(self) -> None:
        """See `Group.end_lost`; returns if all processes show signs of life."""
        wait_until = time.monotonic() + min(self._timeout, 2 * _MISSED_BEATS * self._interval)
        while time.monotonic() < wait_until:
            self._end_if_missing()
            time.sleep(self._interval)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(self._interval):
            now = time.monotonic()
            if now - before > self._timeout / 2:  # this process was stopped, not the others
                self._seen = {i: _Seen() for i in self._seen}
            before = now
            try:
                self._look(now)
            except StoreError:
                continue  # when the first process is gone, jax aborts this one: `_aborted`

    def _look(self, now: float) -> None:
        store, standing = self._store, self._standing
        self._beats += 1
        beat = [self._beats, standing.position, standing.patient, standing.step]
        store.put(f"watch/beat/{store.index}", json.dumps(beat))
        if standing.asked is not None:
            store.put(f"watch/stop/{standing.run}", standing.asked)
        found = store.read("watch")
        self._answered = time.monotonic()
        for i, seen in self._seen.items():
            if (value := found.get(f"beat/{i}")) is not None:
                seen.see(json.loads(value), now)
        self._end_with_others(found)
        self._end_if_lost(now)
        if (reason := found.get(f"stop/{standing.run}")) and not standing.stopping:
            self._agree_to_stop(reason)

    def _agree_to_stop(self, reason: str) -> None:
        """Finds the step before which all processes can still stop."""
        store, standing = self._store, self._standing
        with standing.lock:
            place = f"begun/{standing.run}"
            store.put(f"watch/{place}/{store.index}", str(standing.step))
            deadline = time.monotonic() + self._timeout
            while time.monotonic() < deadline:
                begun = [int(step) for step in store.read(f"watch/{place}").values()]
                if len(begun) == store.count:
                    standing.asked = None
                    standing.stop_at(max(begun) + 1, reason)
                    return
                time.sleep(0.05)

    def _end_with_others(self, found: dict[str, str]) -> None:
        """Ends this process if another one has ended because of an error."""
        ended = [i for i in self._seen if f"ended/{i}" in found]
        if not ended:
            return
        code, message = json.loads(found[f"ended/{ended[0]}"])
        # The main thread may be about to say the same.
        if self._ending.wait(_GRACE_SECONDS):
            return
        self._ending.set()
        self._tell_and_wait(code, "")
        self._say(f"process {ended[0]} of {self._store.count} ended with {code}: {message}")
        self._exit(code)

    def _end_if_lost(self, now: float) -> None:
        """Ends this process if another one gives no sign of life, or stays behind."""
        late = now - self._timeout
        lost = [i for i, seen in self._seen.items() if seen.changed < late]
        if lost:
            self._end_because(lost[0], f"has given no sign of life for {self._timeout:g} s")
        still = {i: seen for i, seen in self._seen.items() if seen.moved < late}
        if not still:
            return
        behind = min(still, key=lambda i: still[i].position)
        farthest = max(seen.position for seen in still.values())
        if still[behind].position < farthest and not still[behind].patient:
            self._end_because(behind, f"does not go on since {self._timeout:g} s")

    def _end_if_missing(self) -> None:
        """Ends this process if several beats of another one are missing."""
        late = self._answered - _MISSED_BEATS * self._interval
        for i, seen in self._seen.items():
            if seen.changed < late:
                self._end_because(i, "is gone")

    def _end_because(self, lost: int, what: str) -> NoReturn:
        self._ending.set()
        self._say(
            f"process {lost} of {self._store.count} {what}; it was at step"
            f" {max(self._seen[lost].step, 0):,}. Nothing more is saved: the same command goes on"
            " from the newest complete checkpoint"
        )
        if lost != 0:  # else there is no one left who could be told
            self._tell_and_wait(1, f"process {lost} {what}")
        self._exit(1)

    def _tell_and_wait(self, code: int, message: str) -> dict[int, tuple[int, str]]:
        """Tells the others that this process ends, and returns those who said so too.

        The first process waits for the others: with it ends what connects them.
        """
        ended: dict[int, tuple[int, str]] = {}
        try:
            self._store.put(f"watch/ended/{self._store.index}", json.dumps([code, message]))
            deadline = time.monotonic() + _GRACE_SECONDS + 2 * self._interval
            while len(ended) < self._store.count and time.monotonic() < deadline:
                time.sleep(0.05)
                found = self._store.read("watch/ended")
                ended = {int(i): tuple(json.loads(value)) for i, value in found.items()}
            if self._store.index == 0:
                time.sleep(self._interval)
        except StoreError:
            pass  # the first process has ended before
        return ended

    def _aborted(self) -> bool:
        """Ends this process where jax aborts it because of another one; False: for no such reason.

        Called in the thread that aborts, while the others go on.
        """
        if self._ending.is_set():
            time.sleep(_GRACE_SECONDS)  # whoever ends this process is about to do so
            return False
        deadline = time.monotonic() + 3 * self._interval
        while time.monotonic() < deadline:
            time.sleep(self._interval / 2)
        self._end_if_missing()
        if time.monotonic() - self._answered > 2 * self._interval:
            self._end_because(0, "is gone, which connects all others,")
        return False

    def _say(self, message: str) -> None:
        print(f"m6jax: {message}", file=sys.stderr, flush=True)

    def _exit(self, code: int) -> NoReturn:
        # Not by an exception: threads of jax and orbax wait for processes that are gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
