"""How processes are started: flags, launchers, and the errors of both."""

import pytest

from m6jax import processes
from m6jax.foundation.validated import ConfigError
from m6jax.processes import launchers


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    names = [*launchers._COUNTS.values(), *launchers._HOSTS.values(), "JOB_COMPLETION_INDEX"]
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "--num_processes, --process_id: needed beside"),
        (("localhost:1", 2, 2), r"--process_id: 2 is not in 0 \.\.\. 1"),
        (("localhost:1", 0, 0), "--num_processes: 0; at least 1"),
        (("localhost", 2, 0), "'localhost' is not HOST:PORT"),
    ],
)
def test_flags_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        processes.start(*given)


def test_a_time_that_cannot_be():
    with pytest.raises(ConfigError, match="--process_timeout: 0 s"):
        processes.start(timeout=0)


def test_one_process_initialises_nothing():
    assert processes.start().count == 1
    assert processes.start(num_processes=1).count == 1
    assert processes.current().index == 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM says that there are 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI says that there are 2"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "a TPU pod has 2 hosts"),
        ({"JOB_COMPLETION_INDEX": "0"}, r"m6jax\[k8s\]"),
    ],
)
def test_a_launcher_of_several_is_an_error_where_none_was_initialised(
    environment, message, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        processes.start()
    assert processes.start(num_processes=1).count == 1


def test_launchers_of_one_are_none():
    launchers.refuse_unconnected({"SLURM_NTASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"})


def test_a_group_of_one_ends_with_its_message(capsys):
    assert processes.Group().end(2, "what is wrong") == 2
    assert capsys.readouterr().err == "what is wrong\n"


def test_processes_that_do_not_find_each_other(monkeypatch):
    def never(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: not all came\nmore lines")

    monkeypatch.setattr(launchers.jax.distributed, "initialize", never)
    message = (
        r"cannot find each other at localhost:1 within 5 s \(DEADLINE_EXCEEDED: not all came\)"
    )
    with pytest.raises(ConfigError, match=message):
        processes.start("localhost:1", 2, 1, connect_seconds=5)
