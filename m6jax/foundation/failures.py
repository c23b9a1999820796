"""What ends a run without being a mistake in its settings: one message, and an exit code."""


class RunError(RuntimeError):
    """A disk, a file or a machine that fails; the message says what, and the way out.

    Attributes:
      exit_code: of the command line.
    """

    exit_code = 1


class NotFiniteError(RunError):
    """Numbers that became NaN or infinite."""

    exit_code = 76
