"""Starts a run on the machines of a Ray cluster, one process on each; see kuberay.yaml.

    python launch/on_ray.py --hosts=2 --gpus=8 -- --gin_file=configs/quickstart.gin

What stands after `--` goes to each process as it is. Ray places them, one to a machine with all of
its GPUs or TPUs; how they find each other m6jax is told by its three flags. SIGTERM and Ctrl-C are
passed on, and the exit code is the one with which all ended. A run of which a process or a machine
is lost is started again, up to --restarts times, once Ray has as many machines as are asked for.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ray
from local import FINISHED, LOST, free_port, is_over
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, required=True, metavar="N")
    parser.add_argument("--gpus", type=int, default=0, metavar="G", help="of each machine")
    parser.add_argument("--tpus", type=int, default=0, metavar="T", help="chips of each machine")
    parser.add_argument("--cpus", type=int, default=1, metavar="C", help="of each machine")
    parser.add_argument("--restarts", type=int, default=0, metavar="K")
    parser.add_argument("command", nargs="+", metavar="FLAG", help="of m6jax, after --")
    options = parser.parse_args(arguments)
    needs = {"CPU": options.cpus, "GPU": options.gpus, "TPU": options.tpus}
    needs = {name: number for name, number in needs.items() if number}
    ray.init()
    code = FINISHED
    for restart in range(options.restarts + 1):
        code = run(options.command, options.hosts, needs)
        if is_over(code) or restart == options.restarts:
            break
        print("launch   a process was lost; starting again", flush=True)
    return code


def run(flags: Sequence[str], number: int, needs: dict[str, int]) -> int:
    """Runs one process on each of so many machines; returns the code that all ended with, or 1."""
    group = placement_group([needs] * number, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    try:
        hosts = [start_on(group, i, needs) for i in range(number)]
        address = ray.get(hosts[0].address.remote())
        told = [f"--coordinator_address={address}", f"--num_processes={number}"]
        ends = [
            host.run.remote([*flags, *told, f"--process_id={i}"]) for i, host in enumerate(hosts)
        ]

        def pass_on(wanted: int, frame: FrameType | None) -> None:
            del frame
            for host in hosts:
                host.send.remote(wanted)

        for wanted in (signal.SIGTERM, signal.SIGINT):
            signal.signal(wanted, pass_on)
        codes = {code_of(end) for end in ends}
    finally:
        remove_placement_group(group)
    code = codes.pop()
    return code if not codes and code >= 0 else LOST  # below 0: killed by a signal


def start_on(group: Any, i: int, needs: dict[str, int]) -> Any:
    """Returns the actor on machine `i`; it takes a signal while its process runs."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
    others = {name: number for name, number in needs.items() if name not in ("CPU", "GPU")}
    actor = ray.remote(Host).options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        resources=others,
        scheduling_strategy=place,
        max_concurrency=2,
    )
    return actor.remote()


def code_of(end: Any) -> int:
    """Returns the exit code of a process; LOST where its machine is gone."""
    try:
        return int(ray.get(end))
    except ray.exceptions.RayActorError:
        return LOST


class Host:
    """One machine: runs one process, and passes signals on to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Returns where the first process can listen for the others."""
        return f"{socket.gethostbyname(socket.gethostname())}:{free_port()}"

    def run(self, flags: Sequence[str]) -> int:
        """Runs m6jax and returns its exit code."""
        command = [sys.executable, "-u", "-m", "m6jax.main", *flags]
        self._process = subprocess.Popen(command, env=dict(os.environ))
        return self._process.wait()

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
