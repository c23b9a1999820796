"""Tiny models, batches and comparisons that many tests share.

Sizes divide by every mesh of eight devices: B 8 rows, T 8 positions, M 16, H 16, N 8 heads, V 32,
E 8 experts in P = 2 prototypes, K = 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from m6jax.foundation.partitioning import is_parameter
from m6jax.foundation.pytrees import differences, flatten_named, map_named
from m6jax.layouts import Form, Layout
from m6jax.modeling.config import ModelConfig, MoEConfig
from m6jax.modeling.transformer import Transformer
from m6jax.training.losses import router_loss

# What users have. The generator of code that conftest chooses compiles in a third of the time, but
# rounds one expression in two ways if it lies in two fusions.
EXACT = {"xla_cpu_use_fusion_emitters": True}


def jit(fn: Any = None, exact: bool = False, **options: Any) -> Any:
    """`jax.jit`; `exact` for programs whose bits are compared with another program's."""
    if fn is None:
        return functools.partial(jit, exact=exact, **options)
    return jax.jit(fn, compiler_options=EXACT if exact else None, **options)


def experts(**changes: Any) -> MoEConfig:
    settings: dict[str, Any] = {
        "num_experts": 8,
        "num_prototypes": 2,
        "num_selected_experts": 2,
        "capacity_factor": 1.0,
        "load_balance_loss": 0.1,
        "router_z_loss": 0.1,
    }
    return MoEConfig(**(settings | changes))


def tiny(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "num_layers": 2,
        "embed_dim": 16,
        "num_heads": 8,
        "mlp_dim": 16,
        "max_length": 64,
        "moe": experts(),
        "dtype": "float32",
    }
    return ModelConfig(**(settings | changes))


def stacked(config: ModelConfig, unit: int | None = None) -> Layout:
    """`unit` distinct layers (all by default), scanned."""
    return config.layout(unit or config.num_layers, Form.STACKED)


def unrolled(config: ModelConfig) -> Layout:
    return config.layout(config.num_layers, Form.UNROLLED)


def make_batch(rows: int = 8, length: int = 8, seed: int = 0, prefix: int = 0) -> dict[str, Any]:
    """Rows of one or two documents of unequal lengths, then padding; row 1 has one token."""
    rng = np.random.default_rng(seed)
    segment_ids = np.zeros((rows, length), np.int32)
    positions = np.zeros((rows, length), np.int32)
    for row in range(rows):
        first = 1 if row == 1 else int(rng.integers(2, length // 2 + 2))
        second = 0 if row == 1 else int(rng.integers(0, length - first + 1))
        for number, start, size in ((1, 0, first), (2, first, second)):
            segment_ids[row, start : start + size] = number
            positions[row, start : start + size] = np.arange(size)
    batch = {
        "tokens": rng.integers(1, 32, (rows, length)).astype(np.int32),
        "targets": rng.integers(1, 32, (rows, length)).astype(np.int32),
        "loss_weights": (segment_ids > 0).astype(np.float32),
        "segment_ids": segment_ids,
        "positions": positions,
    }
    if prefix:
        batch["bidirectional"] = ((positions < prefix) & (segment_ids > 0)).astype(np.int32)
    return batch


def whole_rows(tokens: Any) -> dict[str, Any]:
    """A batch in which every row is one document without padding."""
    tokens = np.asarray(tokens, np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_weights": np.ones(tokens.shape, np.float32),
        "segment_ids": np.ones(tokens.shape, np.int32),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
    }


@functools.cache
def describe(config: ModelConfig, layout: Layout) -> Any:
    return Transformer(config).parameters(layout)


def draw(config: ModelConfig, layout: Layout, seed: int = 0) -> Any:
    """Random parameters; quicker than `Transformer.init`, which compiles for seconds."""
    rng = np.random.default_rng(seed)

    def value(name: str, parameter: Any) -> Any:
        noise = 0.25 * rng.normal(size=parameter.value.shape)
        return (noise + name.endswith("scale")).astype(parameter.value.dtype)

    return map_named(value, describe(config, layout), is_leaf=is_parameter)


def draw_biases(config: ModelConfig, layout: Layout, seed: int = 0) -> Any:
    """Random biases of routers; None if the model has none."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: (0.2 * rng.normal(size=p.value.shape)).astype(np.float32),
        Transformer(config).router_bias(layout),
        is_leaf=is_parameter,
    )


def boxed(module: nn.Module, *args: Any) -> Any:
    """The `Parameter`s of a module, with initial values."""
    return jit(module.init)(jax.random.key(0), *args)["params"]


def unboxed(module: nn.Module, *args: Any) -> Any:
    """Initial values of a module."""
    return jax.tree.map(lambda p: p.value, boxed(module, *args), is_leaf=is_parameter)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Compares trees, each leaf relative to its largest value (rounding is not elementwise)."""
    assert not differences(actual, expected)
    pairs = zip(flatten_named(actual), jax.tree.leaves(expected), strict=True)
    for (name, a), e in pairs:
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.isfinite(e).all(), name
        np.testing.assert_allclose(
            a, e, rtol=0, atol=tolerance * max(np.abs(e).max(initial=0.0), 1e-30), err_msg=name
        )


def assert_equal(actual: Any, expected: Any) -> None:
    """Compares trees bit for bit."""
    assert not differences(actual, expected)
    pairs = zip(flatten_named(actual), jax.tree.leaves(expected), strict=True)
    for (name, a), e in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e), err_msg=name)


@functools.cache
def logits_fn(config, layout):
    model = Transformer(config)
    return jit(lambda params, batch, key=None: model.apply(params, batch, layout, key).logits)


@functools.cache
def loss_fn(config, layout):
    """Jits (params, batch) -> ((total loss, output), gradients)."""
    model = Transformer(config)

    def loss(params, batch):
        output = model.apply(params, batch, layout)
        scores = jax.nn.log_softmax(output.logits)
        score = jnp.take_along_axis(scores, batch["targets"][..., None], -1)[..., 0]
        cross_entropy = -(score * batch["loss_weights"]).sum() / batch["loss_weights"].sum()
        return cross_entropy + router_loss(output.router, config.moe), output

    return jit(jax.value_and_grad(loss, has_aux=True))
