"""B17, B22: two real processes agree, stop together, and notice when the other is gone."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import runs

from m6jax import configuration
from m6jax.experiment.model_dir import MACROS
from m6jax.optimizers.schedules import WarmupStableDecay

WORKER = pathlib.Path(__file__).with_name("looping_process.py")
ROOT = WORKER.parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}


def free_address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start(*commands):
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]


def looping(what="step", timeout=4):
    address = free_address()
    return start(*([WORKER, i, address, timeout, what] for i in (0, 1)))


def until_step(process, step):
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1]) >= step:
            return
    raise AssertionError("it ended before")


def finish(processes):
    try:
        return [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_signal_to_one_stops_both_after_the_same_step():
    processes = looping()
    until_step(processes[0], 5)
    processes[1].send_signal(signal.SIGTERM)
    outputs = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    stops = [re.search(r"stopped by SIGTERM after (\d+)", output)[1] for output in outputs]
    assert stops[0] == stops[1]


@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_of_a_killed_process_ends_with_1_and_names_it(killed):
    processes = looping()
    until_step(processes[1 - killed], 5)
    processes[killed].kill()
    outputs = finish(processes)
    assert processes[1 - killed].returncode == 1, outputs
    last = outputs[1 - killed].splitlines()[-1]
    assert re.search(rf"process {killed} of 2 .*; it was at step \d+\. Nothing more", last), outputs


def test_a_process_that_hangs_is_named_and_ends_both():
    processes = looping("sleep", timeout=3)
    outputs = finish(processes)
    assert [process.returncode for process in processes] == [1, 1], outputs
    expected = "process 1 of 2 does not go on since 3 s; it was at step 20"
    assert any(expected in output for output in outputs), outputs


def test_a_second_signal_ends_at_once():
    processes = looping(timeout=60)
    until_step(processes[1], 5)
    processes[0].send_signal(signal.SIGSTOP)  # so that the other waits for it
    for _ in range(50):  # signals of one kind that are not taken yet count once
        if processes[1].poll() is None:
            processes[1].send_signal(signal.SIGTERM)
            time.sleep(0.1)
    assert processes[1].wait(timeout=30) == 128 + signal.SIGTERM
    processes[0].send_signal(signal.SIGKILL)
    finish(processes)


def test_differing_settings_stop_both_and_are_printed_once(text, tmp_path):
    address, commands = free_address(), []
    for i, peak in enumerate((0.01, 0.5)):
        schedule = WarmupStableDecay(peak=peak, total_steps=runs.STEPS, warmup_steps=1)
        run = runs.experiment(text, tmp_path / "run", schedule=schedule)
        config = tmp_path / f"{i}.gin"
        config.write_text(configuration.to_gin(run, macros=MACROS), encoding="utf-8")
        flags = [f"--coordinator_address={address}", "--num_processes=2", f"--process_id={i}"]
        commands.append(["-m", "m6jax.main", f"--gin_file={config}", *flags])
    processes = start(*commands)
    outputs = finish(processes)
    assert [process.returncode for process in processes] == [2, 2], outputs
    expected = "Experiment.schedule.peak: 0.01 in process 0; 0.5 in process 1"
    assert "".join(outputs).count(expected) == 1, outputs
    assert not (tmp_path / "run").exists()
