"""Bytes that a step moves between a device's memory and its arithmetic, a bound from below.

    weights       what products read of them, and the gradients that products write
    activations   every other operand and result of a product: each is read or written once
    update        the state read and written, its gradients read for the norm and for the update
    host copies   what comes from the host is written, what goes there is read
    collectives   the larger of what each reads and writes

All that lies between two products is taken to happen on the way from one to the other. A product of
[n, a] with [a, b] moves n a + a b + n b numbers, and so does each of the two that its backward pass
has; how often each is made is what `flops` counts. With n = 8 positions, an FFN of two matrices of
64 x 256 in float32 moves, forward,

    weights       2 x 64 x 256 x 4 bytes
    activations   2 x 8 x (64 + 256) x 4 bytes

so that few tokens for many weights wait for weights: an expert's matrix is read once, however few
rows it has.

Axis letters: T length, M width (embed), H FFN width (mlp), N heads, J heads of keys and values,
D head size, V vocabulary, E experts, Q experts of a token, F features of a patch.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from m6jax.modeling.config import LayerKind
from m6jax.planning.activations import FLOAT32
from m6jax.planning.estimate import Collective
from m6jax.planning.flops import passes_of
from m6jax.planning.stages import StageShapes, local_bytes


@dataclasses.dataclass(frozen=True)
class Touched:
    """Bytes that one pass of products moves on one device.

    Attributes:
      position: operands and results for one position, weights left out.
      weights: for any number of positions.
    """

    position: float
    weights: float = 0.0


def device_traffic(
    shapes: StageShapes, host_traffic: int, collectives: Iterable[Collective]
) -> dict[str, int]:
    """Returns the bytes of one device in one step, by what they are for.

    Args:
      shapes: the stage.
      host_traffic: bytes that the step copies between host and device.
      collectives: of the step.
    """
    weights, activations = _products(shapes)
    state = sum(map(local_bytes, jax.tree.leaves(shapes.state)))
    gradients = sum(map(local_bytes, jax.tree.leaves(shapes.state.params)))
    return {
        "weights": round(weights),
        "activations": round(activations),
        "update": 2 * state + 2 * gradients,
        "host copies": host_traffic,
        "collectives": sum(collective.bytes for collective in collectives),
    }


def _products(shapes: StageShapes) -> tuple[float, float]:
    """Returns the bytes of weights and of activations that all products move."""
    model, n, m = shapes.model, shapes.local_tokens, shapes.microbatches
    uses = model.num_blocks * m
    weights = activations = 0.0
    for i, kind in enumerate(model.pattern):
        passes = passes_of(model, shapes.plan.streamed, i)
        for part, touched in _layer(shapes, kind).items():
            weights += uses * passes[part] * touched.weights
            activations += uses * passes[part] * touched.position * n
    for times, positions, touched in _outside(shapes):
        weights += m * times * touched.weights
        activations += m * times * positions * touched.position
    return weights, activations


def _layer(shapes: StageShapes, kind: LayerKind) -> dict[str, Touched]:
    """Returns what the parts of a layer move, named as `flops` names them."""
    model, size = shapes.model, jnp.dtype(shapes.model.dtype).itemsize
    M, D = model.embed_dim, model.head_size
    heads = shapes.cut("heads")
    N, J = model.num_heads / heads, model.kv_heads / heads
    width = (2 * N + 2 * J) * D
    parts = {
        "attention": Touched(size * (4 * M + width), size * M * width),
        "scores": Touched(size * (width + 2 * N * shapes.length)),
    }
    matrices = 3 if model.gated_mlp else 2
    H = model.mlp_dim / shapes.cut("mlp")
    if kind is LayerKind.DENSE:
        return parts | _dense(size, M, H, matrices)
    moe = model.moe
    assert moe is not None  # ModelConfig.check
    E, Q = moe.num_experts, moe.num_prototypes * moe.num_selected_experts
    parts["experts"] = Touched(
        size * matrices * shapes.expert_rows * (M + H),
        size * matrices * M * H * E / shapes.cut("expert"),
    )
    parts["combine"] = Touched(size * (Q * M + Q + M))
    if moe.router.learned:
        parts["router"] = Touched(FLOAT32 * (M + E), FLOAT32 * M * E)
    if moe.num_shared_experts:
        parts |= _dense(size, M, H * moe.num_shared_experts, matrices)
    return parts


def _dense(size: int, M: int, H: float, matrices: int) -> dict[str, Touched]:
    one = Touched(size * (M + H), size * M * H)
    inward = matrices - 1
    return {"mlp": Touched(inward * one.position, inward * one.weights), "mlp_down": one}


def _outside(shapes: StageShapes) -> list[tuple[float, float, Touched]]:
    """Returns passes, positions and bytes of the products before and after the layers."""
    model, size, length = shapes.model, jnp.dtype(shapes.model.dtype).itemsize, shapes.length
    M, V, n = model.embed_dim, model.vocab_size / shapes.cut("vocab"), shapes.local_tokens
    chunks = -(-length // shapes.experiment.loss.chunk_length)
    padded = n / length * chunks * -(-length // chunks)
    # Logits are float32; every chunk of them reads the table and adds to its gradient.
    found = [(3.0, padded, Touched(size * M + FLOAT32 * V, chunks * size * M * V))]
    if model.patch_dim is not None:
        patches = n / length * shapes.patches
        touched = Touched(size * (model.patch_dim + M), size * model.patch_dim * M)
        found.append((2.0, patches, touched))
    return found
