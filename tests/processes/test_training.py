"""B10, B17: one of two processes is killed, a second run is refused, the launcher goes on with one.

That losses are those of one process is held by `benchmarks/several_processes.py`.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import models
import runs

from m6jax import configuration, main
from m6jax.checkpointing import Checkpoints
from m6jax.experiment import Stage
from m6jax.experiment.lock import FILE, Holder
from m6jax.experiment.model_dir import MACROS
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.reporting.writers import read_records

ROOT = pathlib.Path(__file__).parents[2]


def launch(config, caches, quick_flags, *flags):
    environment = {
        "XDG_CACHE_HOME": str(caches),
        "JAX_COMPILATION_CACHE_DIR": str(caches / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": " ".join(quick_flags),
    }
    launcher = [sys.executable, str(ROOT / "launch" / "local.py"), "--devices=2", *flags]
    return subprocess.Popen(
        [*launcher, "--", f"--gin_file={config}"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(lines, beginning):
    for line in lines:
        if re.match(beginning, line):
            return
    raise AssertionError(f"no line begins with {beginning}")


def end_of_data(directory):
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.restore_data_state(checkpoints.latest())


def data_after(run, steps):
    """Where the data of one process stands after so many steps."""
    rows = run.data.train_rows()
    for _ in range(steps):
        rows.take(run.batch_size)
    state = rows.state()
    rows.close()
    return state


def test_a_killed_process_a_second_run_and_one_that_goes_on(
    text, caches, tmp_path, quick_flags, capsys
):
    changes = {
        "model": models.tiny(vocab_size=runs.VOCABULARY, moe=None, pattern=("DENSE",)),
        "stages": (runs.stages()[0], Stage(name="real", optimizer_state=Policy.COPY)),
        "sample": None,
        "save_every": 100,
    }
    directory = tmp_path / "several"
    config = tmp_path / "config.gin"
    run = runs.experiment(text, directory, **changes)
    config.write_text(configuration.to_gin(run, macros=MACROS), encoding="utf-8")
    again = ("--processes=2", "--restarts=1", "--elastic")
    with launch(config, caches, quick_flags, *again) as launcher:
        watchdog = threading.Timer(240, launcher.kill)
        watchdog.start()
        try:
            until(launcher.stdout, r"0\| delink   step 4")
            holder = Holder.parse((directory / FILE).read_text(encoding="utf-8"))
            os.kill(holder.process, signal.SIGSTOP)  # before the first step after the delink
            capsys.readouterr()
            assert main.main([f"--gin_file={config}"]) == main.EXIT_BAD_CONFIGURATION
            said = capsys.readouterr().err
            assert f"MODEL_DIR: {directory} is used by {holder} (stop that run" in said
            os.kill(holder.process, signal.SIGKILL)
            until(launcher.stdout, r"launch   a process was lost; starting again with 1")
            until(launcher.stdout, r"0\| m6jax: taking over from a run that is gone: process")
            until(launcher.stdout, r"0\| resume   step 4, stage pseudo")
            rest = launcher.stdout.read()
        finally:
            watchdog.cancel()
    assert launcher.returncode == 0, rest

    records = read_records(directory)
    steps = [r["step"] for r in records if r["split"] == "train"]
    assert steps == list(range(1, runs.STEPS + 1))
    keys = [(r["step"], r["stage"], r["split"]) for r in records]
    assert len(set(keys)) == len(keys)
    assert end_of_data(directory) == data_after(run, runs.STEPS)
    assert not (directory / FILE).exists()
