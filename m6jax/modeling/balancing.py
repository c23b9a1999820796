"""Balancing without a loss: biases that move against the load of their experts.

A router with `bias_rate` r chooses by score + bias. After a step in which the four experts of a
layer got 6, 2, 4 and 4 choices (4 in the mean), their biases change by -r, +r, 0, 0
(arXiv 2408.15664, algorithm 1). All microbatches, devices and uses of a shared layer count.

Biases are no parameters: the training state keeps them in `extra.router_bias`, a tree that mirrors
the parameters'. For a pass they are joined with these, and every layer finds its own:

    {"layers": {"moe": {"router": {"bias": ...}}}}      [U, E]; [E] in every `layers_i`

Axis letters: E experts, U distinct layers, L sparse layers in order of use.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from m6jax import layouts
from m6jax.foundation.pytrees import Tree
from m6jax.layouts import Form, Layout
from m6jax.modeling.config import LayerKind, ModelConfig

ROUTER, BIAS = "router", "bias"
COLLECTION = "router_bias"  # of flax variables


def join(params: Tree, biases: Tree | None) -> Tree:
    """Returns the tree that the model computes with, of parameters and biases if there are any."""
    if biases is None:
        return params
    if not isinstance(biases, dict):
        return biases
    return params | {name: join(params.get(name, {}), part) for name, part in biases.items()}


def split(tree: Tree) -> tuple[Tree, Tree | None]:
    """The inverse of `join`: parameters, and biases or None."""
    params, biases = {}, {}
    for name, part in tree.items():
        if name == ROUTER and BIAS in part:
            biases[name] = {BIAS: part[BIAS]}
            params[name] = {key: value for key, value in part.items() if key != BIAS}
            continue
        inner = None
        if isinstance(part, dict):
            part, inner = split(part)
        params[name] = part
        if inner is not None:
            biases[name] = inner
    return params, biases or None


def variables(tree: Tree) -> dict[str, Tree]:
    """Returns a joined tree as flax's collections of variables: `params`, `router_bias` if any."""
    params, biases = split(tree)
    return {"params": params} | ({} if biases is None else {COLLECTION: biases})


def moved(biases: Tree, chosen: Float[Array, "L E"], config: ModelConfig, layout: Layout) -> Tree:
    """Returns the biases after a step.

    Args:
      biases: before.
      chosen: float32[L, E], how often the experts of each use were chosen in the whole batch.
      config: of the model.
      layout: how the stack lies.
    """
    assert config.moe is not None  # it has biases
    rate = config.moe.router.bias_rate
    kinds = config.pattern
    places = [i for i, kind in enumerate(kinds) if kind is LayerKind.SPARSE]
    by_use = chosen.reshape(layout.depth, len(places), -1)

    def of_block(block: Tree, loads: Float[Array, "uses sparse E"]) -> Tree:
        """Moves the biases of some layers, by float32[uses, sparse layers of a block, E]."""
        layers = {config.layer_name(i): loads[:, n] for n, i in enumerate(places)}
        if len(kinds) == 1:
            return _moved(block, layers[config.layer_name(0)], rate)
        return {name: _moved(block[name], load, rate) for name, load in layers.items()}

    _, stack = layouts.split_stack(biases, layout)
    if layout.borders:
        runs = {run.key: of_block(stack[run.key], by_use[run.layers]) for run in layout.runs}
        return layouts.join_stack({}, runs, layout)
    if layout.form is Form.STACKED:
        return layouts.join_stack({}, of_block(stack, by_use), layout)
    blocks = [of_block(block, by_use[i : i + 1]) for i, block in enumerate(stack)]
    return layouts.join_stack({}, blocks, layout)


def _moved(biases: Tree, by_use: Float[Array, "uses E"], rate: float) -> Any:
    def move(bias: Float[Array, "*U E"]) -> Float[Array, "*U E"]:
        load = by_use.reshape(-1, *bias.shape).sum(0)  # [U, E], or [E] of an unrolled layer
        return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)

    return jax.tree.map(move, biases)
