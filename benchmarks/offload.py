"""What offloading costs and saves.

    python benchmarks/offload.py --cpu
    python benchmarks/offload.py --topology v6e:16x16
    python benchmarks/offload.py --topology v6e:16x16 --rows 40 --microbatches 5
    python benchmarks/offload.py --topology v6e:16x16 --step ordinary
    python benchmarks/offload.py --gpu

`--cpu` times steps with offload off, of the optimizer's state, and of everything, in turns on
emulated memory: ratios, and the process's memory. `--topology` compiles the step of the paper's
model of 10 trillion parameters for chips that are not here (needs libtpu) and prints the bytes of
one chip as one JSON line, and the times that its products, collectives and copies need alone at the
default efficiencies of `PlanSettings`; `mfu` is that of the longest of them. All expert weights
rest on the host. `--gpu` finds the largest mixture of experts that the first accelerator here
trains with and without offload; see `offload_gpu`.
"""

import argparse
import functools
import json
import math
import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import offload_gpu
from timing import in_turns, median, peak_rss_mb

from m6jax.experiment.summary import parameters_by_use
from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Form, Layout
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import ModelConfig, MoEConfig, Remat
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW, Optimizer
from m6jax.planning import hardware, hlo, topologies
from m6jax.planning.compiled import TEXT
from m6jax.planning.estimate import Estimate, Memory
from m6jax.planning.flops import forward_flops
from m6jax.planning.roofline import roofline
from m6jax.planning.settings import PlanSettings
from m6jax.planning.traced import moved_bytes
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update, model_loss, train_step

PATCHES, TOKENS = 16, 128
LENGTH = PATCHES + TOKENS
OPTIMIZER = Adafactor()


def ten_trillion(layers: int, step: str, rows: int) -> ModelConfig:
    """The paper's model: 48 layers are 10.06 trillion parameters; `rows` are one group."""
    return ModelConfig(
        vocab_size=32_768,
        num_layers=layers,
        embed_dim=1024,
        num_heads=16,
        mlp_dim=9984,
        max_length=LENGTH,
        moe=MoEConfig(
            num_experts=10_240, num_prototypes=80, capacity_factor=1.25, group_size=rows * LENGTH
        ),
        dtype="bfloat16",
        param_dtype="bfloat16",
        patch_dim=768,
        remat=Remat.NOTHING if step == "streamed" else Remat.FULL,
    )


def batch_of(config: ModelConfig, where: Partitioning, mesh: Any, rows: int) -> dict[str, Any]:
    """Describes a batch of so many rows a device."""
    sharding = where.batch_sharding(mesh)

    def feature(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows * mesh.size, *shape), dtype, sharding=sharding)

    names = ("tokens", "targets", "segment_ids", "positions", "bidirectional", "patch_mask")
    batch = {name: feature(jnp.int32, LENGTH) for name in names}
    batch["loss_weights"] = feature(jnp.float32, LENGTH)
    batch["patches"] = feature(jnp.float32, PATCHES, config.patch_dim or 0)
    return batch


def step_of(
    model: Transformer,
    layout: Layout,
    plan: OffloadPlan,
    optimizer: Optimizer,
    microbatches: int = 1,
) -> Any:
    """Returns the ordinary or the streamed step: (state, batch) -> (state, metrics)."""
    common: dict[str, Any] = {
        "layout": layout,
        "learning_rate": lambda step: jnp.float32(1e-3),
        "update": Update(clip_norm=None, microbatches=microbatches),
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


def compile_for(args: argparse.Namespace, dump: str) -> dict[str, Any]:
    """Compiles one step of the model of 10 trillion parameters; bytes are a chip's."""
    topology, layers, step, microbatches = args.topology, args.layers, args.step, args.microbatches
    jax.config.update("jax_platforms", "cpu")
    devices = topologies.devices_of(topologies.parse(topology))
    where = Partitioning(data=1, expert=len(devices))
    mesh = where.make_mesh(devices)
    config = ten_trillion(layers, step, args.rows // microbatches)
    model, layout = Transformer(config), config.layout(layers, Form[args.form])
    plain = train_state.abstract_state(model, layout, OPTIMIZER, where, mesh, averaged=False)
    plan = OffloadPlan(weights=("moe/(up|down)$",), streamed=step == "streamed")
    state = plan.place(plain, layout)
    shardings = (train_state.shardings_of(state), None)
    options: dict[str, Any] = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
    begin, began = time.perf_counter(), time.process_time()
    run = jax.jit(
        step_of(model, layout, plan, OPTIMIZER, microbatches),
        donate_argnums=0,
        out_shardings=shardings,
    )
    with where.activate(mesh):
        traced = run.trace(state, batch_of(config, where, mesh, args.rows))
        compiled = traced.lower().compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return {
        "topology": topology,
        "step": step,
        "layers": layers,
        "rows": args.rows,
        "microbatches": microbatches,
        "positions": args.rows * LENGTH * mesh.size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "device_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes,
        "host_temp_bytes": memory.host_temp_size_in_bytes,
        # Experts are cut over all chips, and nothing else is on the host.
        "host_traffic_bytes": moved_bytes(traced.jaxpr.jaxpr) // mesh.size,
        **times(topology, config, args.rows * LENGTH, dict(mesh.shape), dump),
        "compile_seconds": round(time.perf_counter() - begin, 1),
        "compile_processor_seconds": round(time.process_time() - began, 1),
    }


def times(
    topology: str, config: ModelConfig, positions: int, mesh: dict[str, int], dump: str
) -> dict[str, float | None]:
    """Returns the seconds of a step from the dumped program's text; see `roofline`.

    Args:
      topology: what it was compiled for.
      config: of the model, in which no layers share parameters.
      positions: of one device in one step.
      mesh: sizes of the mesh axes.
      dump: directory with the text.
    """
    texts = pathlib.Path(dump).glob(TEXT)
    text = max(texts, key=lambda path: path.stat().st_size).read_text(encoding="utf-8")
    measured = hlo.measure(text)
    chip = hardware.find(topologies.parse(topology).generation)
    assert chip is not None  # every topology's generation is in the table
    layer = sum(sum(forward_flops(config, kind, LENGTH).values()) for kind in config.pattern)
    asked = config.num_blocks * layer + 2.0 * config.embed_dim * config.vocab_size
    stored, active = parameters_by_use(config, config.layout(config.num_layers, Form.STACKED))
    needs = Estimate(
        engine="compiled",
        stage="real",
        devices=math.prod(mesh.values()),
        mesh=mesh,
        positions_per_step=positions * math.prod(mesh.values()),
        parameters_total=stored,
        parameters_active=active,
        parameters_by_group={},
        hbm=Memory(),
        host=Memory(),
        host_temp_bytes_per_device=None,
        flops_per_device=measured.flops,
        model_flops_per_device=3.0 * positions * asked,
        host_traffic_bytes_per_device=measured.to_device + measured.to_host,
        collectives=measured.collectives(mesh),
    )
    found = roofline(needs, chip, PlanSettings(topology=topology))
    return {
        "host_seconds": found.host_link,
        "compute_seconds": found.compute,
        "interconnect_seconds": found.interconnect,
        "mfu": found.mfu,
    }


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
            name: contender(config, plan, where, mesh, AdamW()) for name, plan in plans.items()
        }
        seconds = in_turns(contenders, rounds)
    off = median(seconds["off"])
    return {
        "step_time_ratio": {name: round(median(s) / off, 3) for name, s in seconds.items()},
        "rounds": rounds,
        "peak_rss_mb": round(peak_rss_mb()),
    }


def contender(
    config: ModelConfig,
    plan: OffloadPlan,
    where: Partitioning,
    mesh: Any,
    optimizer: Optimizer,
    batch: dict[str, jax.Array] | None = None,
) -> Any:
    """Returns a call that makes one step from where the last one ended; it has its `state`."""
    model, layout = Transformer(config), config.layout(config.num_layers, Form.STACKED)
    plain = train_state.abstract_state(model, layout, optimizer, where, mesh, averaged=False)
    abstract = plan.place(plain, layout)
    offload_gpu.check_host(abstract)
    shardings = train_state.shardings_of(abstract)
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    state = train_state.initialize(model, layout, tx, 0, abstract)
    batch = batch or offload_gpu.batch_of(config.vocab_size, rows=8, length=128)
    step = step_of(model, layout, plan, optimizer)
    run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def call() -> Any:
        call.state, metrics = run(call.state, batch)  # type: ignore[attr-defined]
        return metrics["loss"]

    call.state = state  # type: ignore[attr-defined]
    return call


def trial_of(plan: str, experts: int, steps: int, config: ModelConfig | None = None) -> Any:
    """Trains a model for some steps on the first device; see `offload_gpu.measure`."""
    config = config or offload_gpu.config_of(experts)
    where = Partitioning(data=1)
    mesh = where.make_mesh(jax.devices()[:1])
    batch = offload_gpu.batch_of(config.vocab_size)
    with where.activate(mesh):
        call = contender(config, offload_gpu.PLANS[plan], where, mesh, OPTIMIZER, batch)
        seconds = median(in_turns({"step": call}, steps)["step"])
        copies = offload_gpu.copy_seconds(call.state)
    return {
        "experts": experts,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(call.state.params)),
        "step_seconds": seconds,
        "tokens_per_second": batch["tokens"].size / seconds,
        "copy_seconds": copies,
        "device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cpu", action="store_true", help="time small steps here")
    what.add_argument("--gpu", action="store_true", help="find the largest model of one device")
    what.add_argument("--trial", help=argparse.SUPPRESS)  # one size of that, as JSON
    what.add_argument("--topology", help="compile for this one, such as v5p:8x8x8")
    parser.add_argument("--step", choices=("streamed", "ordinary"), default="streamed")
    parser.add_argument("--layers", type=int, default=48, help="fewer compile no faster, but show")
    parser.add_argument("--rows", type=int, default=8, help="of one device")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of these rows")
    parser.add_argument("--form", choices=[form.name for form in Form], default="STACKED")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dump", help="directory for the compiled program as text")
    args = parser.parse_args()
    if args.cpu:
        print(json.dumps(time_on_cpu(args.rounds)))
        return
    if args.gpu:
        print(json.dumps(offload_gpu.measure(__file__, args.rounds)))
        return
    if args.trial:
        print(json.dumps(trial_of(**json.loads(args.trial))))
        return
    with tempfile.TemporaryDirectory() as directory:
        dump = args.dump or directory
        print(json.dumps(compile_for(args, dump)))


if __name__ == "__main__":
    main()
