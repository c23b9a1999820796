"""A tiny experiment on text files, for tests of whole runs."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import models

from m6jax.data.config import SentencePiece, TextData, TextFiles
from m6jax.decoding import Greedy
from m6jax.experiment import Experiment, Sample, Stage
from m6jax.layouts import Form
from m6jax.optimizers.schedules import WarmupStableDecay
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep

LINES = (
    "the ship sailed at noon and the captain said nothing",
    "nothing was seen of the whale but the sea was calm",
    "the captain saw the whale at noon and the ship turned",
    "calm was the sea and nothing sailed but the ship",
)
VOCABULARY = 320
STEPS, DELINK_STEP = 8, 4


def write_text(directory: pathlib.Path) -> pathlib.Path:
    path = directory / "text.txt"
    path.write_text("\n".join(LINES[i % 4] + f" {i}" for i in range(200)) + "\n", encoding="utf-8")
    return path


def stages(delink_step: int = DELINK_STEP) -> tuple[Stage, ...]:
    return (
        Stage(name="pseudo", unit=1, until=AtStep(step=delink_step)),
        Stage(name="real", form=Form.UNROLLED, optimizer_state=Policy.COPY),
    )


def experiment(text: pathlib.Path, model_dir: pathlib.Path, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "model": models.tiny(vocab_size=VOCABULARY, dropout=0.1),
        "data": TextData(
            sources=(TextFiles(train=str(text)),),
            vocabulary=SentencePiece(size=VOCABULARY),
            length=16,
        ),
        "stages": stages(),
        "steps": STEPS,
        "batch_size": 8,
        "schedule": WarmupStableDecay(
            peak=1e-2, total_steps=max(STEPS, changes.get("steps", 0)), warmup_steps=1
        ),
        "model_dir": str(model_dir),
        "log_every": 1,
        "eval_every": 100,
        "save_every": 3,
        "sample": Sample(prompts=("the whale",), method=Greedy(), max_new_tokens=4),
    }
    return Experiment(**(settings | changes))


@contextlib.contextmanager
def kept_compilation(directory: pathlib.Path) -> Iterator[None]:
    """Keeps what is compiled for the next run."""
    settings = {
        "jax_compilation_cache_dir": (str(directory), None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
    }
    for name, (value, _) in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, (_, value) in settings.items():
            jax.config.update(name, value)
