"""Two processes of four devices train like one process of eight."""

import os
import pathlib
import socket
import subprocess
import sys

import models
import numpy as np
import pytest
import three_steps_process

WORKER = pathlib.Path(three_steps_process.__file__)
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{WORKER.parents[2]}:{WORKER.parents[1]}"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory, quick_flags):
    """Where two processes have left what they computed."""
    directory = tmp_path_factory.mktemp("results")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(process), address, directory],
            env=os.environ | ENVIRONMENT | {"XLA_FLAGS": " ".join((FOUR_DEVICES, *quick_flags))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return directory


@pytest.mark.parametrize("name", three_steps_process.MESHES)
def test_two_processes_equal_one(name, directory):
    """Loss and norm of three steps, and the parameters after them, to 1e-5."""
    with np.load(directory / f"{name}.npz") as file:
        got = dict(file)
    expected = three_steps_process.run(three_steps_process.MESHES[name])
    models.assert_close(got, expected, 1e-5)
    assert expected["total_loss"][2] < expected["total_loss"][0]
    assert (expected["grad_norm"] > 0.5).all()  # clipped
