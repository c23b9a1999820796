"""Experiments to be planned, and their traced steps."""

from typing import Any

import jax
from jax.interpreters import partial_eval

from m6jax.data.config import TextData
from m6jax.experiment import Experiment, Stage
from m6jax.experiment.programs import StageProgram
from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, MoEConfig, Remat
from m6jax.optimizers import Adafactor
from m6jax.optimizers.schedules import Constant
from m6jax.training.train_step import Update

PATCHES = 16


def tiny(
    model: Any = None, stage: Any = None, update: Any = None, moe: Any = None, **run: Any
) -> Experiment:
    """4 layers, M 64, H 128, N 4, V 96, E 8 in P 2, rows of T 32; changes by part."""
    experts = {"num_experts": 8, "num_prototypes": 2, "capacity_factor": 1.0} | (moe or {})
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "num_layers": 4,
        "embed_dim": 64,
        "num_heads": 4,
        "mlp_dim": 128,
        "max_length": 32,
        "moe": MoEConfig(**experts),
        "dtype": "float32",
    }
    settings: dict[str, Any] = {
        "model": ModelConfig(**(sizes | (model or {}))),
        "data": TextData(length=32),
        "stages": (Stage(**({"name": "real"} | (stage or {}))),),
        "steps": 10,
        "batch_size": 8,
        "schedule": Constant(peak=1e-3),
        "model_dir": "unused",
        "update": Update(**({"clip_by": "LAYER"} | (update or {}))),
    }
    return Experiment(**(settings | run))


def ten_trillion(devices: int, streamed: bool = True) -> Experiment:
    """The paper's largest model, its experts on the host."""
    model = ModelConfig(
        vocab_size=32_768,
        num_layers=48,
        embed_dim=1024,
        num_heads=16,
        mlp_dim=9984,
        max_length=144,
        moe=MoEConfig(num_experts=10_240, num_prototypes=80, group_size=1152),
        param_dtype="bfloat16",
        patch_dim=768,
        remat=Remat.NOTHING if streamed else Remat.FULL,
    )
    plan = OffloadPlan(weights=("moe/(up|down)$",), streamed=streamed)
    return Experiment(
        model=model,
        data=TextData(length=144),
        stages=(Stage(name="real", offload=plan),),
        steps=10,
        batch_size=8 * devices,
        schedule=Constant(peak=1e-3),
        model_dir="unused",
        optimizer=Adafactor(),
        update=Update(clip_norm=None),
        partitioning=Partitioning(data=1, expert=devices),
    )


def traced(experiment: Experiment) -> Any:
    """Returns the step's jaxpr for one device, without what nobody asks for."""
    program = StageProgram(experiment, 0, 0, jax.devices()[:1])
    jaxpr = program.trace(program.batch_shapes(PATCHES)).jaxpr.jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
