"""Bytes and seconds of each stage for stacks of 4 to 48 layers, and of the delink between them.

A shared weight has one gradient, however often it is used, so gradients are as many bytes as
parameters. What the compiled step needs besides its arguments (gradients, activations, working
space) is as the compiler's own analysis says.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import timing

from m6jax.data.config import TextData
from m6jax.experiment import Experiment, Stage
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.pytrees import Tree
from m6jax.optimizers.schedules import Constant
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.pseudo_to_real.triggers import AtStep
from pseudo_to_real_study.step_times import random_batch, stepper
from pseudo_to_real_study.variants import Study

FILE = "depths.json"
SIZES = tuple(Study(depth=depth, experts=64) for depth in (4, 8, 16, 32, 48))
DELINKS = 5


def measure(results: Path, rounds: int, sizes: tuple[Study, ...] = SIZES) -> dict[str, Any]:
    """Measures models of these sizes and writes `depths.json`.

    Args:
      results: directory of the results.
      rounds: turns of the steps of a model's two stages.
      sizes: of the models.
    """
    rows = []
    for study in sizes:
        rows.append(measure_depth(two_stages(study), rounds))
        print(json.dumps(rows[-1]), flush=True)
    first = sizes[0]
    result = {
        "kind": "depths",
        "model": {"embed": first.embed, "mlp": first.mlp, "experts": first.experts},
        "tokens": first.tokens,
        "rounds": rounds,
        "depths": rows,
        "jax": jax.__version__,
    }
    results.mkdir(parents=True, exist_ok=True)
    (results / FILE).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def two_stages(study: Study) -> Experiment:
    """Returns a run that is never made: its stages are only compiled."""
    pseudo = Stage(name="pseudo", unit=1, until=AtStep(step=1))
    return Experiment(
        model=study.model(),
        data=TextData(length=study.length),
        stages=(pseudo, Stage(name="real", optimizer_state=Policy.COPY)),
        steps=2,
        batch_size=study.rows,
        schedule=Constant(peak=1e-3),
        model_dir="",
    )


def measure_depth(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Returns the bytes of both stages, the seconds of their steps and of the delink."""
    programs = {s.name: StageProgram(experiment, i, 0) for i, s in enumerate(experiment.stages)}
    row: dict[str, Any] = {"depth": experiment.model.num_layers}
    calls = {}
    for i, (name, program) in enumerate(programs.items()):
        batch = program.put(random_batch(experiment, i))
        compiled = program.lower(batch).compile()
        row[name] = stage_bytes(program, compiled)
        calls[name] = stepper(program, compiled, batch)
    for name, seconds in timing.in_turns(calls, rounds).items():
        row[name]["step_seconds"] = round(timing.median(seconds), 4)
    del calls
    return row | {"delink_seconds": round(delink_seconds(*programs.values()), 4)}


def stage_bytes(program: StageProgram, compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes of a stage's state, and of what its compiled step needs besides."""
    params = bytes_of(program.abstract.params)
    return {
        "parameters": params,
        "gradients": params,
        "optimizer": bytes_of(program.abstract.opt_state),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
    }


def bytes_of(tree: Tree) -> int:
    """Returns the bytes of all leaves together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def delink_seconds(pseudo: StageProgram, real: StageProgram) -> float:
    """Returns the median time of a delink that is compiled already."""
    delink = functools.partial(
        delinking.delink, old=pseudo.layout, new=real.layout, policy=Policy.COPY
    )
    compiled, state = jax.jit(delink), pseudo.initialize()
    seconds = timing.in_turns({"delink": lambda: compiled(state)}, DELINKS)
    return timing.median(seconds["delink"])
