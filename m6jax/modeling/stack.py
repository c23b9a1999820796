"""Applying a stack of layers, whatever its layout: the network never asks which.

Layer parameters are plain trees, so one function of (parameters of a layer, x, use) serves every
layout. A unit of U layers repeated R times is a scan over repeats around a scan over the unit:

    for repeat in range(R):            parameters stay, U x their gradients add up
        for layer in range(U):         parameters are sliced from the stack
            x = apply(layer, x, use = repeat * U + layer)

Leaves with units of their own make more such loops, one in another: with norms of all 8 layers,
attention of 4 and experts of 1, blocks of 8, 4 and 1 layers, each cutting its own leaves for the
blocks inside of it.

Weights that rest on the host (`offload`) are moved inside of the layer, so that one layer's are on
the device at a time; rematerialised layers move them again in the backward pass. A leaf that is
used several times is moved as a whole, once.

A stack that is cut in runs is a scan for each of them. Unrolled layers are a loop in Python. Only
this file, `streaming` and the flax module (`m6`), which has flax slice the parameters, scan over
layers.

Axis letters: B rows, T length, M width (embed), L layers, U distinct ones, R repeats.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from m6jax.layouts import Form, Layout, layer_slices, offload
from m6jax.modeling.config import Remat
from m6jax.modeling.routers import SAVED

Carry = Float[Array, "B T M"]
Use = Int[Array, ""]
ApplyLayer = Callable[[Any, Carry, Use, Any], tuple[Carry, Any]]


def rematerialize(
    apply_layer: Callable[..., Any],
    remat: Remat,
    in_scan: bool,
    inputs_on_host: bool = False,
) -> Callable[..., Any]:
    """Returns the function with the wanted part of a layer recomputed in the backward pass.

    Args:
      apply_layer: applies a layer, as in `apply_stack`; any arguments.
      remat: what is recomputed.
      in_scan: whether it is the body of a scan.
      inputs_on_host: keep a layer's input on the host; `remat` is FULL.
    """
    if remat is Remat.NOTHING:
        return apply_layer
    # Outside a scan the compiler would merge the recomputation with the forward pass again.
    return jax.checkpoint(
        apply_layer, policy=policy_of(remat, inputs_on_host), prevent_cse=not in_scan
    )


def policy_of(remat: Remat, inputs_on_host: bool) -> Any:
    """Returns the policy of `jax.checkpoint`: what of a layer is kept; see `rematerialize`."""
    if inputs_on_host:
        return and_choices(offload.inputs_on_host())
    policies = {
        Remat.FULL: jax.checkpoint_policies.nothing_saveable,
        Remat.ALL_BUT_PRODUCTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    return and_choices(policies[remat])


def and_choices(policy: Any) -> Any:
    """Returns the policy that also keeps which experts were chosen, a few integers a token.

    Recomputed bfloat16 activations are rounded otherwise than in the forward pass, and the scores
    that follow from them would choose other experts than the ones whose outputs were used.
    """
    chosen = jax.checkpoint_policies.save_only_these_names(SAVED)

    def keep(*args: Any, **params: Any) -> Any:
        return chosen(*args, **params) or policy(*args, **params)

    return keep


def apply_stack(
    apply_layer: ApplyLayer,
    params: Any,
    x: Carry,
    layout: Layout,
    extras: Any = None,
    remat: Remat = Remat.NOTHING,
    inputs_on_host: bool = False,
) -> tuple[Carry, Any]:
    """Applies all L layers.

    Args:
      apply_layer: (parameters of one layer, x, number of the use, extras of the use) ->
        (x, report of the layer).
      params: for STACKED the tree with leading axes U, or such a tree for each run by its key; for
        UNROLLED the list of L trees.
      x: input.
      layout: how `params` lie.
      extras: tree with leading axes L, what each use gets besides (a cache), or None.
      remat: what the backward pass recomputes.
      inputs_on_host: the layers' inputs wait for the backward pass on the host; needs FULL.

    Returns:
      The last layer's output, and what every layer reports: leaves with a leading axis L in order
      of use.
    """

    def fetch_and_apply(layer: Any, x: Carry, use: Use, extra: Any) -> Any:
        if inputs_on_host:
            x = offload.name_input(x)
        return apply_layer(offload.to_device(layer), x, use, extra)

    one = rematerialize(
        fetch_and_apply,
        remat,
        in_scan=layout.form is Form.STACKED,
        inputs_on_host=inputs_on_host,
    )
    if layout.form is Form.UNROLLED:
        reports = []
        for i, layer in enumerate(params):
            extra = jax.tree.map(lambda leaf, i=i: leaf[i], extras)
            x, report = one(layer, x, jnp.int32(i), extra)
            reports.append(report)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)

    uses = jnp.arange(layout.depth, dtype=jnp.int32)
    reports = []
    for run in layout.runs:
        own = params[run.key] if layout.borders else params
        by_use = (uses, extras)
        if layout.borders:
            by_use = jax.tree.map(lambda leaf, run=run: leaf[run.layers], by_use)
        x, report = _scan_layers(one, own, x, *by_use)
        reports.append(report)
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *reports)


def _scan_layers(
    one: ApplyLayer, params: Any, x: Carry, uses: Int[Array, " L"], extras: Any
) -> tuple[Carry, Any]:
    """Applies stacked layers in scans, one in another for each unit among their leaves.

    Args:
      one: see `apply_stack`.
      params: tree whose leaves have leading axes U, of which each divides the next larger one.
      x: input.
      uses: int32[L], numbers of the uses.
      extras: tree with leading axes L, or None.

    Returns:
      The output, and the reports with leading axes L.
    """
    # Sums of a leaf's gradients over its uses cannot be made on the host.
    params = jax.tree.map(
        lambda leaf: leaf if leaf.shape[0] == len(uses) else offload.to_device(leaf), params
    )
    leaves, structure = jax.tree.flatten(params)
    units = [leaf.shape[0] for leaf in leaves]
    if any(map(offload.on_host, leaves)) and any(1 < unit < len(uses) for unit in units):
        return _scan_uses(one, params, x, uses, extras)

    def apply_block(span: int, leaves: list[jax.Array], x: Carry, by_use: Any) -> tuple[Carry, Any]:
        """Applies `span` layers; leaves of at least this unit are cut to them."""
        inner = max((unit for unit in units if unit < span), default=0)  # 0: a layer
        # The layers of larger units are cut to one already where this is a block of one.
        own = [unit == span or unit > span > 1 for unit in units]

        def divide(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(-1, inner, *leaf.shape[1:]) if inner else leaf

        def body(x: Carry, inputs: Any) -> tuple[Carry, Any]:
            cut, by_use = inputs
            rest = iter(cut)
            now = [next(rest) if mine else leaf for leaf, mine in zip(leaves, own, strict=True)]
            if inner:
                return apply_block(inner, now, x, by_use)
            return one(jax.tree.unflatten(structure, now), x, *by_use)

        cut = [leaf for leaf, mine in zip(leaves, own, strict=True) if mine]
        if inner > 1:
            cut = [divide(leaf) for leaf in cut]
        x, reports = jax.lax.scan(body, x, (cut, jax.tree.map(divide, by_use)))
        if inner:
            reports = jax.tree.map(lambda leaf: leaf.reshape(span, *leaf.shape[2:]), reports)
        return x, reports

    return apply_block(len(uses), leaves, x, (uses, extras))


def _scan_uses(
    one: ApplyLayer, params: Any, x: Carry, uses: Int[Array, " L"], extras: Any
) -> tuple[Carry, Any]:
    """Does what `_scan_layers` does in one scan, for stacks on the host beside smaller units.

    Gradients of a stack on the host that was cut in blocks could not be put together there: XLA
    makes a bitcast between memories of it. What is lost is time: in every use the gradients of the
    smaller units are added up as a whole.
    """
    leaves, structure = jax.tree.flatten(params)

    def body(x: Carry, inputs: Any) -> tuple[Carry, Any]:
        cut, use, extra = inputs
        rest = iter(cut)
        layer = [
            next(rest) if leaf.shape[0] == len(uses) else layer_slices.take(leaf, use)
            for leaf in leaves
        ]
        return one(jax.tree.unflatten(structure, layer), x, use, extra)

    cut = [leaf for leaf in leaves if leaf.shape[0] == len(uses)]
    return jax.lax.scan(body, x, (cut, uses, extras))
