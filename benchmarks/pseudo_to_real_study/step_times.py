"""Seconds a step of every stage, measured in turns in one process.

The contenders are the programs that the runs compile: the Pseudo stage with each unit, the Real
stage with all in device memory, and the Real stage that streams its weights and the optimizer's
state from host memory. On a CPU the two memories are the same one, but the copies are real.
"""

import dataclasses
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import timing

from m6jax.experiment import Experiment
from m6jax.experiment.programs import StageProgram
from pseudo_to_real_study.variants import OWN, Study, Variant

FILE = "step_times.json"


def contenders(study: Study) -> dict[str, tuple[Variant, int, bool]]:
    """Returns name -> (variant, number of the stage, whether it is streamed)."""
    units = [unit for unit in (1, 2, 4) if unit < study.depth]
    pseudo = {f"unit{unit}": (Variant(unit=unit), 0, False) for unit in units}
    own = {f"unit1-own-{own}": (Variant(unit=1, own=own), 0, False) for own in list(OWN)[1:]}
    scratch = Variant(unit=None)
    return pseudo | own | {"real": (scratch, 0, False), "real-streamed": (scratch, 0, True)}


def measure(study: Study, text: Path, results: Path, rounds: int) -> dict[str, Any]:
    """Measures and writes `step_times.json`.

    Args:
      study: sizes.
      text: see `Variant.experiment`.
      results: directory of the results.
      rounds: turns.
    """
    calls = {}
    for name, (variant, stage, streamed) in contenders(study).items():
        experiment = variant.experiment(study, text, results, streamed)
        program = StageProgram(experiment, stage, 0)
        batch = program.put(random_batch(experiment, stage))
        calls[name] = stepper(program, program.lower(batch).compile(), batch)
    seconds = timing.in_turns(calls, rounds)
    result = {
        "kind": "step_times",
        "study": dataclasses.asdict(study),
        "rounds": rounds,
        "median": {name: round(timing.median(times), 4) for name, times in seconds.items()},
        "fastest": {name: round(min(times), 4) for name, times in seconds.items()},
        "machine": f"{os.cpu_count()} x {platform.machine()}",
        "jax": jax.__version__,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / FILE).write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return result


def stepper(
    program: StageProgram, compiled: jax.stages.Compiled, batch: dict[str, jax.Array]
) -> Callable[[], Any]:
    """Returns a call that makes one step of a stage, from where the last one ended."""
    state = program.initialize()

    def call() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    return call


def random_batch(experiment: Experiment, stage: int) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, full to the last place."""
    shape = (experiment.rows(stage), experiment.data.length)
    tokens = np.random.default_rng(0).integers(3, experiment.model.vocab_size, shape, np.int32)
    ones = np.ones(shape, np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_weights": ones.astype(np.float32),
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "bidirectional": 0 * ones,
    }
