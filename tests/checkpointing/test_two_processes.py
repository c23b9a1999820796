import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np

from m6jax.checkpointing import Checkpoints

WORKER = pathlib.Path(__file__).with_name("one_of_two_processes.py")
ROOT = WORKER.parents[2]


def start(directory, scenario):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, WORKER, str(process), address, directory, scenario],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in (0, 1)
    ]


def finish(processes):
    try:
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_processes_save_and_one_restores_and_both_see_damage(tmp_path):
    processes = start(tmp_path, "damage")
    outputs = finish(processes)

    assert [process.returncode for process in processes] == [0, 0], outputs
    assert re.search(
        rf"checkpoint 2: {tmp_path}/2/state/\S+ is damaged: it has 10 bytes", outputs[0]
    )
    assert "checkpoint 2: process 0 cannot read it" in outputs[1]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3]
        assert checkpoints.restore_data_state(3) == {"position": 3}
        restored = checkpoints.restore(3, checkpoints.metadata(3))
    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    np.testing.assert_array_equal(restored["weight"], weight + 2)
    np.testing.assert_array_equal(restored["moment"], weight + 2.5)
    assert restored["count"] == 5


def test_process_that_never_comes_is_named_in_time(tmp_path):
    processes = start(tmp_path, "sleep")
    output = processes[0].communicate(timeout=120)[0]
    processes[1].kill()
    finish(processes[1:])

    assert processes[0].returncode == 3
    assert "process 1 did not arrive at save 1 of step 1 within 4 s" in output
