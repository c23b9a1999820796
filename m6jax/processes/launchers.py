"""Who starts the processes, and how they find each other.

A launcher starts the same command on every host. jax knows most of them (TPU pods, SLURM, Open MPI,
Kubernetes with the extra `k8s`) and finds out the coordinator's address, the number of processes
and the own number; elsewhere three flags say so. Without either there is one process, and nothing
is initialised. What must not be is a launcher that starts several processes of which each believes
to be alone: they would train the same thing into one directory.
"""

import os
from collections.abc import Mapping

import jax

from m6jax.foundation.validated import ConfigError
from m6jax.processes.group import DEFAULT_TIMEOUT, Group, join

FLAGS = ("coordinator_address", "num_processes", "process_id")
_WAY_OUT = (
    "give --coordinator_address, --num_processes and --process_id, or --num_processes=1 if this"
    " process is meant to work alone"
)
# How many processes a launcher says it has started, in the environment of each.
_COUNTS = {
    "SLURM": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPI": "PMI_SIZE",
    "torchrun": "WORLD_SIZE",
    "TPU slices": "MEGASCALE_NUM_SLICES",
}
_HOSTS = {"a TPU pod": "TPU_WORKER_HOSTNAMES", "a pod of TPUs": "TPU_PROCESS_ADDRESSES"}
_KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
# jax's own heartbeat comes after the watch's, which can say more.
_HEARTBEAT_MARGIN = 10
_CONNECT_SECONDS = 300


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    connect_seconds: int = _CONNECT_SECONDS,
) -> Group:
    """Connects this process with the others; to be called before jax looks for devices.

    Args:
      coordinator_address: HOST:PORT on which the first process listens; None: as the launcher says.
      num_processes: how many there are; 1: this process works alone, whatever a launcher says.
      process_id: number of this process, from 0.
      timeout: seconds without a sign of life after which a process counts as lost.
      connect_seconds: how long to wait for all processes to be there.

    Raises:
      ConfigError: only some of the three are given, they cannot be, a launcher says that there are
        several processes but not how they find each other, or they do not.
    """
    if timeout < 1:
        raise ConfigError(f"--process_timeout: {timeout:g} s; at least 1 is needed")
    given = dict(zip(FLAGS, (coordinator_address, num_processes, process_id), strict=True))
    named = any(value is not None for value in given.values())
    if num_processes == 1:
        return join(timeout)
    if named:
        _check_flags(given)
    elif _detected() <= 1:
        refuse_unconnected(os.environ)
        return join(timeout)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if named else None,
            initialization_timeout=connect_seconds,
            heartbeat_timeout_seconds=int(timeout) + _HEARTBEAT_MARGIN,
        )
    except (RuntimeError, ValueError) as error:  # jax's errors of its runtime among them
        raise ConfigError(
            f"the processes cannot find each other"
            f"{f' at {coordinator_address}' if coordinator_address else ''} within"
            f" {connect_seconds} s ({str(error).splitlines()[0]}); see that all are started, and"
            f" that all reach the first one"
        ) from error
    return join(timeout)


def refuse_unconnected(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where a launcher says that there are several processes."""
    for launcher, name in _COUNTS.items():
        count = environment.get(name, "")
        if count.isdigit() and int(count) > 1:
            raise ConfigError(
                f"{launcher} says that there are {count} processes ({name}={count}), but not how"
                f" they find each other ({_WAY_OUT})"
            )
    for launcher, name in _HOSTS.items():
        hosts = environment.get(name, "").split(",")
        if len(hosts) > 1:
            raise ConfigError(
                f"{launcher} has {len(hosts)} hosts ({name}), but they are not connected"
                f" ({_WAY_OUT})"
            )
    if _KUBERNETES_INDEX in environment:
        raise ConfigError(
            f"Kubernetes runs this as one of the processes of a job ({_KUBERNETES_INDEX}="
            f"{environment[_KUBERNETES_INDEX]}), and how many there are is not known (install"
            f" m6jax[k8s], or {_WAY_OUT})"
        )


def _check_flags(given: Mapping[str, str | int | None]) -> None:
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing:
        there = [f"--{name}" for name, value in given.items() if value is not None]
        raise ConfigError(
            f"{', '.join(missing)}: needed beside {', '.join(there)} (or none of them, where the"
            " launcher is one that jax knows)"
        )
    count, own = given["num_processes"], given["process_id"]
    assert isinstance(count, int)
    assert isinstance(own, int)
    if count < 1:
        raise ConfigError(f"--num_processes: {count}; at least 1 is needed")
    if not 0 <= own < count:
        raise ConfigError(f"--process_id: {own} is not in 0 ... {count - 1}")
    host, _, port = str(given["coordinator_address"]).rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--coordinator_address: {given['coordinator_address']!r} is not HOST:PORT"
        )


def _detected() -> int:
    """Returns how many processes the launcher has started, as far as jax can find out."""
    # What jax.distributed.initialize asks; it cannot be asked without initialising.
    from jax._src.clusters import ClusterEnv

    if "KUBERNETES_SERVICE_HOST" in os.environ and _KUBERNETES_INDEX not in os.environ:
        return 1  # a pod that is no part of an indexed job; jax would look for its job in vain
    for cluster in ClusterEnv._cluster_types:
        if not cluster.opt_in_only_method and cluster.is_env_present():
            return int(cluster.get_process_count())
    return 1
