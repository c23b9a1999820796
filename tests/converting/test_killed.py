"""A conversion that is killed leaves no checkpoint, and can be done again."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import source_runs
from source_runs import STEP, experiment, layout

from m6jax.checkpointing import Checkpoints
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.pseudo_to_real.delinking import Policy

WORKER = pathlib.Path(__file__).with_name("slow_conversion_process.py")
ROOT = WORKER.parents[2]


def files(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_killed_in_the_middle(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    run = experiment(target)
    state = source_runs.make_state(run, layout(1))
    source_runs.save(source, state, layout(1))
    before = files(source)

    with subprocess.Popen(
        [sys.executable, WORKER, source, target],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "in the middle\n"
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
    time.sleep(0.1)

    assert files(target), "it had begun to write"
    assert files(source) == before
    with Checkpoints(target / "checkpoints") as checkpoints:
        assert checkpoints.steps() == []
        assert checkpoints.latest() is None

    convert(run, Conversion(source=str(source)), LayoutChange.DELINK)

    expected = source_runs.delinked(state, layout(1), run.layout(0), Policy.COPY)
    source_runs.assert_same(source_runs.load(target), expected)
    assert [path.name for path in (target / "checkpoints").iterdir()] == [str(STEP)]
