"""A pod's training step as a compiled program: memory, bytes moved and collectives, without a pod.

libtpu (`pip install libtpu`) compiles ahead of time for a topology that is not here. The model has
24 sparse layers of width 1024 with gated experts of 4096, 16 heads, 512 experts top-1 with factor
1.25, a vocabulary of 32,000 and 512 tokens a chip; bfloat16 arithmetic, float32 weights, AdamW with
global clipping, full rematerialisation; 512 chips as data 8 x expert 64, weights cut over both.
"""

import collections
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Form
from m6jax.modeling.config import ModelConfig, MoEConfig, Remat
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.planning import topologies
from m6jax.training import train_state, train_step
from m6jax.training.losses import Loss

LENGTH = 512
PARTITIONING = Partitioning(data=8, expert=64, fully_sharded=True)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def measure(topology: str, layers: int) -> dict[str, Any]:
    """Compiles the step for one topology, such as 'v5p:8x8x8'; bytes are a chip's.

    Returns:
      temp_bytes, argument_bytes, bytes_accessed (as the compiler counts: a scanned body once),
      compile_seconds, and how many collectives of each kind the text has.
    """
    jax.config.update("jax_platforms", "cpu")
    compiled, seconds = compile_step(topology, layers)
    memory = compiled.memory_analysis()
    return {
        "layers": layers,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "bytes_accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "compile_seconds": round(seconds, 1),
        "collectives": count_collectives(compiled.as_text()),
    }


def compile_step(topology: str, layers: int) -> tuple[Any, float]:
    """Returns the compiled training step and the seconds that it took."""
    config = _config(layers)
    model, layout, optimizer = Transformer(config), config.layout(layers, Form.STACKED), AdamW()
    mesh = PARTITIONING.make_mesh(topologies.devices_of(topologies.parse(topology)))
    state = train_state.abstract_state(model, layout, optimizer, PARTITIONING, mesh, averaged=False)
    shape = (mesh.size, LENGTH)

    def feature(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=PARTITIONING.batch_sharding(mesh))

    batch = {name: feature(jnp.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    batch["loss_weights"] = feature(jnp.float32)
    step = functools.partial(
        train_step.train_step,
        loss_fn=train_step.model_loss(model, layout, Loss(chunk_length=LENGTH)),
        layout=layout,
        tx=optimizer.build(train_state.logical_axes(model.parameters(layout))),
        learning_rate=lambda step: jnp.float32(1e-3),
        update=train_step.Update(),
    )
    shardings = (train_state.shardings_of(state), None)
    begin = time.perf_counter()
    with PARTITIONING.activate(mesh):
        lowered = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(state, batch)
        compiled = lowered.compile()
    return compiled, time.perf_counter() - begin


def count_collectives(text: str) -> dict[str, int]:
    """Returns how many collectives of each kind a compiled program's text has."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text)
    return dict(sorted(collections.Counter(found).items()))


def _config(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32_000,
        num_layers=layers,
        embed_dim=1024,
        num_heads=16,
        mlp_dim=4096,
        moe=MoEConfig(num_experts=512, capacity_factor=1.25),
        gated_mlp=True,
        tied_output=False,
        max_length=LENGTH,
        dtype="bfloat16",
        remat=Remat.FULL,
    )
