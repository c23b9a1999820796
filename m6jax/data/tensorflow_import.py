"""tensorflow and seqio, imported late, without their noise and without accelerators.

Importing them takes seconds and prints lines from C++ that no log level stops; and tensorflow would
take the accelerators' memory, which is JAX's.
"""

import contextlib
import functools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from m6jax.data.errors import DataError
from m6jax.foundation.validated import ConfigError

# Lines that absl prints before its log levels are in force: `I0000 00:00:1763... cuda.cc:3] ...`.
_ABSL_LINE = re.compile(rb"^(WARNING: All log messages before absl|[IWE]\d{4} \d\d:\d\d:)")

_OWN_ERROR = re.compile(r"\bDataError: (.*)")
_NODE = re.compile(r"\{\{function_node .*?\}\}|\[Op:.*")  # where in tensorflow an error came up


@functools.cache
def import_tensorflow() -> tuple[Any, Any]:
    """Returns the modules `(tensorflow, seqio)`; tensorflow sees no GPU and no TPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _without_absl_lines():
        import seqio
        import tensorflow as tf

        for kind in ("GPU", "TPU"):
            if tf.config.get_visible_devices(kind):
                tf.config.set_visible_devices([], kind)
    return tf, seqio


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns an error of tensorflow's readers (a damaged record, a missing field) into `DataError`.

    Args:
      what: is read, for the message.
    """
    tf, _ = import_tensorflow()
    try:
        yield
    except tf.errors.OpError as error:
        if own := _OWN_ERROR.search(error.message):  # raised in a generator that tensorflow reads
            raise DataError(own[1]) from error
        first_line = _NODE.sub("", error.message).strip().splitlines()[0]
        raise DataError(f"{what} cannot be read: {first_line}") from error


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Turns any error of a user's own code, in tensorflow or out of it, into `DataError`.

    Args:
      what: runs, for the message.
    """
    try:
        with reading(what):
            yield
    except ConfigError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{what} failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        ) from error


@contextlib.contextmanager
def _without_absl_lines() -> Iterator[None]:
    """Holds back what is written to file descriptor 2 and then writes all but absl's lines."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not _ABSL_LINE.match(line):
                    os.write(2, line)
