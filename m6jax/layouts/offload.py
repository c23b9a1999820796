"""Which leaves of a state rest in host memory, and how they come to the device.

A plan is a value; `place` writes it into the shardings of a state's description, and from there on
it is part of the arrays' types: whoever uses a leaf asks the leaf.

>>> plan = OffloadPlan(weights=("moe/(up|down)",), layers=(2, 3), optimizer_state=True)
>>> abstract = plan.place(train_state.abstract_state(...), Layout(depth=4, unit=4))
>>> abstract.params["layers"]["2to3"]["moe"]["up"].sharding.memory_kind
'pinned_host'

Inside of a compiled step `on_host(x)` tells where a value is, `to_device` and `to_host` move it;
on values that are there already they do nothing. This is the only file that knows the names of
memory kinds.

Small leaves stay on the device: they save nothing, and slices of small float32 stacks on the host
have failed the TPU compiler's check of layouts.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from m6jax.foundation import pytrees
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError, validated
from m6jax.layouts.changes import convert
from m6jax.layouts.layout import Form, Layout
from m6jax.layouts.leaf_name import LeafName

HOST = "pinned_host"
DEVICE = "device"
_INPUT = "layer_input"  # what `name_input` calls a value

# Fields of a TrainState whose leaves are weights, and those that only updates need.
_WEIGHTS = ("params/", "extra/averaged/")
_MOMENTS = ("opt_state/", "extra/master/")


@validated
class OffloadPlan:
    """What rests in host memory between its uses.

    Attributes:
      weights: patterns (re.search) of names of the stack's weights, such as 'moe/(up|down)'; an
        average of the weights lies with them. () keeps all weights on the device, ('',) none.
      layers: whose weights and optimizer state: numbers of layers, or how many of the last ones;
        None: all. Some layers only need a stage in which all layers are distinct; where they are
        STACKED, the stack is cut in runs that rest apart (`split`).
      optimizer_state: the optimizer's state and float32 masters, of embeddings and head too.
      activations: the layers' inputs that the backward pass waits with.
      streamed: make the step layer by layer, each layer updated in the backward pass at once (see
        `streaming`), so that gradients of all layers never exist together.
      min_bytes: least size of one layer's leaf, over all devices together, that is moved.
      device_bytes: what one device's step may need, in place of `layers`: as few of the last layers
        go to the host as fit, with their `weights` and `optimizer_state`, or both if neither is
        named; see `planning.budget`. None: `layers` says it.
    """

    weights: tuple[str, ...] = ()
    layers: int | tuple[int, ...] | None = None
    optimizer_state: bool = False
    activations: bool = False
    streamed: bool = False
    min_bytes: int = 2**20
    device_bytes: int | None = None

    def check(self) -> None:
        """Raises ConfigError for patterns and numbers that cannot be."""
        for pattern in self.weights:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"OffloadPlan.weights: {pattern!r} is no pattern: {error}"
                ) from error
        numbers = (self.layers,) if isinstance(self.layers, int) else (self.layers or ())
        if any(number < 0 for number in numbers) or self.layers in (0, ()):
            raise ConfigError(
                f"OffloadPlan.layers: {self.layers} (numbers from 0, a count from 1, or None)"
            )
        if self.min_bytes < 0:
            raise ConfigError(f"OffloadPlan.min_bytes: {self.min_bytes} is negative")
        if self.device_bytes is not None and self.device_bytes < 1:
            raise ConfigError(f"OffloadPlan.device_bytes: {self.device_bytes}; give at least 1")
        if self.device_bytes is not None and self.layers is not None:
            raise ConfigError(
                f"OffloadPlan.device_bytes: {self.device_bytes:,} beside layers = {self.layers},"
                " which says what the budget is to decide (leave one of them out)"
            )

    @property
    def uses_host(self) -> bool:
        """Whether anything rests on the host."""
        return bool(self.weights) or self.optimizer_state or self.activations

    def place(self, abstract: Tree, layout: Layout) -> Tree:
        """Writes memory kinds into the shardings of a state's description.

        Args:
          abstract: TrainState of ShapeDtypeStructs with NamedShardings.
          layout: how its stack lies.

        Returns:
          The description in the layout that `split` returns.

        Raises:
          ConfigError: layers that are not there, patterns that match nothing, nothing that is large
            enough, or devices without host memory.
        """
        if self.device_bytes is not None:
            raise ConfigError(
                f"OffloadPlan.device_bytes: {self.device_bytes:,} is a budget, which"
                " planning.budget.resolve turns into layers before a state is described"
            )
        if not self.uses_host:
            return abstract
        check_host_memory(jax.tree.leaves(abstract)[0].sharding.mesh)
        split = self.split(layout)
        abstract, layout = convert(abstract, layout, split), split
        sizes = {
            name: math.prod(leaf.shape) * leaf.dtype.itemsize // _layers_of(name, layout)
            for name, leaf in pytrees.flatten_named(abstract)
        }
        wanted = self._wanted_weights(sizes, layout) | self._wanted_moments(sizes, layout)

        def move(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if name not in wanted:
                return leaf
            sharding = leaf.sharding.with_memory_kind(HOST)  # type: ignore[union-attr]
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return pytrees.map_named(move, abstract)

    def _wanted_weights(self, sizes: dict[str, int], layout: Layout) -> set[str]:
        if not self.weights:
            return set()
        own = {n for n in sizes if n.startswith(_WEIGHTS) and LeafName.of(n).in_stack}
        for pattern in self.weights:
            if not any(re.search(pattern, name) for name in own):
                raise ConfigError(
                    f"OffloadPlan.weights: {pattern!r} is found in no name of a layer's weight"
                    f" ({', '.join(sorted(own))})"
                )
        named = {n for n in own if any(re.search(pattern, n) for pattern in self.weights)}
        return self._large(named & self._of_layers(sizes, layout), sizes, "weights")

    def _wanted_moments(self, sizes: dict[str, int], layout: Layout) -> set[str]:
        if not self.optimizer_state:
            return set()
        own = {name for name in sizes if name.startswith(_MOMENTS)}
        return self._large(own & self._of_layers(sizes, layout), sizes, "optimizer_state")

    def _large(self, names: set[str], sizes: dict[str, int], field: str) -> set[str]:
        large = {name for name in names if sizes[name] >= self.min_bytes}
        if not large:
            raise ConfigError(
                f"OffloadPlan.{field}: of the leaves that it names the largest has"
                f" {max((sizes[name] for name in names), default=0):,} bytes, less than"
                f" OffloadPlan.min_bytes = {self.min_bytes:,} (lower it)"
            )
        return large

    def split(self, layout: Layout) -> Layout:
        """Returns the layout of a stage, its stack cut where layers on the host and others meet.

        Raises:
          ConfigError: layers that are not there, or that cannot rest apart from the others.
        """
        if layout.form is Form.UNROLLED or self.layers is None or not self.uses_host:
            return layout
        if not layout.all_distinct:
            raise ConfigError(
                f"OffloadPlan.layers: {self.layers} of a stack in which layers share parameters"
                f" ({layout.unit} distinct of {layout.depth}) cannot rest apart (set"
                " OffloadPlan.layers = None for all)"
            )
        apart = self._numbers(layout)
        borders = [i for i in range(1, layout.depth) if (i in apart) != (i - 1 in apart)]
        return replace(layout, borders=tuple(borders))

    def _numbers(self, layout: Layout) -> set[int]:
        """Returns the numbers of the layers that are offloaded."""
        depth, layers = layout.depth, self.layers
        if layers is None:
            return set(range(depth))
        numbers = range(depth - layers, depth) if isinstance(layers, int) else layers
        if min(numbers) < 0 or max(numbers) >= depth:
            raise ConfigError(
                f"OffloadPlan.layers: {layers} goes beyond the {depth} distinct layers of the stage"
            )
        return set(numbers)

    def _of_layers(self, names: Iterable[str], layout: Layout) -> set[str]:
        """Returns the names outside of the stack and those of the layers that are offloaded."""
        numbers = self._numbers(layout)
        return {name for name in names if set(layout.layers_of(name)) <= numbers}


def check_host_memory(mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError if the devices of a mesh cannot compute with arrays on the host.

    A mesh without devices, which somebody plans with, is taken to have that memory.
    """
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.local_devices[0] if mesh.local_devices else mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds or DEVICE not in kinds:
        raise ConfigError(
            f"OffloadPlan: {device.platform} devices ({device.device_kind}) have no memory"
            f" {HOST!r} (they have: {', '.join(kinds)}); remove the plan, or run on a platform that"
            " has it"
        )


def on_host(x: Any) -> bool:
    """Whether a value rests on the host; asks its type, inside of compiled functions too.

    Args:
      x: array, traced or not, or ShapeDtypeStruct with a sharding.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None and x.sharding.memory_kind == HOST
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Moves what rests on the host to the device, inside of a compiled function."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree
    )


def to_host(tree: Tree) -> Tree:
    """Moves what is on the device to the host, inside of a compiled function."""
    return jax.tree.map(
        lambda x: x if on_host(x) else jax.device_put(x, jax.memory.Space.Host), tree
    )


def like(x: jax.Array, other: Any) -> jax.Array:
    """Moves a value to where `other` rests, inside of a compiled function."""
    return to_host(x) if on_host(other) else to_device(x)


def bytes_by_memory(abstract: Tree) -> dict[str, int]:
    """Returns the bytes of a description, over all devices, by where they rest."""
    sizes = {DEVICE: 0, HOST: 0}
    for leaf in jax.tree.leaves(abstract):
        kind = HOST if leaf.sharding.memory_kind == HOST else DEVICE
        sizes[kind] += leaf.dtype.itemsize * math.prod(leaf.shape)
    return sizes


def name_input(x: jax.Array) -> jax.Array:
    """Marks a layer's input for `inputs_on_host`."""
    return checkpoint_name(x, _INPUT)


def inputs_on_host() -> Callable[..., Any]:
    """Returns the rematerialisation policy that keeps named inputs, on the host, nothing else."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src=DEVICE,
        offload_dst=HOST,
    )


def _layers_of(name: str, layout: Layout) -> int:
    """Returns how many layers a leaf holds."""
    return len(layout.layers_of(name)) or 1
