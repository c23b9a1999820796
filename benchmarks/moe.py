"""One sparse layer, forward and backward, against its own expert products.

    python benchmarks/moe.py                                   prints one JSON line
    python benchmarks/moe.py --experts 64 --prototypes 16
    python benchmarks/moe.py --dispatch dropless
    python benchmarks/moe.py --mesh 1,8,1                      on emulated devices
    python benchmarks/moe.py --topology v5p:8x8x8              a pod's program, see `pod_program`

`fraction_of_matmul_rate` is the time of the experts' batched products alone (forward and both
gradients, at the shapes of the layer's buffers; for dropless those of an even load) over the time
of the layer. `outside_experts_share` is the share of the layer's time that is not the experts'
feed-forward, products and activation: routing, sorting, moving and putting together.
`times_capacity` (for dropless) is the layer's time over that of the same layer with
`capacity_factor`. All are timed in turns.
"""

import argparse
import json

import jax
import jax.numpy as jnp
import pod_program
import timing

from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.modeling.config import MoEConfig
from m6jax.modeling.dispatch import capacity_of
from m6jax.modeling.layers import ffn_hidden
from m6jax.modeling.moe import MoE


def main() -> None:
    options = _options()
    if options.topology:
        print(json.dumps(pod_program.measure(options.topology, options.layers)))
        return
    data, expert, model = (int(size) for size in options.mesh.split(","))
    jax.config.update("jax_num_cpu_devices", data * expert * model)
    print(json.dumps(_measure(options, Partitioning(data=data, expert=expert, model=model))))


def _measure(options: argparse.Namespace, partitioning: Partitioning) -> dict[str, float]:
    products = _products(options)
    contenders = products | {
        "layer": _layer(options, options.dispatch, partitioning),
        "experts": _experts(options),
    }
    if options.dispatch == "dropless":
        contenders["capacity"] = _layer(options, "capacity", partitioning)
    seconds = timing.in_turns(contenders, options.rounds)
    middle = {name: timing.median(times) for name, times in seconds.items()}
    alone = sum(middle[name] for name in products)
    result = {
        "layer_ms": round(1e3 * middle["layer"], 2),
        "layer_ms_min": round(1e3 * min(seconds["layer"]), 2),
        "fraction_of_matmul_rate": round(alone / middle["layer"], 3),
        "outside_experts_share": round(1 - middle["experts"] / middle["layer"], 3),
    }
    if "capacity" in middle:
        result["times_capacity"] = round(middle["layer"] / middle["capacity"], 3)
    return result | {"peak_rss_mb": round(timing.peak_rss_mb(), 1)}


def _layer(options: argparse.Namespace, dispatch: str, partitioning: Partitioning):
    """Returns a call that runs the layer, and its gradients to weights and input, on a mesh."""
    settings = _settings(options, options.capacity_factor if dispatch == "capacity" else None)
    dtype = jnp.dtype(options.dtype)
    layer = MoE(settings, options.mlp, False, 1.0, dtype, dtype)
    x = jax.random.normal(jax.random.key(0), (options.rows, _length(options), options.embed), dtype)
    mask = jnp.ones(x.shape[:2], bool)
    boxed = jax.jit(layer.init)(jax.random.key(1), x, mask, None)["params"]
    cotangent = jax.random.normal(jax.random.key(2), x.shape, dtype)
    mesh = partitioning.make_mesh()
    shardings = partitioning.weight_shardings(boxed, mesh)
    params = jax.tree.map(lambda p: p.value, boxed, is_leaf=is_parameter)
    params = jax.device_put(params, shardings)
    x, cotangent = jax.device_put((x, cotangent), partitioning.batch_sharding(mesh))

    def call(params, x, cotangent):
        def run(params, x):
            output = layer.apply({"params": params}, x, mask, None)
            return output.x, output.router

        y, pullback, router = jax.vjp(run, params, x, has_aux=True)
        return y, pullback(cotangent), router

    with partitioning.activate(mesh):
        compiled = jax.jit(call).lower(params, x, cotangent).compile()
    return lambda: compiled(params, x, cotangent)


def _experts(options: argparse.Namespace):
    """Returns a call that runs the experts' feed-forward and its gradients on full buffers."""
    (_, rows, up), (_, _, down) = _shapes(options)
    weights = {"up": jnp.ones(up, options.dtype), "down": jnp.ones(down, options.dtype)}

    def run(weights, x):
        y = ffn_hidden(x, weights, lambda a, w: jnp.einsum("ecm,emh->ech", a, w))
        return jnp.einsum("ech,ehm->ecm", y, weights["down"])

    @jax.jit
    def call(weights, x, cotangent):
        y, pullback = jax.vjp(run, weights, x)
        return y, pullback(cotangent)

    x = jax.random.normal(jax.random.key(0), rows, options.dtype)
    return lambda: call(weights, x, x)


def _products(options: argparse.Namespace):
    return {
        names: timing.product_with_gradients(names, left, right, options.dtype)[0]
        for names, left, right in _shapes(options)
    }


def _shapes(options: argparse.Namespace):
    """Returns (einsum, rows, matrices) of both products of all experts."""
    E, M, H = options.experts, options.embed, options.mlp
    Q = options.prototypes * options.selected
    if options.dispatch == "dropless":
        rows = options.tokens * Q // E
    else:
        mode = _settings(options, options.capacity_factor).capacity_mode
        length = _length(options)
        rows = options.rows * capacity_of(mode, options.capacity_factor, length, Q, E)
    return ("ecm,emh->ech", (E, rows, M), (E, M, H)), ("ech,ehm->ecm", (E, rows, H), (E, H, M))


def _settings(options: argparse.Namespace, capacity_factor: float | None) -> MoEConfig:
    return MoEConfig(
        num_experts=options.experts,
        num_prototypes=options.prototypes,
        num_selected_experts=options.selected,
        capacity_factor=capacity_factor,
    )


def _length(options: argparse.Namespace) -> int:
    return options.tokens // options.rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {
        "tokens": 2048, "rows": 8, "embed": 256, "mlp": 1024, "experts": 8, "prototypes": 1,
        "selected": 1, "capacity_factor": 1.25, "dtype": "float32", "mesh": "1,1,1", "rounds": 20,
        "topology": "", "layers": 24,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--dispatch", choices=["capacity", "dropless"], default="capacity")
    return parser.parse_args()


if __name__ == "__main__":
    main()
