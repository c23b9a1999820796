"""What processes write for each other to read: the key-value store that jax's coordinator keeps.

It lives in the first process and works whatever the devices do, so it can be asked while a step
waits for a process that will never come.
"""

import itertools
from typing import Any

import jax

_DIRECTORY = "m6jax"


class StoreError(RuntimeError):
    """The store does not answer, or not all processes came in time."""


class Store:
    """Keys and values, both strings, seen by all processes.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client = client
        self.index = index
        self.count = count
        self._meetings = itertools.count()

    def put(self, key: str, value: str) -> None:
        """Writes a value, over an older one; raises StoreError."""
        try:
            self._client.key_value_set(f"{_DIRECTORY}/{key}", value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error)) from error

    def read(self, directory: str) -> dict[str, str]:
        """Returns what there is under `directory`, by the rest of the key; raises StoreError."""
        start = f"{_DIRECTORY}/{directory}/"
        try:
            found = self._client.key_value_dir_get(start)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise StoreError(str(error)) from error
        return {key.removeprefix(start): value for key, value in found}

    def gather(self, value: str, timeout_seconds: float) -> list[str]:
        """Returns the values that all processes give, in the order of their numbers.

        Must be called by all of them, as often by each.

        Raises:
          StoreError: not all came in time.
        """
        place = f"gathered/{next(self._meetings)}"
        self.put(f"{place}/{self.index}", value)
        try:
            self._client.wait_at_barrier(f"{_DIRECTORY}/{place}", int(1000 * timeout_seconds))
        except jax.errors.JaxRuntimeError as error:
            raise StoreError(str(error)) from error
        found = self.read(place)
        return [found[str(i)] for i in range(self.count)]
