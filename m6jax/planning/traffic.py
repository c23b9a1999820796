"""Bytes that a step moves: between host and device, and between devices.

**Host.** What the two steps do with a weight that rests on the host, W being its bytes:

    streamed    read twice by each use and once in vain (the last prefetch), written once:
                3 W + one layer where every layer is used once; UNROLLED 3 W - one layer, since the
                last one stays for the way back
    ordinary    read forward, read backward, gradient out, gradient in for the norm and for the
                update, weight in and out: 7 W. Shared layers (U < L) come to the device once a
                pass, and their gradient stays there: 5 W

With m microbatches the ordinary step moves (4 m + 2) W, or (3 m + 2) W for shared layers. Optimizer
state, averages and masters come and go once; kept inputs go and come once.

**Devices.** Collectives that follow from the shardings; the compiler may do with less:

    all-to-all      rows of the experts' buffers, dispatch and combine, in each pass
    all-reduce      gradients, over the mesh axes of rows that do not cut the weight, once a use;
                    activations [B, T, M] where heads, FFN width or vocabulary are cut
    all-gather      fully sharded weights in each pass; the router's kernel over its experts
    reduce-scatter  the gradients of fully sharded weights

Weights and gradients travel in the type of the arithmetic. Bytes are those of the larger of operand
and result on one device. Each collective is one over certain mesh axes: what it takes depends on
the links between their devices, see `links`.

Axis letters: B rows, T length, M width (embed), L layers, U distinct layers.
"""

import collections
import math

import jax
import jax.numpy as jnp

from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import mesh_axes
from m6jax.layouts import Form, LeafName, offload
from m6jax.modeling.config import LayerKind
from m6jax.planning.estimate import Collective
from m6jax.planning.flops import recomputed
from m6jax.planning.stages import StageShapes, layers_held, local_bytes

MeshAxes = tuple[str, ...]
Sizes = collections.defaultdict[tuple[str, MeshAxes], float]

# Of a state: what an update reads and writes once, and nothing else looks at.
_ONCE = ("opt_state/", "extra/")


def host_traffic(shapes: StageShapes) -> int:
    """Returns the bytes of one device that a step copies between host and device."""
    moved = 0.0
    for name, leaf in pytrees.flatten_named(shapes.state):
        if offload.on_host(leaf):
            times = 2.0 if name.startswith(_ONCE) else _weight_trips(shapes, name, leaf)
            moved += times * local_bytes(leaf)
    if shapes.plan.activations:
        moved += 2 * shapes.microbatches * shapes.model.num_blocks * input_bytes(shapes)
    return round(moved)


def input_bytes(shapes: StageShapes) -> int:
    """Returns the bytes of one device's part of [B, T, M], of a microbatch."""
    size = jnp.dtype(shapes.model.dtype).itemsize
    return shapes.local_tokens * shapes.model.embed_dim * size


def _weight_trips(shapes: StageShapes, name: str, leaf: jax.ShapeDtypeStruct) -> float:
    """Returns how often a step moves a weight that rests on the host."""
    repeats = shapes.layout.repeats_of(name)
    if shapes.plan.streamed:
        if shapes.layout.form is Form.UNROLLED:
            return 2 if shapes.layout.depth - 1 in shapes.layout.layers_of(name) else 3
        in_vain = 1
        run = LeafName.of(name).run
        if run is not None and run.first + run.length < shapes.layout.depth:
            in_vain += 1  # what the forward pass has fetched is gone before the way back
        return 2 * repeats + in_vain / layers_held(name, leaf) + 1
    m = shapes.microbatches
    if repeats > 1:
        return 3 * m + 2
    return 7 if m == 1 else 4 * m + 2


def collectives(shapes: StageShapes) -> tuple[Collective, ...]:
    """Returns the collectives of one device in a step, by kind and mesh axes."""
    total: Sizes = collections.defaultdict(float)
    _weights(shapes, total)
    for i, kind in enumerate(shapes.model.pattern):
        _layer(shapes, i, kind, total)
    if shapes.cut("vocab") > 1:
        # The head's gradient by its input; and the rows of a table that is cut by token.
        table = 1 if shapes.partitioning.weight_rules["vocab"] else 0
        size = (1 + table) * shapes.microbatches * input_bytes(shapes)
        total["all-reduce", shapes.axes_of("vocab")] += size
    return tuple(Collective(*key, round(size)) for key, size in sorted(total.items()) if size)


def _weights(shapes: StageShapes, total: Sizes) -> None:
    """Adds gathers of weights and reductions of their gradients."""
    rules = shapes.partitioning.weight_rules
    rows = shapes.axes_of("batch")
    gathered = set(rules["embed"]) - set(shapes.partitioning.activation_rules["embed"])
    size = jnp.dtype(shapes.model.dtype).itemsize
    m = shapes.microbatches
    router_passes = 1 + recomputed(shapes.model, shapes.plan.streamed, 0).get("router", 0.0)
    for name, leaf in pytrees.flatten_named(shapes.state.params):
        assert leaf.sharding is not None  # described with shardings
        cut = {axis for entry in leaf.sharding.spec for axis in mesh_axes(entry)}
        uses = shapes.layout.repeats_of(name) * m
        bytes_ = math.prod(leaf.sharding.shard_shape(leaf.shape)) * size
        over = shapes.in_mesh_order(cut & gathered)
        if over:
            whole = bytes_ * math.prod(shapes.mesh.shape[axis] for axis in over)
            total["all-gather", over] += 2 * uses * whole
            total["reduce-scatter", over] += uses * whole
        if "/router/" in name and (experts := shapes.cut("expert")) > 1:
            gathered_kernel = router_passes * uses * local_bytes(leaf) * experts
            total["all-gather", shapes.axes_of("expert")] += gathered_kernel
        if missing := shapes.in_mesh_order(set(rows) - cut):
            total["all-reduce", missing] += uses * bytes_


def _layer(shapes: StageShapes, i: int, kind: LayerKind, total: Sizes) -> None:
    """Adds what the activations of layer i of the pattern ask for."""
    model = shapes.model
    again = recomputed(model, shapes.plan.streamed, i)
    uses = model.num_blocks * shapes.microbatches
    x = input_bytes(shapes)
    if shapes.cut("heads") > 1:
        # Forward (and again) the sum over heads; backward one for query, key and value each.
        sums = uses * x * (4 + again.get("attention", 0.0))
        total["all-reduce", shapes.axes_of("heads")] += sums
    if shapes.cut("mlp") > 1 and kind is LayerKind.SPARSE:
        sums = uses * x * (2 + again.get("experts", 0.0))
        total["all-reduce", shapes.axes_of("mlp")] += sums
    elif shapes.cut("mlp") > 1:
        inward = 2 if model.gated_mlp else 1
        sums = uses * x * (1 + inward + again.get("mlp_down", 0.0))
        total["all-reduce", shapes.axes_of("mlp")] += sums
    if kind is LayerKind.SPARSE and shapes.cut("expert") > 1:
        passes = 2 + again.get("experts", 0.0)
        sent = 2 * passes * uses * x * shapes.expert_rows
        total["all-to-all", shapes.axes_of("expert")] += sent
