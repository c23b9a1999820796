"""Starts several processes of one run on this machine, and all of them again when one is lost.

    python launch/local.py --processes=2 -- --gin_file=configs/quickstart.gin

What stands after `--` goes to each process as it is. With --devices each gets so many emulated CPU
devices; without, what the environment shows it. Each line of output begins with the number of its
process. The launcher passes SIGTERM and Ctrl-C on, waits for all, and ends with their exit code.

With --restarts=K a run of which a process is lost (any exit code but 0, 2, 75 and 76) is started
again, up to K times, unless it was asked to stop; with --elastic with one process less each time,
on the same devices in all if --devices was given: a batch is the same rows whatever the number of
processes.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

FINISHED, LOST, BAD_CONFIGURATION, PREEMPTED, NOT_FINITE = 0, 1, 2, 75, 76


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N")
    parser.add_argument("--devices", type=int, metavar="D", help="emulated CPU devices in all")
    parser.add_argument("--restarts", type=int, default=0, metavar="K")
    parser.add_argument("--elastic", action="store_true", help="one process less each time")
    parser.add_argument("command", nargs="+", metavar="FLAG", help="of m6jax, after --")
    options = parser.parse_args(arguments)
    number = options.processes
    for restart in range(options.restarts + 1):
        processes = Processes(options.command, number, options.devices)
        code = processes.wait()
        if is_over(code) or processes.asked_to_stop or restart == options.restarts:
            break
        if options.elastic:
            number = fewer(number, options.devices)
        print(f"launch   a process was lost; starting again with {number}", flush=True)
    return code


def is_over(code: int) -> bool:
    """Whether starting a run again that ended with this code would not help, or is not wanted."""
    return code in (FINISHED, BAD_CONFIGURATION, PREEMPTED, NOT_FINITE)


def fewer(number: int, devices: int | None) -> int:
    """Returns the next smaller number of processes over which the devices can be spread evenly."""
    smaller = range(number - 1, 0, -1)
    return next((n for n in smaller if devices is None or devices % n == 0), 1)


class Processes:
    """The processes of one run.

    Attributes:
      asked_to_stop: whether the launcher got a signal.
    """

    def __init__(self, flags: Sequence[str], number: int, devices: int | None):
        """Starts them.

        Args:
          flags: of m6jax.
          number: of processes.
          devices: emulated CPU devices in all; None: the environment's.
        """
        self.asked_to_stop = False
        if devices is not None and devices % number:
            raise SystemExit(
                f"--devices: {devices} devices do not spread evenly over {number} processes"
            )
        environment = dict(os.environ)
        if devices is not None:
            own = f"--xla_force_host_platform_device_count={devices // number}"
            environment["JAX_PLATFORMS"] = "cpu"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {own}"
        address = f"localhost:{free_port()}"
        group = [f"--coordinator_address={address}", f"--num_processes={number}"]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-u", "-m", "m6jax.main", *flags, *group, f"--process_id={i}"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # else a terminal's Ctrl-C would come twice
            )
            for i in range(number)
        ]
        self._prints = [
            threading.Thread(target=self._print, args=(i,), daemon=True) for i in range(number)
        ]
        for thread in self._prints:
            thread.start()
        for wanted in (signal.SIGTERM, signal.SIGINT):
            signal.signal(wanted, self._pass_on)

    def wait(self) -> int:
        """Waits for all; returns the code that all ended with, LOST where they did not."""
        codes = {process.wait() for process in self._processes}
        for thread in self._prints:
            thread.join()
        code = codes.pop()
        return code if not codes and code >= 0 else LOST  # below 0: killed by a signal

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.asked_to_stop = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _print(self, i: int) -> None:
        stream = self._processes[i].stdout
        assert stream is not None
        for line in stream:
            sys.stdout.buffer.write(b"%d| %s" % (i, line))
            sys.stdout.buffer.flush()


def free_port() -> int:
    """Returns a port that nobody listens on at the moment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
