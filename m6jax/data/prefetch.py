"""Making the next things in a background thread, a bounded number ahead."""

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `produce` in a thread and hands out what it returns, in order.

    An error in `produce` ends the thread and is raised by the `get` that comes to it, and by every
    later one.

    Args:
      produce: makes the next thing; called from one thread only.
      depth: how many may be ready and not handed out.
    """

    def __init__(self, produce: Callable[[], T], depth: int):
        self._produce = produce
        self._depth = depth
        self._ready: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="m6jax-data", daemon=True)
        self._thread.start()

    def get(self) -> T:
        """Returns the next thing, waiting for it if need be."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._error is not None
            raise self._error

    def close(self) -> None:
        """Ends the thread; what is ready is thrown away."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                thing = self._produce()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(thing)
                self._changed.notify_all()
