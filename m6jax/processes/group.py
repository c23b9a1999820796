"""The processes of a run as one: what one decides that concerns all is decided by all.

A stop is agreed on without a message a step. Each process notes, before a step, that it has come
so far. Who is asked to stop writes so in the store; the watch of each process (see `watch`) then
holds its process before the next step, writes how far it has come, and reads how far the others
have. All stop before the first step that none has begun:

    process 0   began step 6, is asked to stop    6, 7 -> stops after 7
    process 1   began step 7                      6, 7 -> stops after 7
"""

import json
import sys
from typing import Any

import jax

from m6jax.processes.standing import Standing
from m6jax.processes.store import Store
from m6jax.processes.watch import Watch

DEFAULT_TIMEOUT = 120.0
# A process that comes later has died or hangs, and the watch ends all before.
_FOREVER = 7 * 24 * 3600.0


class Group:
    """This process and those that work with it.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(self, store: Store | None = None, timeout: float = DEFAULT_TIMEOUT):
        """Makes a group of one, or joins the others.

        Args:
          store: what the processes share; None: there is one process.
          timeout: seconds without a sign of life after which a process counts as lost.
        """
        self.index = store.index if store else 0
        self.count = store.count if store else 1
        self._store = store
        self._standing = Standing()
        self._watch = Watch(store, self._standing, timeout) if store else None

    def gather(self, value: Any) -> list[Any]:
        """Returns the values (JSON) of all processes in order; waits for all of them."""
        self.patient()
        if self._store is None:
            return [value]
        return [json.loads(v) for v in self._store.gather(json.dumps(value), _FOREVER)]

    def first(self, value: Any) -> Any:
        """Returns the value (JSON) that the first process gives; waits for all of them."""
        return self.gather(value)[0]

    def reached(self, step: int) -> str | None:
        """Says that `step` updates were begun, and returns why all stop now, None if they go on.

        To be called before each step; all processes get the same answer for the same step. From
        here on the process is expected to come to the next call as soon as the others.
        """
        return self._standing.reached(step)

    def joins(self) -> None:
        """Says that this process has what it needs for the step, and waits for the others in it."""
        self._standing.go_on(patient=False)

    def patient(self) -> None:
        """Says that what comes may take this process longer than others, such as compiling."""
        self._standing.go_on(patient=True)

    def begin(self) -> None:
        """Forgets that an earlier run was asked to stop."""
        self._standing.begin()

    def ask_to_stop(self, reason: str) -> None:
        """Asks all processes to stop, after the step that they have all begun."""
        if self._store is None:
            self._standing.stop_at(-1, reason)
        else:
            self._standing.asked = reason

    def end(self, code: int, message: str) -> int:
        """Ends this process because of an error, and the others with the same exit code.

        Args:
          code: exit code.
          message: printed once for all processes that say the same.

        Returns:
          The exit code, where this process is alone; else it does not return.
        """
        if self._watch is not None:
            self._watch.end(code, message)
        print(message, file=sys.stderr, flush=True)
        return code

    def end_lost(self) -> None:
        """Ends this process if another one is lost; to be called when work with them failed."""
        if self._watch is not None:
            self._watch.end_lost()

    def leave(self) -> None:
        """Waits for the others and parts; for the end of a job that all have done."""
        if self._watch is not None:
            self.gather(None)
            self._watch.close()
            jax.distributed.shutdown()


_current: Group | None = None


def current() -> Group:
    """Returns the group of this process; also where jax was initialised by someone else."""
    if _current is None or (_current.count == 1 and jax.distributed.is_initialized()):
        return join(DEFAULT_TIMEOUT)
    return _current


def join(timeout: float) -> Group:
    """Makes the group of this process out of what jax knows.

    Args:
      timeout: see `Group`.
    """
    # jax shows its store nowhere else.
    from jax._src.distributed import global_state

    global _current
    store = None
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        store = Store(global_state.client, jax.process_index(), jax.process_count())
    _current = Group(store, timeout)
    return _current
