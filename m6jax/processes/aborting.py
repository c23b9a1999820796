"""What is done when jax aborts this process because another one is gone.

jax's runtime then ends every process by `abort`, whatever it does. A handler of that signal can
still say which process it was, and end with an exit code that means something. Handlers set by
Python's own `signal` run in the main thread, which may be waiting for ever; this one runs at once,
in the thread that aborts.
"""

import ctypes
import signal
from collections.abc import Callable

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[object] = []  # the system calls it as long as it is set


def intercept(handle: Callable[[], bool]) -> None:
    """Calls `handle` where the process aborts.

    Args:
      handle: ends the process in its own way, or returns; then the abort goes on.
    """

    @_HANDLER
    def handler(number: int) -> None:
        del number
        handle()
        leave_alone()

    _kept[:] = [handler]
    _set(handler)


def leave_alone() -> None:
    """Lets the process abort as the system does."""
    _set(None)
    _kept.clear()


def _set(handler: object) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), handler)
