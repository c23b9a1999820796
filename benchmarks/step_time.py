"""One training step of a small MoE model against its own matrix products.

    python benchmarks/step_time.py            prints one JSON line
    python benchmarks/step_time.py --compare  the flax module against explicit slices, likewise

`fraction_of_matmul_rate` is the time of the step's matrix products alone, forward and both
gradients at the shapes that the step computes, over the time of the whole step (routing, dispatch,
attention's softmax, loss, clipping and optimizer included): the two have the same FLOPs, so it is
also the ratio of their rates. Products and steps are timed in turns.

With `--compare` the step that applies the flax module (`modeling.M6`) and the one that applies the
same layers by explicit slices of their trees are compiled and run in turns. The medians of the
ratios of pairs, module by slices, are what is to be looked at.
"""

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import timing

from m6jax.layouts import Form
from m6jax.modeling.config import ModelConfig, MoEConfig
from m6jax.modeling.dispatch import capacity_of
from m6jax.modeling.m6 import apply_layers
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.training import train_state, train_step
from m6jax.training.losses import Loss

# What runs the layers; see `train_step.model_loss`.
WAYS = {"module": apply_layers, "slices": Transformer.apply_layers}


def main() -> None:
    options = _options()
    print(json.dumps(_compared(options) if options.compare else _measured(options)))


def _measured(options: argparse.Namespace) -> dict[str, float]:
    config = _model(options)
    step, state = _step_and_state(options, config)
    batch = _batch(options)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    begin = time.perf_counter()
    step = step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - begin
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    first_step_seconds = time.perf_counter() - begin

    def one_step():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    products = _products(options, config)
    seconds = timing.in_turns(
        {"step": one_step} | {name: call for name, (call, _, _) in products.items()},
        options.steps,
    )
    step_seconds = timing.median(seconds["step"])
    alone = sum(timing.median(seconds[name]) * n for name, (_, _, n) in products.items())
    flops = sum(flops * n for _, flops, n in products.values())
    tokens = options.batch * options.length
    return {
        "step_ms": round(1e3 * step_seconds, 2),
        "step_ms_min": round(1e3 * min(seconds["step"]), 2),
        "tokens_per_second": round(tokens / step_seconds, 1),
        "params": count,
        "peak_rss_mb": round(timing.peak_rss_mb(), 1),
        "compile_seconds": round(compile_seconds, 2),
        "first_step_seconds": round(first_step_seconds, 2),
        "fraction_of_matmul_rate": round(alone / step_seconds, 3),
        "matmul_gflops_per_second": round(flops / alone / 1e9, 1),
        "step_gflops_per_second": round(flops / step_seconds / 1e9, 1),
    }


def _compared(options: argparse.Namespace) -> dict[str, float]:
    config, batch = _model(options), _batch(options)
    compiling: dict[str, list[float]] = {name: [] for name in WAYS}
    calls = {}
    for turn in range(1 + options.compiles):  # the first, which warms up, does not count
        for name, apply in WAYS.items():
            jax.clear_caches()  # traces of the other way
            step, state = _step_and_state(options, config, apply)
            begin = time.process_time()  # of all threads, but of no other process
            compiled = step.lower(state, batch).compile()
            compiling[name] += [time.process_time() - begin] if turn else []
            calls[name] = functools.partial(_Steps(compiled, state), batch)
    running = timing.in_turns(calls, options.steps)
    result = {}
    for what, seconds in {"compile": compiling, "step": running}.items():
        pairs = zip(seconds["module"], seconds["slices"], strict=True)
        result[f"{what}_module_by_slices"] = round(timing.median([m / s for m, s in pairs]), 3)
        result |= {
            f"{what}_{name}_ms": round(1e3 * timing.median(seconds[name]), 1) for name in WAYS
        }
    return result


class _Steps:
    """A compiled step that goes on from its own last state."""

    def __init__(self, step: Any, state: train_state.TrainState):
        self._step, self._state = step, state

    def __call__(self, batch: dict[str, jax.Array]) -> Any:
        self._state, metrics = self._step(self._state, batch)
        return metrics


def _model(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        vocab_size=options.vocab,
        num_layers=options.layers,
        embed_dim=options.embed,
        num_heads=options.heads,
        mlp_dim=options.mlp,
        dtype=options.dtype,
        moe=MoEConfig(
            num_experts=options.experts,
            num_prototypes=options.prototypes,
            num_selected_experts=options.selected,
            capacity_factor=options.capacity_factor,
        ),
    )


def _step_and_state(
    options: argparse.Namespace,
    config: ModelConfig,
    apply: train_step.ApplyLayers = apply_layers,
) -> tuple[Any, train_state.TrainState]:
    """Returns the jitted step, not yet compiled, and a new state."""
    model, layout = (
        Transformer(config),
        config.layout(options.unit or options.layers, Form[options.form]),
    )
    optimizer = {"adamw": AdamW(), "adafactor": Adafactor()}[options.optimizer]
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    step = functools.partial(
        train_step.train_step,
        loss_fn=train_step.model_loss(model, layout, Loss(), apply=apply),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: jnp.float32(1e-3),
        update=train_step.Update(),
    )
    params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), layout)
    state = train_state.create(params, tx, seed=0, averaged=False)
    return jax.jit(step, donate_argnums=0), state


def _products(options: argparse.Namespace, config: ModelConfig) -> dict:
    """Returns name -> (call, FLOPs, times a step), every product with its two gradients."""
    B, T, M, H = options.batch, options.length, options.embed, options.mlp
    N, D, L = options.heads, config.head_size, options.layers
    Q = options.prototypes * options.selected
    moe = config.moe
    rows = B * capacity_of(moe.capacity_mode, options.capacity_factor, T, Q, options.experts)
    shapes = {
        "projection": ("tm,mn->tn", (B * T, M), (M, N * D), 4 * L),
        "scores": ("atd,asd->ats", (B * N, T, D), (B * N, T, D), 2 * L),
        "experts_in": ("ecm,emh->ech", (options.experts, rows, M), (options.experts, M, H), L),
        "experts_out": ("ech,ehm->ecm", (options.experts, rows, H), (options.experts, H, M), L),
        "logits": ("tm,mv->tv", (B * T, M), (M, options.vocab), 1),
    }
    return {
        name: (*timing.product_with_gradients(names, left, right, options.dtype), times)
        for name, (names, left, right, times) in shapes.items()
    }


def _batch(options: argparse.Namespace) -> dict[str, jax.Array]:
    shape = (options.batch, options.length)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, options.vocab)
    return {
        "tokens": tokens,
        "targets": jnp.roll(tokens, -1, axis=1),
        "loss_weights": jnp.ones(shape),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(options.length), shape),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {
        "layers": 4, "embed": 256, "mlp": 1024, "heads": 4, "experts": 8, "prototypes": 1,
        "selected": 1, "capacity_factor": 1.25, "vocab": 8192, "batch": 8, "length": 256,
        "dtype": "float32", "steps": 10, "compiles": 3,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--optimizer", choices=["adamw", "adafactor"], default="adamw")
    parser.add_argument("--unit", type=int, help="distinct layers; all by default")
    parser.add_argument("--compare", action="store_true", help="the module against slices")
    parser.add_argument("--form", choices=Form.__members__, default="STACKED")
    return parser.parse_args()


if __name__ == "__main__":
    main()
