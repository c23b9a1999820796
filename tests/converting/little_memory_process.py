"""Converts checkpoints of 8 layers with two matrices of 20 MiB each: DIRECTORY.

Prints, for each change, the bytes of memory that it took beyond what the process held after a tiny
checkpoint had gone the same way (that is: imports, devices, compiled programs, threads), and the
bytes that it wrote.
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import models
import numpy as np
import runs

from m6jax.checkpointing import Checkpoints, Streamed
from m6jax.converting.conversion import convert
from m6jax.converting.settings import Conversion, LayoutChange
from m6jax.converting.source_checkpoint import expected_state
from m6jax.experiment import Stage
from m6jax.layouts import Form
from m6jax.optimizers import Adafactor
from m6jax.pseudo_to_real.delinking import Policy

DEPTH = 8
LARGE = models.tiny(
    num_layers=DEPTH, embed_dim=128, mlp_dim=1024, moe=models.experts(num_experts=40)
)
TINY = models.tiny(num_layers=DEPTH)
PSEUDO = Stage(name="pseudo", unit=1, optimizer_state=Policy.COPY)
REAL = Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.COPY)


def experiment(model, stage, directory):
    return runs.experiment(
        pathlib.Path("/nowhere"), directory, model=model, stages=(stage,), optimizer=Adafactor()
    )


def make(model, directory):
    """Writes a Pseudo Giant's checkpoint piece by piece, every leaf filled with sevens."""
    run = experiment(model, PSEUDO, directory)
    lies = run.layout(0)

    def leaf(described):
        shape, dtype = described.shape, np.dtype(described.dtype)
        piece = (1, shape[1] // 4, -(-shape[2] // 4), shape[3]) if len(shape) == 4 else shape

        def read(index):
            return np.full([part.stop - part.start for part in index], 7, dtype)

        return Streamed(shape, dtype, piece, read)

    state = jax.tree.map(leaf, expected_state(run, lies))
    description = {"stage": 0, "stage_name": "pseudo", "layout": lies.to_json()}
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {}, description, wait=True)


def memory(name):
    """A number of /proc/self/status in bytes: VmRSS, or VmHWM for the most so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def forget_the_most():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def there_and_back(model, directory):
    """Converts a Pseudo Giant to a Real one and back; returns (bytes held, bytes written)."""
    make(model, directory / "pseudo")
    found = []
    for change, stage, source, target in (
        (LayoutChange.DELINK, REAL, "pseudo", "real"),
        (LayoutChange.LINK, PSEUDO, "real", "again"),
    ):
        forget_the_most()
        before = memory("VmRSS")
        run = experiment(model, stage, directory / target)
        conversion = Conversion(source=str(directory / source), average=True)
        report = convert(run, conversion, change)
        found.append((memory("VmHWM") - before, report.nbytes))
    return found


def main():
    directory = pathlib.Path(sys.argv[1])
    there_and_back(TINY, directory / "tiny")
    for held, written in there_and_back(LARGE, directory / "large"):
        print(held, written)


main()
