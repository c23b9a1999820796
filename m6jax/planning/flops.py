"""FLOPs of a step's matrix products, from the numbers of the model.

A product of [n, a] with [a, b] is 2 n a b. For each part of the model there are the FLOPs of one
forward pass of one position, and how often a training step makes them:

    forward 1, backward 2, and once more what is recomputed

What is recomputed follows from `ModelConfig.remat` and from the step (the streamed step always goes
forward through a layer again), less what nobody asks for: the last product of a dense layer is not
needed for any gradient. With d = 64, an FFN of 256 with two matrices and top-2 of 8 experts:

>>> forward_flops(...)["experts"], forward_flops(...)["router"]
(131072.0, 1024.0)

Element-wise work, norms, softmax and sorting are left out.

Axis letters: T length, M width (embed), H FFN width (mlp), N heads, J heads of keys and values,
D head size, V vocabulary, E experts, P prototypes, K experts chosen in a prototype, F features of a
patch, I patches of a row.
"""

from m6jax.modeling.config import CapacityMode, LayerKind, ModelConfig, MoEConfig, Remat
from m6jax.planning.stages import StageShapes

Parts = dict[str, float]

# Of a layer: products with its own matrices, scores and values of attention, and the FFN's.
PARTS = ("attention", "scores", "router", "experts", "combine", "mlp", "mlp_down")


def active_experts(moe: MoEConfig) -> float:
    """Returns how many experts a token really gets: P * K, or less where capacity is smaller."""
    choices = moe.num_prototypes * moe.num_selected_experts
    if moe.capacity_factor is None:
        return choices
    wanted = choices if moe.capacity_mode is CapacityMode.KX else 1
    return min(float(choices), wanted * moe.capacity_factor)


def forward_flops(
    model: ModelConfig, kind: LayerKind, length: int, expert_rows: float | None = None
) -> Parts:
    """Returns the FLOPs of one position in one layer, forward.

    Args:
      model: the network.
      kind: of the layer.
      length: T; every query meets all T keys, those that the mask hides too.
      expert_rows: rows of experts' buffers for a position; None: the experts that it really gets.
    """
    M, N, J, D = model.embed_dim, model.num_heads, model.kv_heads, model.head_size
    ffn = 2.0 * M * model.mlp_dim
    matrices = 3 if model.gated_mlp else 2
    parts: Parts = {
        "attention": 2.0 * M * D * (2 * N + 2 * J),
        "scores": 4.0 * length * N * D,
    }
    if kind is LayerKind.DENSE:
        return parts | {"mlp": (matrices - 1) * ffn, "mlp_down": ffn}
    moe = model.moe
    assert moe is not None  # ModelConfig.check
    rows = active_experts(moe) if expert_rows is None else expert_rows
    parts["experts"] = rows * matrices * ffn
    parts["combine"] = 2.0 * moe.num_prototypes * moe.num_selected_experts * M
    if moe.router.learned:
        parts["router"] = 2.0 * M * moe.num_experts
    if moe.num_shared_experts:
        shared = moe.num_shared_experts * ffn
        parts |= {"mlp": (matrices - 1) * shared, "mlp_down": shared}
    return parts


def recomputed(model: ModelConfig, streamed: bool, i: int) -> Parts:
    """Returns how often each part of layer i of the pattern is made again for the backward pass.

    Args:
      model: the network.
      streamed: whether the step is the streamed one, which goes forward through a block again
        before rematerialisation does.
      i: number of the layer in the pattern; the last one's output is not needed again.
    """
    output = 1.0 if i < len(model.pattern) - 1 or model.sandwich_norm else 0.0
    whole = dict.fromkeys(PARTS, 1.0) | {"combine": output, "mlp_down": output}
    if model.remat is Remat.NOTHING:
        return whole if streamed else {}
    if model.remat is Remat.FULL:
        return whole
    # Products of more than matrices (by head, by expert) are made again, the others are kept.
    again = {"scores": 1.0, "experts": 1.0, "combine": output}
    if not streamed:
        return again
    first = whole if output else whole | {"experts": 0.0}
    return {part: first[part] + again.get(part, 0.0) for part in PARTS}


def passes_of(model: ModelConfig, streamed: bool, i: int) -> Parts:
    """Returns how often a step makes the products of each part of layer i of the pattern.

    Args:
      model: the network.
      streamed: see `recomputed`.
      i: number of the layer in the pattern.
    """
    again = recomputed(model, streamed, i)
    # `combine` has one product backward; the other is element-wise.
    backward = dict.fromkeys(PARTS, 2.0) | {"combine": 1.0}
    return {part: 1.0 + backward[part] + again.get(part, 0.0) for part in PARTS}


def executed_flops(shapes: StageShapes) -> Parts:
    """Returns the FLOPs of one device in one step, by part, as they are executed."""
    model = shapes.model
    positions = shapes.local_tokens * shapes.microbatches
    heads, width = shapes.cut("heads"), shapes.cut("mlp")
    cuts = {"attention": heads, "scores": heads, "experts": width, "mlp": width, "mlp_down": width}
    parts: Parts = {}
    for i, kind in enumerate(model.pattern):
        rows = shapes.expert_rows if kind is LayerKind.SPARSE else None
        passes = passes_of(model, shapes.plan.streamed, i)
        for name, flops in forward_flops(model, kind, shapes.length, rows).items():
            flops *= passes[name] * model.num_blocks * positions / cuts.get(name, 1)
            parts[name] = parts.get(name, 0.0) + flops
    return parts | _outside(shapes, positions)


def model_flops(shapes: StageShapes) -> float:
    """Returns the FLOPs of one device in one step that the model asks for; MFU counts these.

    Forward and backward, without recomputation, and of the experts that a token really gets.
    """
    model = shapes.model
    positions = shapes.local_tokens * shapes.microbatches
    model_axis = shapes.devices // shapes.partitioning.rows_divisor(shapes.devices)
    layers = model.num_blocks * sum(
        sum(forward_flops(model, kind, shapes.length).values()) for kind in model.pattern
    )
    outside = 2.0 * model.embed_dim * model.vocab_size
    return 3.0 * positions * (layers + outside) / model_axis


def _outside(shapes: StageShapes, positions: int) -> Parts:
    """Returns the FLOPs of head and patches; the loss makes its gradient going forward, once."""
    model, length = shapes.model, shapes.length
    chunks = -(-length // shapes.experiment.loss.chunk_length)
    padded = chunks * -(-length // chunks) / length
    head = 2.0 * model.embed_dim * model.vocab_size * padded / shapes.cut("vocab")
    parts = {"head": 3.0 * head * positions}
    if model.patch_dim is not None:
        patches = positions / length * shapes.patches
        parts["patches"] = 2 * 2.0 * model.patch_dim * model.embed_dim * patches
    return parts
