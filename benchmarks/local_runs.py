"""Small runs on this machine, in processes of their own: started, watched, killed, compared.

What is trained has two layers of experts, a delink in the middle, text and pictures. Programs and
vocabularies are kept from one run to the next, so that a start costs seconds.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from m6jax.checkpointing import Checkpoints
from m6jax.reporting.writers import read_records

ROOT = pathlib.Path(__file__).parents[1]
LINES = (
    "the ship sailed at noon and the captain said nothing",
    "nothing was seen of the whale but the sea was calm",
    "the captain saw the whale at noon and the ship turned",
    "calm was the sea and nothing sailed but the ship",
)
GIN = """
from __gin__ import dynamic_registration
from m6jax import data
from m6jax import experiment
from m6jax import modeling
from m6jax import optimizers
from m6jax import pseudo_to_real

experiment.Experiment.model = @modeling.ModelConfig()
modeling.ModelConfig.vocab_size = 320
modeling.ModelConfig.num_layers = 2
modeling.ModelConfig.embed_dim = 16
modeling.ModelConfig.num_heads = 2
modeling.ModelConfig.mlp_dim = 32
modeling.ModelConfig.patch_dim = 48
modeling.ModelConfig.dtype = 'float32'
modeling.ModelConfig.dropout = 0.1
modeling.ModelConfig.moe = @modeling.MoEConfig()
modeling.MoEConfig.num_experts = 4

experiment.Experiment.data = @data.TextData()
data.TextData.sources = (@data.BuiltinPictures(), @data.TextFiles())
data.BuiltinPictures.name = 'fashion'
data.TextFiles.train = '{text}'
data.TextData.rates = (1.0, 1.0)
data.TextData.length = 32
data.TextData.vocabulary = @data.SentencePiece()
data.SentencePiece.size = 320
data.TextData.pictures = @data.Pictures()
data.Pictures.grid = (2, 2)
data.Pictures.patch_size = 4

experiment.Experiment.model_dir = '{model_dir}'
experiment.Experiment.steps = {steps}
experiment.Experiment.batch_size = 8
experiment.Experiment.log_every = 1
experiment.Experiment.eval_every = 1000
experiment.Experiment.save_every = {save_every}
experiment.Experiment.sample = None
experiment.Experiment.schedule = @optimizers.Constant()
optimizers.Constant.peak = 1e-3
experiment.Experiment.stages = (@pseudo/experiment.Stage(), @real/experiment.Stage())
pseudo/experiment.Stage.name = 'pseudo'
pseudo/experiment.Stage.unit = 1
pseudo/experiment.Stage.until = @pseudo_to_real.AtStep()
pseudo_to_real.AtStep.step = {delink}
real/experiment.Stage.name = 'real'
real/experiment.Stage.form = 'UNROLLED'
real/experiment.Stage.optimizer_state = 'COPY'
"""
DEVICES = 4


class Runs:
    """Runs of one experiment, each in a directory of its own below `root`."""

    def __init__(self, root: pathlib.Path, steps: int, delink: int, save_every: int):
        """Writes the text; see `GIN` for the rest."""
        self._root = root
        self._settings = {"steps": steps, "delink": delink, "save_every": save_every}
        lines = (LINES[i % 4] + f" {i}" for i in range(200))
        (root / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def directory(self, name: str) -> pathlib.Path:
        """Returns the MODEL_DIR of a run."""
        return self._root / name

    def start(self, name: str, processes: int, *launcher: str) -> subprocess.Popen[bytes]:
        """Starts a run, or goes on with it; its output goes to a file beside its directory."""
        config = self._root / f"{name}.gin"
        places = {"text": self._root / "text.txt", "model_dir": self.directory(name)}
        config.write_text(GIN.format(**self._settings, **places), encoding="utf-8")
        environment = {
            "XDG_CACHE_HOME": str(self._root / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self._root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": str(ROOT),
        }
        start = [sys.executable, str(ROOT / "launch" / "local.py"), f"--processes={processes}"]
        flags = ["--", f"--gin_file={config}", "--process_timeout=10"]
        with open(self._root / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [*start, f"--devices={DEVICES}", *launcher, *flags],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, name: str, processes: int, *launcher: str, code: int = 0) -> None:
        """Runs to the end; raises RuntimeError with the output for another exit code."""
        ended = self.start(name, processes, *launcher).wait()
        if ended != code:
            raise RuntimeError(f"{name} ended with {ended}, not {code}:\n{self.output(name)}")

    def output(self, name: str) -> str:
        """Returns what a run has printed, all its starts together."""
        return (self._root / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def steps(self, name: str) -> list[int]:
        """Returns the steps that have a record of training, as they stand."""
        return [r["step"] for r in self.records(name) if r["split"] == "train"]

    def records(self, name: str) -> list[dict[str, Any]]:
        """Returns the records of a run."""
        return read_records(self.directory(name))

    def end(self, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns the state at the end, by name of the leaf, and where the data then stands."""
        with Checkpoints(self.directory(name) / "checkpoints") as checkpoints:
            step = checkpoints.latest()
            assert step is not None
            state = checkpoints.restore(step, checkpoints.metadata(step))
            return dict(_leaves("", state)), checkpoints.restore_data_state(step)


def children(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Returns the processes that a launcher has started and that live."""
    try:
        path = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
        return [int(number) for number in pathlib.Path(path).read_text().split()]
    except FileNotFoundError:
        return []


def kill(process: int) -> bool:
    """Kills a process; False if it has ended before."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def different_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> int:
    """Returns how many values of two states are not the same to the bit."""
    if one.keys() != other.keys():
        raise ValueError(f"other leaves: {sorted(one.keys() ^ other.keys())}")
    return sum(
        int(np.count_nonzero((_bits(value) != _bits(other[name])).any(axis=-1)))
        for name, value in one.items()
    )


def recorded(records: list[dict[str, Any]]) -> list[str]:
    """Returns what records say of the training, to the bit; the rest depends on the clock."""
    names = ("step", "stage", "split", "loss", "total_loss", "grad_norm", "loss_before", "tokens")
    return [json.dumps([r.get(name) for name in names]) for r in records]


def _bits(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).view(np.uint8).reshape(-1, value.dtype.itemsize)


def _leaves(start: str, tree: Any) -> Any:
    if not isinstance(tree, dict):
        yield start, np.asarray(tree)
        return
    for name, inner in tree.items():
        yield from _leaves(f"{start}/{name}", inner)
