"""One directory, one run: who writes a MODEL_DIR holds the lock in it.

`MODEL_DIR/lock.json` names its holder, who writes it again every ten seconds:

    {"host": "node7", "process": 4711, "since": "2026-05-01 09:30:12 UTC", "beats": 12, ...}

A run that finds it refuses to start if the holder lives, and takes it over if the holder is gone.
On the holder's own machine that is known at once: the process is there or not. Elsewhere clocks are
not trusted; the newcomer watches the file, which a holder that lives changes within ten seconds:

    0 s    beats 12        it is there
    9 s    beats 13        it lives: refused
    or
    120 s  beats 12        it is gone: taken over

On a disk the file is created exclusively. An object store (`gs://`) knows no such thing: there the
newcomer writes its name, waits, and reads it back. Two that find no lock at the same time, of which
one is held up between reading and writing for longer than the wait, can then both begin; the first
one sees the other's name at its next beat and ends before it saves again.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from etils import epath

from m6jax.checkpointing import CheckpointError
from m6jax.foundation.validated import ConfigError
from m6jax.foundation.whole_files import write_whole

FILE = "lock.json"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Times:
    """How long things take, in seconds.

    Attributes:
      beat: between two signs of life of a holder.
      lease: without a sign of life, after which a holder elsewhere counts as gone.
      settle: between writing to an object store and reading back.
      poll: between two looks at another's lock.
    """

    beat: float = 10.0
    lease: float = 120.0
    settle: float = 2.0
    poll: float = 1.0


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
      host: name of the machine.
      process: number of the process.
      since: when it took the lock, for people.
      machine: what numbers of processes mean something in: host, its boot, space of processes.
      born: when the process began, in the machine's own count; None where that is not known.
      token: of this lock alone.
      beats: signs of life.
    """

    host: str
    process: int
    since: str
    machine: str
    born: str | None
    token: str
    beats: int = 0

    @classmethod
    def here(cls) -> "Holder":
        """Returns this process as the holder of a new lock."""
        now = datetime.datetime.now(datetime.UTC)
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            since=f"{now:%Y-%m-%d %H:%M:%S} UTC",
            machine=_machine(),
            born=_born(os.getpid()),
            token=secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        """Returns what a lock says; None if it is not written yet, or is no lock."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def gone(self) -> bool | None:
        """Returns whether the process has ended; None where that cannot be seen from here."""
        if self.machine != _machine() or self.born is None:
            return None
        return _born(self.process) != self.born

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host} since {self.since}"


class Lock:
    """Context in which this process alone writes a directory."""

    def __init__(
        self, directory: epath.PathLike, *, enabled: bool = True, times: Times | None = None
    ):
        """Takes nothing yet.

        Args:
          directory: a local or a network path, which need not exist.
          enabled: False on all processes but the first, for which it holds the lock: nothing is
            done.
          times: how long things take.
        """
        self._enabled = enabled
        self._directory = epath.Path(directory)
        self._path = self._directory / FILE
        self._local = "://" not in str(self._path)
        self._times = times or Times()
        self._own = Holder.here()
        self._lost: str | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="m6jax lock", daemon=True)

    def __enter__(self) -> "Lock":
        """Takes the lock; raises ConfigError if someone who lives holds it."""
        if not self._enabled:
            return self
        self._made = not self._directory.exists()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ConfigError(
                f"MODEL_DIR: {self._directory} cannot be written ({error.strerror or error});"
                " choose another directory"
            ) from error
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the lock back, and removes a directory that holds nothing else."""
        if not self._enabled:
            return
        self._done.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the directory may be gone, or its disk
            if self._is_own(self._read()):
                self._path.unlink(missing_ok=True)
            if self._made and self._local:
                os.rmdir(self._directory)  # of what holds something it leaves all

    def require(self) -> None:
        """Raises CheckpointError if this process has lost the lock: another one may write now."""
        if self._lost is not None:
            raise CheckpointError(
                f"{self._path} {self._lost}; nothing more is written, and the newest checkpoint is"
                " as it was"
            )

    def _acquire(self) -> None:
        """Returns when the lock is this process's; raises ConfigError if it is another's."""
        watched: str | None = None
        since = time.monotonic()
        while not self._create():
            seen = self._read()
            if seen is None:
                continue  # given back at this moment
            holder = Holder.parse(seen)
            gone = holder.gone() if holder else None
            changed = watched is not None and seen != watched
            if holder is not None and (gone is False or (changed and not gone)):
                raise ConfigError(
                    f"MODEL_DIR: {self._directory} is used by {holder} (stop that run, or choose"
                    f" another directory)"
                )
            if gone or (not changed and time.monotonic() - since > self._times.lease):
                logger.warning("taking over from a run that is gone: %s", holder or self._path)
                if self._take_over(seen):
                    return
                continue
            if watched is None:
                logger.warning(
                    "%s is held by %s; waiting up to %g s for a sign of life",
                    *(self._path, holder or "someone", self._times.lease),
                )
            watched = seen
            time.sleep(self._times.poll)

    def _create(self) -> bool:
        """Makes the lock this process's; False if there is one."""
        if self._local:
            try:
                file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                return False
            with os.fdopen(file, "wb") as stream:
                stream.write(self._content())
            return True
        if self._path.exists():
            return False
        return self._write_and_read_back()

    def _take_over(self, seen: str) -> bool:
        """Writes this process's name in the place of one that is gone; False if it has changed."""
        if not self._local:
            return self._read() == seen and self._write_and_read_back()
        try:
            with open(self._path, "r+b") as file:
                # Of several that do this the first one changes the file for the others. A disk of
                # several hosts that knows no such lock lets the last one win.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                if file.read() != seen.encode():
                    return False
                file.seek(0)
                file.write(self._content())
                file.truncate()
        except FileNotFoundError:
            return False
        return True

    def _write_and_read_back(self) -> bool:
        write_whole(self._path, self._content())
        time.sleep(self._times.settle)
        return self._is_own(self._read())

    def _live(self) -> None:
        """Gives signs of life until the lock is given back or lost."""
        said = ""
        while not self._done.wait(self._times.beat):
            try:
                seen = self._read()
                if not self._is_own(seen):
                    by = Holder.parse(seen or "")
                    self._lost = f"was taken over by {by}" if by else "was removed"
                    return
                self._own = dataclasses.replace(self._own, beats=self._own.beats + 1)
                write_whole(self._path, self._content())
            except Exception as error:  # of any library that reaches the network
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s cannot be written: %s", self._path, error)

    def _read(self) -> str | None:
        """Returns what the lock says, None if there is none."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None
        except Exception:
            if self._path.exists():
                raise
            return None  # object stores have errors of their own

    def _content(self) -> bytes:
        return json.dumps(dataclasses.asdict(self._own)).encode() + b"\n"

    def _is_own(self, text: str | None) -> bool:
        holder = Holder.parse(text or "")
        return holder is not None and holder.token == self._own.token


def _machine() -> str:
    """Returns where numbers of processes are unique: a host between two boots, or a container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # no Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _born(process: int) -> str | None:
    """Returns when a process of this machine began; None if it has ended, or that is not known."""
    try:
        # "PID (name) STATE ...", where a name may hold anything.
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else numbers[18]  # waiting to be forgotten
