"""Applying a stack of layers, whatever its layout: the network never asks which.

Layer parameters are plain trees, so one function of (parameters of a layer, x, use) serves every
layout. A unit of U layers repeated R times is a scan over repeats around a scan over the unit:

    for repeat in range(R):            parameters stay, U x their gradients add up
        for layer in range(U):         parameters are sliced from the stack
            x = apply(layer, x, use = repeat * U + layer)

Weights that rest on the host (`offload`) are moved inside of the layer, so that one layer's are on
the device at a time; rematerialised layers move them again in the backward pass. A unit that is
repeated is moved as a whole, once.

Unrolled layers are a loop in Python. This is the only file that scans over layers or
rematerialises one, with `streaming`. flax's own `nn.scan` is not used: it cannot mix
leading axes, and it hides the slicing that streaming from the host has to do itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from m6jax import offload
from m6jax.layouts import Form, Layout
from m6jax.modeling.config import Remat
from m6jax.modeling.routers import SAVED

ApplyLayer = Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@struct.dataclass
class StackOutput:
    """What a stack gives back.

    Attributes:
      x: the last layer's output.
      layers: what every layer reports, each leaf with a leading axis L in order of use.
    """

    x: jax.Array
    layers: Any


def rematerialize(
    apply_layer: ApplyLayer,
    remat: Remat,
    in_scan: bool,
    inputs_on_host: bool = False,
) -> ApplyLayer:
    """Returns the function with the wanted part of a layer recomputed in the backward pass.

    Args:
      apply_layer: see `apply_stack`.
      remat: what is recomputed.
      in_scan: whether it is the body of a scan.
      inputs_on_host: keep a layer's input on the host; `remat` is FULL.
    """
    if remat is Remat.NOTHING:
        return apply_layer
    policy = {
        Remat.FULL: jax.checkpoint_policies.nothing_saveable,
        Remat.ALL_BUT_PRODUCTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }[remat]
    if inputs_on_host:
        policy = offload.inputs_on_host()
    # Outside a scan the compiler would merge the recomputation with the forward pass again.
    return jax.checkpoint(apply_layer, policy=and_choices(policy), prevent_cse=not in_scan)


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
    x: jax.Array,
    layout: Layout,
    extras: Any = None,
    remat: Remat = Remat.NOTHING,
    inputs_on_host: bool = False,
) -> StackOutput:
    """Applies all L layers.

    Args:
      apply_layer: (parameters of one layer, x, number of the use, extras of the use) ->
        (x, report of the layer).
      params: for STACKED the tree with leading axes U, for UNROLLED the list of L trees.
      x: input.
      layout: how `params` lie.
      extras: tree with leading axes L, what each use gets besides (a cache), or None.
      remat: what the backward pass recomputes.
      inputs_on_host: the layers' inputs wait for the backward pass on the host; needs FULL.
    """
    if layout.repeats > 1:
        # Sums of a layer's gradients over its uses cannot be made on the host.
        params = offload.to_device(params)

    def fetch_and_apply(layer: Any, x: jax.Array, use: jax.Array, extra: Any) -> Any:
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
        return StackOutput(x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports))

    def one_layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        layer, use, extra = inputs
        return one(layer, x, use, extra)

    def one_unit(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        uses, extra = inputs
        return jax.lax.scan(one_layer, x, (params, uses, extra))

    uses = jnp.arange(layout.depth, dtype=jnp.int32)
    if layout.repeats == 1:
        return StackOutput(*one_unit(x, (uses, extras)))
    by_repeat = jax.tree.map(
        lambda leaf: leaf.reshape(layout.repeats, layout.unit, *leaf.shape[1:]), (uses, extras)
    )
    x, reports = jax.lax.scan(one_unit, x, by_repeat)
    flat = jax.tree.map(lambda leaf: leaf.reshape(layout.depth, *leaf.shape[2:]), reports)
    return StackOutput(x, flat)
