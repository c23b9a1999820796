"""A conversion's memory does not grow with the model: less than two layers' parts of a leaf."""

import os
import pathlib
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("little_memory_process.py")
ROOT = WORKER.parents[2]
SLICE = 20 * 2**20  # float32[40, 128, 1024]: one layer of the largest leaf
DEPTH = 8


def test_memory_is_bounded_by_a_layers_part_of_a_leaf(tmp_path):
    result = subprocess.run(
        [sys.executable, WORKER, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (delink, written), (link, written_back) = (
        map(int, line.split()) for line in result.stdout.splitlines()
    )
    # Two matrices of parameters; Adafactor's moments are small.
    assert 2 * DEPTH * SLICE < written < 2.2 * DEPTH * SLICE
    assert 2 * SLICE < written_back < 2.2 * SLICE
    assert delink < 2 * SLICE
    assert link < 2 * SLICE
