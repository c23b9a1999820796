"""What a step keeps on the device besides the state: a model of the compiler's memory at its peak.

The state is exact; this is not. The parts, each of one device and one microbatch:

    activations   what waits for the backward pass: for each block its input [B, T, M], for each
                  sparse layer the numbers of the chosen experts; with Remat.NOTHING everything of
                  `layer_bytes`, with ALL_BUT_PRODUCTS the products of attention, router and dense
                  FFN; and the batch
    gradients     ordinary step: of all weights, where the weights rest (with microbatches or
                  repeated units there are two sets, the sum and the next part's). Streamed step:
                  of one layer, and float32 sums of the unit where it is repeated
    temporaries   the larger of head and layer:
                  head    two chunks of float32 logits, and the head's float32 gradient
                  layer   everything of `layer_bytes` of one layer, as much as its experts' rows
                          once more, and copies of weights: two layers of those on the host, one
                          layer in the type of the arithmetic, one whole layer where it is gathered

Dropless experts are counted with the rows that they get, all devices alike.

Axis letters: B rows, T length, M width (embed), H FFN width (mlp), N heads, J heads of keys and
values, D head size, V vocabulary, E experts.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp

from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import mesh_axes
from m6jax.layouts import LeafName, offload
from m6jax.modeling.config import LayerKind, Remat
from m6jax.planning.stages import (
    StageShapes,
    layers_held,
    local_bytes,
)
from m6jax.planning.traffic import input_bytes

FLOAT32 = 4
Sizes = collections.defaultdict[str, float]


@dataclasses.dataclass(frozen=True)
class Working:
    """Bytes of one device besides the state, by memory."""

    gradients: int
    host_gradients: int
    activations: int
    host_activations: int
    temporaries: int


def working_memory(shapes: StageShapes) -> Working:
    """Returns what the step needs besides its state at its peak."""
    gradients, host_gradients = _gradients(shapes)
    kept = _kept(shapes) + _choices(shapes)
    inputs = shapes.model.num_blocks * input_bytes(shapes)
    on_host = inputs if shapes.plan.activations else 0
    return Working(
        gradients=gradients,
        host_gradients=host_gradients,
        activations=round(kept + inputs - on_host) + _batch(shapes),
        host_activations=on_host,
        temporaries=round(max(_head(shapes), _layer(shapes))),
    )


def layer_bytes(shapes: StageShapes, kind: LayerKind) -> float:
    """Returns what one layer makes that its backward pass looks at, without its input."""
    model, n, size = shapes.model, shapes.local_tokens, jnp.dtype(shapes.model.dtype).itemsize
    heads = shapes.cut("heads")
    scores = n * shapes.length * model.num_heads / heads
    total = size * (3 * n * model.embed_dim + n * model.num_heads * model.head_size / heads)
    total += _projections(shapes) + size * scores
    hidden = (3 if model.gated_mlp else 2) * model.mlp_dim / shapes.cut("mlp")
    if kind is LayerKind.DENSE:
        return total + size * n * hidden
    moe = model.moe
    assert moe is not None  # ModelConfig.check
    rows = n * shapes.expert_rows
    total += size * rows * (hidden + 2 * model.embed_dim) + 2 * FLOAT32 * n * moe.num_experts
    return total + size * n * hidden * moe.num_shared_experts


def _projections(shapes: StageShapes) -> float:
    model, size = shapes.model, jnp.dtype(shapes.model.dtype).itemsize
    width = (model.num_heads + 2 * model.kv_heads) * model.head_size / shapes.cut("heads")
    return size * shapes.local_tokens * width


def _kept(shapes: StageShapes) -> float:
    """Returns what waits for the backward pass besides the blocks' inputs."""
    model, n = shapes.model, shapes.local_tokens
    if shapes.plan.streamed or model.remat is Remat.FULL:
        return 0.0
    if model.remat is Remat.NOTHING:
        return model.num_blocks * sum(layer_bytes(shapes, kind) for kind in model.pattern)
    size = jnp.dtype(model.dtype).itemsize
    hidden = (2 if model.gated_mlp else 1) * model.mlp_dim / shapes.cut("mlp")
    kept = 0.0
    for kind in model.pattern:
        kept += _projections(shapes) + size * n * model.embed_dim
        if kind is LayerKind.DENSE:
            kept += size * n * (hidden + model.embed_dim)
        elif model.moe is not None:
            kept += FLOAT32 * n * model.moe.num_experts
            kept += size * n * (hidden + model.embed_dim) * model.moe.num_shared_experts
    return model.num_blocks * kept


def _choices(shapes: StageShapes) -> int:
    """Returns the bytes of the numbers of the chosen experts, which every layer keeps."""
    moe, kinds = shapes.model.moe, shapes.model.pattern
    if moe is None:
        return 0
    choices = moe.num_prototypes * moe.num_selected_experts
    return (
        4 * shapes.local_tokens * choices * kinds.count(LayerKind.SPARSE) * shapes.model.num_blocks
    )


def _gradients(shapes: StageShapes) -> tuple[int, int]:
    """Returns the bytes of gradients that exist together, on the device and on the host."""
    device = host = sums = 0.0
    of_layer: Sizes = collections.defaultdict(float)
    sets = 2 if shapes.microbatches > 1 else 1
    for name, leaf in pytrees.flatten_named(shapes.state.params):
        own, repeats, key = (
            local_bytes(leaf),
            shapes.layout.repeats_of(name),
            LeafName.of(name).layer_key,
        )
        if shapes.plan.streamed and key is not None:
            of_layer[key] += own / layers_held(name, leaf)
            sums += own / leaf.dtype.itemsize * FLOAT32 if repeats > 1 else 0
        elif offload.on_host(leaf) and repeats == 1:
            host += own
            device += own if sets == 2 else 0
        else:
            device += own * (2 if repeats > 1 else sets)
    return round(device + sums + max(of_layer.values(), default=0)), round(host)


def _batch(shapes: StageShapes) -> int:
    """Returns the bytes of a whole batch: five numbers a position, six with patches."""
    model, positions = shapes.model, shapes.local_tokens * shapes.microbatches
    if model.patch_dim is None:
        return 6 * FLOAT32 * positions
    patches = positions // shapes.length * shapes.patches
    return FLOAT32 * (7 * positions + patches * model.patch_dim)


def _head(shapes: StageShapes) -> float:
    model, length = shapes.model, shapes.length
    chunks = -(-length // shapes.experiment.loss.chunk_length)
    positions = shapes.local_tokens // length * -(-length // chunks)
    return FLOAT32 * model.vocab_size * (2 * positions + model.embed_dim) / shapes.cut("vocab")


def _layer(shapes: StageShapes) -> float:
    model, size = shapes.model, jnp.dtype(shapes.model.dtype).itemsize
    work = max(layer_bytes(shapes, kind) for kind in set(model.pattern))
    if LayerKind.SPARSE in model.pattern:
        work += 2 * size * shapes.local_tokens * shapes.expert_rows * model.embed_dim
    scores = shapes.local_tokens * shapes.length * model.num_heads / shapes.cut("heads")
    return work + 2 * FLOAT32 * scores + _weight_copies(shapes)


def _weight_copies(shapes: StageShapes) -> float:
    """Returns the bytes of copies of weights that the work of one layer needs."""
    axes = shapes.partitioning.weight_rules["embed"]
    size = jnp.dtype(shapes.model.dtype).itemsize
    of_layer: Sizes = collections.defaultdict(float)
    for name, leaf in pytrees.flatten_named(shapes.state.params):
        key = LeafName.of(name).layer_key
        if key is None:
            continue
        held = layers_held(name, leaf)
        own = local_bytes(leaf) / held
        if offload.on_host(leaf):
            whole_unit = not shapes.plan.streamed and shapes.layout.repeats_of(name) > 1
            of_layer[key] += own * (held if whole_unit else 2)
        parts = _gathered(shapes, leaf, axes)
        if parts > 1 or leaf.dtype.itemsize != size:
            of_layer[key] += own / leaf.dtype.itemsize * size * parts
    return max(of_layer.values(), default=0.0)


def _gathered(shapes: StageShapes, leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
    """Returns by how much a weight grows when it is gathered over the mesh axes of `embed`."""
    spec = leaf.sharding.spec  # type: ignore[union-attr]
    kept = shapes.partitioning.activation_rules["embed"]
    parts = 1
    for entry in spec:
        for axis in mesh_axes(entry):
            parts *= shapes.mesh.shape[axis] if axis in axes and axis not in kept else 1
    return parts
