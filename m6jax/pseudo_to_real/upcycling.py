"""From a dense model to a sparse one: every expert begins as a copy of the dense feed-forward.

"Sparse upcycling" (arXiv 2212.05055), a tree transform like delinking. With E experts:

    layers/mlp/up    [U, M, H]        layers/moe/up             [U, E, M, H]
    layers/mlp/down  [U, H, M]        layers/moe/down           [U, E, H, M]    times 1 / W
                                      layers/moe/router/kernel  [U, M, E]       drawn
    everything else                   as it was

All experts of a token are alike at first, so together they give the dense output times the sum W
of all its weights: P prototypes, each of whose weights sum to 1, and one for every shared expert.
With `down` divided by W the sparse model is the dense one at step 0, for every token that is
served. That holds where the weights of a prototype have a known sum:

* `normalize_weights` with a TopK router or TokenHash: 1;
* TopK with SOFTMAX that chooses all of a prototype's experts: 1;
* TokenHash otherwise: K.

>>> sparse = upcycle(params, dense_config, sparse_config, layout, jax.random.key(0))

Sparse layers may also be fewer: layers of a pattern (DENSE,) become rounds of (DENSE, SPARSE).

Axis letters: U distinct layers, E experts, P prototypes, K choices in a prototype, M width (embed),
H FFN width (mlp).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import is_parameter
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout
from m6jax.modeling import balancing
from m6jax.modeling.config import LayerKind, ModelConfig, MoEConfig
from m6jax.modeling.routers import Scores, TokenHash, TopK
from m6jax.modeling.transformer import Transformer
from m6jax.training.train_state import TrainState

DENSE, SPARSE = "mlp", "moe"  # as `Layer` names its feed-forward


class UpcyclingError(ValueError):
    """Parameters that are not the dense model's, or do not become the sparse one's."""


def upcycle(
    params: Tree,
    source: ModelConfig,
    target: ModelConfig,
    layout: Layout,
    key: jax.Array,
    keep_function: bool = True,
) -> Tree:
    """Returns the sparse model's parameters.

    Pure; works on arrays (under jit too, with the target's shardings) and on ShapeDtypeStructs with
    shardings, whose new axis of experts is not cut. Before or after `layouts.expand`.

    Args:
      params: of the dense model.
      source: the dense model.
      target: the sparse model: with other `pattern` and `moe`, else alike.
      layout: how the dense stack lies; the sparse one lies as `new_layout` says.
      key: for the routers, drawn as `Transformer.init` draws them.
      keep_function: refuse a target that is another function at step 0. Without it `down` is
        divided by P and the shared experts all the same.

    Raises:
      ConfigError: the patterns do not fit, or the function would not be kept.
      UpcyclingError: leaves of `params` that are not those of `source`, or, upcycled, not those of
        `target`; names them.
    """
    _check_patterns(source, target)
    _check_leaves(params, Transformer(source), layout, "the dense model has")
    scale = 1.0 / total_weight(target, keep_function)
    new, model = new_layout(source, target, layout), Transformer(target)
    rest, stack = layouts.split_stack(_regroup(params, source, target, layout), new)
    if layout.form is Form.STACKED:
        stack = _sparse_block(stack, target, scale, lead=1)
    else:
        stack = [_sparse_block(block, target, scale, lead=0) for block in stack]
    upcycled = layouts.join_stack(rest, stack, new)
    upcycled = balancing.join(_routers(model, new, key, like=params), upcycled)
    _check_leaves(upcycled, model, new, "the sparse model has")
    return upcycled


def upcycle_state(
    state: TrainState,
    source: ModelConfig,
    target: ModelConfig,
    layout: Layout,
    key: jax.Array,
    tx: optax.GradientTransformation,
    keep_function: bool = True,
) -> TrainState:
    """Returns the sparse model's state; see `upcycle`.

    Averages are upcycled like parameters. The optimizer keeps what it knows of the leaves that
    stay, and knows nothing of new ones, counts included. Biases of routers that were there stay,
    new ones are 0. Step and seed go on. Runs under jit with the target's shardings, and under
    eval_shape.

    Args:
      state: of the dense model.
      source: the dense model.
      target: the sparse model.
      layout: how the dense stack lies.
      key: for the routers.
      tx: the optimizer, built for the sparse model's axes.
      keep_function: see `upcycle`.
    """

    def convert(tree: Tree) -> Tree:
        return upcycle(tree, source, target, layout, key, keep_function)

    params = convert(state.params)
    known = dict(pytrees.flatten_named(_regroup(state.opt_state, source, target, layout)))
    opt_state = pytrees.map_named(lambda name, new: known.get(name, new), tx.init(params))
    biases = jax.tree.map(
        lambda p: jnp.zeros(p.value.shape, p.value.dtype),
        Transformer(target).router_bias(new_layout(source, target, layout)),
        is_leaf=is_parameter,
    )
    extra = state.extra.replace(  # type: ignore[attr-defined]
        averaged=None if state.extra.averaged is None else convert(state.extra.averaged),
        master=None if state.extra.master is None else convert(state.extra.master),
        router_bias=balancing.join(
            biases, _regroup(state.extra.router_bias, source, target, layout)
        ),
    )
    return state.replace(params=params, opt_state=opt_state, extra=extra)  # type: ignore[attr-defined]


def new_layout(source: ModelConfig, target: ModelConfig, layout: Layout) -> Layout:
    """Returns how the sparse stack lies.

    Raises:
      ConfigError: the unit cuts the target's pattern, or parts of a layer have units of their own.
    """
    if layout.parts:
        raise ConfigError(
            f"Stage.parts: {len(layout.parts)} parts with units of their own, but upcycling changes"
            " what a layer is made of (upcycle a stack with one unit, and delink parts later)"
        )
    return target.layout(layout.unit * len(source.pattern), layout.form)


def total_weight(target: ModelConfig, known: bool = True) -> float:
    """Returns W, what the weights of a token sum to.

    Args:
      target: the sparse model.
      known: refuse weights whose sum depends on the router; else take 1 for each prototype.

    Raises:
      ConfigError: the sum depends on the router.
    """
    moe = target.moe
    assert moe is not None  # ModelConfig.check
    in_prototype = _weight_in_prototype(moe)
    if in_prototype is None and known:
        raise ConfigError(
            f"MoEConfig.normalize_weights: with router = {type(moe.router).__name__} and"
            f" normalize_weights = {moe.normalize_weights} the weights of a token have no known"
            " sum, so the sparse model would not begin as the dense one (set normalize_weights ="
            " True with TopK or TokenHash, or upcycle with keep_function = False)"
        )
    return moe.num_prototypes * (in_prototype or 1.0) + moe.num_shared_experts


def _weight_in_prototype(moe: MoEConfig) -> float | None:
    if isinstance(moe.router, TokenHash):
        return 1.0 if moe.normalize_weights else float(moe.num_selected_experts)
    if not isinstance(moe.router, TopK):
        return None
    all_chosen = moe.num_selected_experts == moe.experts_per_prototype
    if moe.normalize_weights or (moe.router.scores is Scores.SOFTMAX and all_chosen):
        return 1.0
    return None


def _check_patterns(source: ModelConfig, target: ModelConfig) -> None:
    old, new = source.pattern, target.pattern
    if len(old) == 1:
        old = old * len(new)
    pairs = list(zip(old, new, strict=False))
    lost = (LayerKind.SPARSE, LayerKind.DENSE) in pairs
    gained = (LayerKind.DENSE, LayerKind.SPARSE) in pairs
    if len(old) != len(new) or lost or not gained:
        given = [f"({', '.join(kind.name for kind in c.pattern)})" for c in (source, target)]
        raise ConfigError(
            f"ModelConfig.pattern: {given[0]} cannot be upcycled to {given[1]} (some DENSE layers"
            " must become SPARSE, none the reverse, in rounds of the same length or from (DENSE))"
        )


def _check_leaves(params: Tree, model: Transformer, layout: Layout, what: str) -> None:
    described = jax.tree.map(lambda p: p.value, model.parameters(layout), is_leaf=is_parameter)
    lines = pytrees.differences(params, described)
    if lines:
        raise UpcyclingError(f"leaves (left) that differ from what {what}: {'; '.join(lines)}")


def _regroup(tree: Tree, source: ModelConfig, target: ModelConfig, layout: Layout) -> Tree:
    """Puts the layers of every stack in a tree in rounds of the target's pattern."""
    length = len(target.pattern)
    old_names = [source.layer_name(i) for i in range(len(source.pattern))]
    names = [target.layer_name(i) for i in range(length)]

    def rounds(node: dict[str, Any]) -> dict[str, Any]:
        rest, stack = layouts.split_stack(node, layout)
        if len(old_names) == length:
            renamed = dict(zip(old_names, names, strict=True))
            blocks = [stack] if layout.form is Form.STACKED else stack
            blocks = [{renamed.get(k, k): v for k, v in block.items()} for block in blocks]
            stack = blocks[0] if layout.form is Form.STACKED else blocks
        elif layout.form is Form.STACKED:
            stack = {
                name: jax.tree.map(lambda x, i=i: _each(x, lambda a: a[i::length], tuple), stack)
                for i, name in enumerate(names)
            }
        else:
            starts = range(0, layout.depth, length)
            stack = [dict(zip(names, stack[i : i + length], strict=True)) for i in starts]
        return layouts.join_stack(rest, stack, new_layout(source, target, layout))

    return jax.tree.map(
        lambda node: rounds(node) if layouts.has_layers(node) else node,
        tree,
        is_leaf=layouts.has_layers,
    )


def _sparse_block(block: dict[str, Any], target: ModelConfig, scale: float, lead: int) -> Tree:
    """Returns a round of the target's pattern from one with dense layers, but for its routers.

    Args:
      block: layers by name, or the one layer of a round of one.
      target: the sparse model.
      scale: factor on `down`.
      lead: number of axes before those of a single layer.
    """
    moe = target.moe
    assert moe is not None  # ModelConfig.check

    def experts(name: str, leaf: Any) -> Any:
        return _each(
            _scaled(name, leaf, scale),
            lambda x: jnp.repeat(jnp.expand_dims(x, lead), moe.num_experts, lead),
            lambda spec: (*spec[:lead], None, *spec[lead:]),
        )

    def shared(name: str, leaf: Any) -> Any:
        width = -2 if name == "down" else -1
        return _each(
            _scaled(name, leaf, scale),
            lambda x: jnp.concatenate([x] * moe.num_shared_experts, width),
            tuple,
        )

    def sparse(layer: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in layer.items() if key != DENSE}
        matrices = pytrees.map_named(experts, layer[DENSE])
        if moe.num_shared_experts:
            matrices["shared"] = pytrees.map_named(shared, layer[DENSE])
        return rest | {SPARSE: matrices}

    def layer(part: dict[str, Any], kind: LayerKind) -> dict[str, Any]:
        return sparse(part) if kind is LayerKind.SPARSE and DENSE in part else part

    if len(target.pattern) == 1:
        return layer(block, target.pattern[0])
    names = [target.layer_name(i) for i in range(len(target.pattern))]
    return {n: layer(block[n], kind) for n, kind in zip(names, target.pattern, strict=True)}


def _scaled(name: str, leaf: Any, scale: float) -> Any:
    if name != "down":
        return leaf
    return _each(leaf, lambda x: (x * scale).astype(x.dtype), tuple)


def _routers(model: Transformer, layout: Layout, key: jax.Array, like: Tree) -> Tree:
    """Returns the drawn routers of all sparse layers, or structs if `like` has structs."""

    def draw(key: jax.Array) -> Tree:
        return _only_routers(model.init(key, layout))

    leaf = jax.tree.leaves(like)[0]
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.jit(draw)(key)  # compiled, so that the experts are never drawn
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(draw, key),
    )


def _only_routers(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, part in tree.items():
        if name == balancing.ROUTER:
            kept[name] = part
        elif isinstance(part, dict) and (inner := _only_routers(part)):
            kept[name] = inner
    return kept


def _each(leaf: Any, fn: Callable[[Any], Any], spec: Callable[[Any], Any]) -> Any:
    """Applies `fn` to an array, or to the shape of a struct, and `spec` to where that lies."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return fn(leaf)
    shape = jax.eval_shape(fn, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)).shape
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        entries = (*sharding.spec, *(None,) * (len(leaf.shape) - len(sharding.spec)))
        sharding = sharding.update(spec=PartitionSpec(*spec(entries)))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
