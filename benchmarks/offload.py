"""What offloading costs and saves.

    python benchmarks/offload.py --cpu
    python benchmarks/offload.py --topology v6e:16x16
    python benchmarks/offload.py --topology v6e:16x16 --step ordinary

`--cpu` times steps with offload off, of the optimizer's state, and of everything, in turns on
emulated memory: ratios, and the process's memory. `--topology` compiles the step of the paper's
model of 10 trillion parameters for chips that are not here (needs libtpu) and prints the bytes of
one chip as one JSON line. All expert weights rest on the host.
"""

import argparse
import functools
import json
import os
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params
from timing import in_turns, median, peak_rss_mb

from m6jax import train_state
from m6jax.layouts import Form, Layout
from m6jax.losses import Loss
from m6jax.modeling.config import ModelConfig, MoEConfig, Remat
from m6jax.modeling.transformer import Transformer
from m6jax.offload import OffloadPlan
from m6jax.optimizers import Adafactor, AdamW, Optimizer
from m6jax.partitioning import Partitioning
from m6jax.streaming import streamed_step
from m6jax.train_step import Update, model_loss, train_step

ROWS, PATCHES, TOKENS = 8, 16, 128  # of one device
LENGTH = PATCHES + TOKENS
OPTIMIZER, UPDATE = Adafactor(), Update(clip_norm=None)


def ten_trillion(layers: int, step: str) -> ModelConfig:
    """The paper's model: 48 layers are 10.06 trillion parameters."""
    return ModelConfig(
        vocab_size=32_768,
        num_layers=layers,
        embed_dim=1024,
        num_heads=16,
        mlp_dim=9984,
        max_length=LENGTH,
        moe=MoEConfig(
            num_experts=10_240, num_prototypes=80, capacity_factor=1.25, group_size=ROWS * LENGTH
        ),
        dtype="bfloat16",
        param_dtype="bfloat16",
        patch_dim=768,
        remat=Remat.NOTHING if step == "streamed" else Remat.FULL,
    )


def batch_of(config: ModelConfig, where: Partitioning, mesh: Any) -> dict[str, Any]:
    """Describes a batch of `ROWS` rows a device."""
    sharding = where.batch_sharding(mesh)

    def feature(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((ROWS * mesh.size, *shape), dtype, sharding=sharding)

    names = ("tokens", "targets", "segment_ids", "positions", "bidirectional", "patch_mask")
    batch = {name: feature(jnp.int32, LENGTH) for name in names}
    batch["loss_weights"] = feature(jnp.float32, LENGTH)
    batch["patches"] = feature(jnp.float32, PATCHES, config.patch_dim or 0)
    return batch


def step_of(model: Transformer, layout: Layout, plan: OffloadPlan, optimizer: Optimizer) -> Any:
    """Returns the ordinary or the streamed step: (state, batch) -> (state, metrics)."""
    common: dict[str, Any] = {
        "layout": layout,
        "learning_rate": lambda step: jnp.float32(1e-3),
        "update": UPDATE,
    }
    if plan.streamed:
        return functools.partial(
            streamed_step,
            model=model,
            loss=Loss(),
            optimizer=optimizer,
            inputs_on_host=plan.activations,
            **common,
        )
    axes = train_state.logical_axes(model.parameters(layout))
    return functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss(), plan.activations),
        tx=optimizer.build(axes),
        **common,
    )


def compile_for(topology: str, layers: int, step: str, form: Form, dump: str) -> dict[str, Any]:
    """Compiles one step of the model of 10 trillion parameters; bytes are a chip's."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{topology.split(':')[0]}-8"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    jax.config.update("jax_platforms", "cpu")
    devices = topologies.get_topology_desc(topology, "tpu").devices
    where = Partitioning(data=1, expert=len(devices))
    mesh = where.make_mesh(devices)
    config = ten_trillion(layers, step)
    model, layout = Transformer(config), config.layout(layers, form)
    plain = train_state.describe(model, layout, OPTIMIZER, where, mesh, averaged=False)
    plan = OffloadPlan(weights=("moe/(up|down)$",), streamed=step == "streamed")
    state = plan.place(plain, layout)
    shardings = (train_state.shardings_of(state), None)
    options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
    begin, began = time.perf_counter(), time.process_time()
    with where.activate(mesh):
        run = jax.jit(
            step_of(model, layout, plan, OPTIMIZER), donate_argnums=0, out_shardings=shardings
        )
        traced = run.trace(state, batch_of(config, where, mesh))
        compiled = traced.lower().compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return {
        "topology": topology,
        "step": step,
        "layers": layers,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "device_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        # Experts are cut over all chips, and nothing else is on the host.
        "host_traffic_bytes": moved_bytes(traced.jaxpr.jaxpr) // mesh.size,
        "compile_seconds": round(time.perf_counter() - begin, 1),
        "compile_processor_seconds": round(time.process_time() - began, 1),
    }


def moved_bytes(jaxpr: Any) -> int:
    """Returns the bytes that a program moves between host and device, scans counted out."""
    moved = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            for before, after in zip(eqn.invars, eqn.outvars, strict=True):
                if before.aval.memory_space != after.aval.memory_space:
                    moved += after.aval.size * after.aval.dtype.itemsize
        inner = sum(moved_bytes(sub) for sub in jaxprs_in_params(eqn.params))
        moved += inner * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else inner
    return moved


def time_on_cpu(rounds: int) -> dict[str, Any]:
    """Returns the step time of each plan as a ratio to that without offload, and the memory."""
    jax.config.update("jax_platforms", "cpu")
    config = ModelConfig(
        vocab_size=4096,
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        mlp_dim=512,
        moe=MoEConfig(num_experts=16, num_prototypes=4),
        dtype="float32",
        remat=Remat.FULL,
    )
    plans = {
        "off": OffloadPlan(),
        "optimizer": OffloadPlan(optimizer_state=True),
        "everything": OffloadPlan(weights=("",), optimizer_state=True, activations=True),
        "everything_streamed": OffloadPlan(
            weights=("",), optimizer_state=True, activations=True, streamed=True
        ),
    }
    where = Partitioning(data=1)
    mesh = where.make_mesh(jax.devices()[:1])
    with where.activate(mesh):
        contenders = {
            name: cpu_contender(config, plan, where, mesh) for name, plan in plans.items()
        }
        seconds = in_turns(contenders, rounds)
    off = median(seconds["off"])
    return {
        "step_time_ratio": {name: round(median(s) / off, 3) for name, s in seconds.items()},
        "rounds": rounds,
        "peak_rss_mb": round(peak_rss_mb()),
    }


def cpu_contender(config: ModelConfig, plan: OffloadPlan, where: Partitioning, mesh: Any) -> Any:
    """Returns a call that makes one step from where the last one ended."""
    model, layout, optimizer = Transformer(config), config.layout(4, Form.STACKED), AdamW()
    plain = train_state.describe(model, layout, optimizer, where, mesh, averaged=False)
    abstract = plan.place(plain, layout)
    shardings = train_state.shardings_of(abstract)
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    state = train_state.initialize(model, layout, tx, 0, abstract)
    length = 128
    row = jnp.ones((8, length), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), row.shape)
    tokens = jax.random.randint(jax.random.key(0), row.shape, 1, config.vocab_size)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": row, "positions": positions}
    batch["loss_weights"] = jnp.ones(row.shape)
    step = step_of(model, layout, plan, optimizer)
    run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def call() -> Any:
        nonlocal state
        state, metrics = run(state, batch)
        return metrics["loss"]

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cpu", action="store_true", help="time small steps here")
    what.add_argument("--topology", help="compile for this one, such as v5p:8x8x8")
    parser.add_argument("--step", choices=("streamed", "ordinary"), default="streamed")
    parser.add_argument("--layers", type=int, default=48, help="fewer compile no faster, but show")
    parser.add_argument("--form", choices=[form.name for form in Form], default="STACKED")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dump", help="directory for the compiled program as text")
    args = parser.parse_args()
    if args.cpu:
        print(json.dumps(time_on_cpu(args.rounds)))
        return
    with tempfile.TemporaryDirectory() as directory:
        dump = args.dump or directory
        print(json.dumps(compile_for(args.topology, args.layers, args.step, Form[args.form], dump)))


if __name__ == "__main__":
    main()
