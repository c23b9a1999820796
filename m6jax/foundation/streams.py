r"""Messages that cannot end a run, wherever they go.

A terminal may not know a character, a pipe's reader may leave (`| head -2`), a log's disk may be
full. What is said is then written with escapes, or lost; the run goes on.

>>> with lasting_streams():
...   print("自然")                  # on a terminal of ASCII: \u81ea\u7136
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Lasting:
    """A text stream whose `write` and `flush` raise nothing; all else is the stream's own."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what can be written."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self._try(self._stream.write, escaped)
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Flushes what can be flushed."""
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        try:
            return bool(self._stream.isatty())
        except ValueError:  # it is closed
            return False

    def end(self) -> None:
        """Makes sure that nothing is left which the interpreter fails to write when it ends."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, do: Any, *arguments: Any) -> None:
        try:
            do(*arguments)
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):  # for ever; a disk may have room again
            self._forget()

    def _forget(self) -> None:
        """Sends what is still to be written, and all that follows, nowhere."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Makes standard output and standard error `Lasting`, for a while."""
    before = sys.stdout, sys.stderr
    lasting = Lasting(sys.stdout), Lasting(sys.stderr)
    sys.stdout, sys.stderr = lasting  # type: ignore[assignment]
    try:
        yield
    finally:
        for stream in lasting:
            stream.end()
        sys.stdout, sys.stderr = before
