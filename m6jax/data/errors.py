"""The one error of wrong data."""

from m6jax.foundation.validated import ConfigError


class DataError(ConfigError):
    """Data that cannot be used as configured: the message names the file or source, and what to do.

    A kind of `ConfigError`, so the command line ends with one line and exit code 2.
    """
