"""From logical axis names to the mesh.

A mesh has the axes `data`, `expert` and `model`. The model names what its dimensions are; one table
of rules says where they go:

    name     weights             activations
    batch    -                   (data, expert)     every device has rows of its own
    expert   expert              expert             experts live where `expert` says
    mlp      model               model              FFN width is cut
    heads    model               model
    vocab    model               model
    embed    data, if fully sharded, else -         -

So an expert weight `(expert, embed, mlp)` gets `P('expert', None, 'model')`, or
`P('expert', 'data', 'model')` when fully sharded. Everything else is replicated.

The model talks to the mesh through `constrain` and, for experts, through `sharded` and the
collectives beside it: all take logical names, check them strictly (a misspelt name or an axis that
is used twice is an error, where jax or flax would drop it silently), and do nothing without a mesh.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import meta
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from m6jax.foundation import meshes
from m6jax.foundation.pytrees import Tree, flatten_named, map_named
from m6jax.foundation.validated import ConfigError, nearest, validated

MESH_AXES = ("data", "expert", "model")
Names = tuple[str | None, ...]
MeshAxes = tuple[str, ...]
Initializer = Callable[..., Any]

DEFAULT_RULES: dict[str, MeshAxes] = {
    "batch": ("data", "expert"),
    "length": (),
    "embed": (),
    "mlp": ("model",),
    "heads": ("model",),
    "kv": (),
    "vocab": ("model",),
    "expert": ("expert",),
    "layers": (),
}

_active_rules: contextvars.ContextVar[Mapping[str, MeshAxes]] = contextvars.ContextVar(
    "rules", default=DEFAULT_RULES
)


class PartitioningError(ValueError):
    """A logical axis that is unknown, used twice, or does not divide."""


@struct.dataclass
class Parameter(meta.AxisMetadata):
    """What a module declares for a parameter: shape and type, names of its axes, initial values.

    It travels through `Module.init` under `jax.eval_shape` in the place of the array, so that
    shapes, shardings and initial values of a state all come from one description. flax unboxes it
    where a module uses the parameter.

    Attributes:
      value: array or ShapeDtypeStruct.
      axes: one logical name a dimension.
      initializer: (key, shape, dtype) -> array, for the parameter of one layer.
    """

    value: Any
    axes: Names = struct.field(pytree_node=False)
    initializer: Initializer = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """Returns the array."""
        return self.value

    def replace_boxed(self, val: Any) -> "Parameter":
        """Returns the same description around another array."""
        return self.replace(value=val)  # type: ignore[attr-defined]

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Parameter":
        """Returns the description of stacked layers; `nn.scan` has stacked the values."""
        return self.replace(axes=(*self.axes[:index], "layers", *self.axes[index:]))  # type: ignore[attr-defined]

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Parameter":
        """The inverse of `add_axis`."""
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))  # type: ignore[attr-defined]


def declare(initializer: Initializer, axes: Names) -> Initializer:
    """Returns an initializer for `Module.param` that gives a `Parameter` with these axes."""

    def boxed(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> Any:
        return Parameter(initializer(key, shape, dtype), axes, initializer)

    return boxed


@validated
class Partitioning:
    """The mesh and what lies where on it.

    Attributes:
      data: size of the mesh axis over which rows are spread; -1 takes what the others leave.
      expert: size of the axis over which experts are spread (rows too); -1 takes what the others
        leave, where `data` does not.
      model: size of the axis over which heads, FFN width and vocabulary are cut.
      fully_sharded: also cut every weight's `embed` over `data` (gathered when used).
      rules: logical name to mesh axes, in place of the table's entry.
    """

    data: int = -1
    expert: int = 1
    model: int = 1
    fully_sharded: bool = False
    rules: dict[str, tuple[str, ...]] | None = None

    def check(self) -> None:
        """Raises ConfigError for sizes and rules that cannot be."""
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and not (axis in ("data", "expert") and size == -1):
                raise ConfigError(f"Partitioning.{axis}: {size} devices; at least 1 is needed")
        if self.data == self.expert == -1:
            raise ConfigError(
                "Partitioning.expert: -1 beside data = -1 does not say who takes how many of the"
                " devices (set one of them to a number)"
            )
        for name, mesh_axes in (self.rules or {}).items():
            if name not in DEFAULT_RULES:
                raise ConfigError(
                    f"Partitioning.rules: unknown logical axis {name!r}"
                    f"{nearest(name, DEFAULT_RULES)}"
                )
            for axis in mesh_axes:
                if axis not in MESH_AXES:
                    raise ConfigError(
                        f"Partitioning.rules[{name!r}]: unknown mesh axis {axis!r}"
                        f"{nearest(axis, MESH_AXES)}"
                    )

    def mesh_shape(self, num_devices: int) -> tuple[int, int, int]:
        """Returns the sizes of (data, expert, model); raises ConfigError where they do not fit."""
        sizes = (self.data, self.expert, self.model)
        rest = num_devices // math.prod(size for size in sizes if size != -1)
        data, expert, model = (rest if size == -1 else size for size in sizes)
        if data * expert * model != num_devices:
            raise ConfigError(
                f"Partitioning: a mesh of data {self.data} x expert {self.expert} x model"
                f" {self.model} does not fit {num_devices} devices (their product must be"
                f" {num_devices}; data = -1 takes what is left)"
            )
        return data, expert, model

    def make_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Returns the mesh over `devices` (default: all devices of all processes)."""
        devices = jax.devices() if devices is None else devices
        shape = self.mesh_shape(len(devices))
        # Auto axes: on Explicit ones the constraints below are refused by jax.
        types = (AxisType.Auto,) * len(MESH_AXES)
        return Mesh(meshes.arranged(shape, devices), MESH_AXES, axis_types=types)

    @property
    def activation_rules(self) -> Mapping[str, MeshAxes]:
        """Where activations go."""
        return DEFAULT_RULES | (self.rules or {})

    @property
    def weight_rules(self) -> Mapping[str, MeshAxes]:
        """Where weights rest between uses."""
        rules = dict(self.activation_rules)
        if self.fully_sharded:
            rules["embed"] = ("data",)
        return rules

    @contextlib.contextmanager
    def activate(self, mesh: Mesh) -> Iterator[Mesh]:
        """Makes `mesh` and the activation rules the ones that `constrain` and `sharded` use."""
        token = _active_rules.set(self.activation_rules)
        try:
            with jax.set_mesh(mesh):
                yield mesh
        finally:
            _active_rules.reset(token)

    def weight_shardings(self, parameters: Tree, mesh: Mesh) -> Tree:
        """Returns a NamedSharding for every `Parameter` of a tree.

        Raises:
          ConfigError: a dimension does not divide by its mesh axes; names leaf and both numbers.
        """

        def sharding(name: str, parameter: Parameter) -> NamedSharding:
            spec = partition_spec(parameter.axes, self.weight_rules)
            check_divides(name, parameter.value.shape, parameter.axes, spec, mesh.shape)
            return NamedSharding(mesh, spec)

        return map_named(sharding, parameters, is_leaf=is_parameter)

    def batch_sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the sharding of a batch's arrays: rows over the devices."""
        return NamedSharding(mesh, partition_spec(("batch",), self.activation_rules))

    def rows_divisor(self, num_devices: int) -> int:
        """Returns the number by which the rows of a microbatch must divide."""
        sizes = dict(zip(MESH_AXES, self.mesh_shape(num_devices), strict=True))
        return int(np.prod([sizes[axis] for axis in self.activation_rules["batch"]], dtype=int))


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Makes `constrain` and `sharded` do nothing, for work on shapes that are nobody's part."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


def is_parameter(node: Any) -> bool:
    """Whether a node of a tree is a `Parameter`."""
    return isinstance(node, Parameter)


def partition_spec(names: Names, rules: Mapping[str, MeshAxes]) -> PartitionSpec:
    """Returns the PartitionSpec of an array whose dimensions have these names.

    Raises:
      PartitioningError: an unknown name, or two dimensions on one mesh axis.
    """
    used: dict[str, str] = {}
    entries = []
    for name in names:
        if name is not None and name not in rules:
            raise PartitioningError(f"unknown logical axis {name!r}{nearest(name, rules)}")
        axes = () if name is None else rules[name]
        for axis in axes:
            if axis in used:
                raise PartitioningError(
                    f"{names}: {used[axis]!r} and {name!r} are both on the mesh axis {axis!r}"
                    " (give one of them another rule)"
                )
            used[axis] = str(name)
        entries.append(axes if len(axes) > 1 else (axes[0] if axes else None))
    return PartitionSpec(*entries)


def mesh_axes(entry: Any) -> MeshAxes:
    """Returns the mesh axes that one entry of a PartitionSpec names: none, one or several."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def check_divides(
    what: str,
    shape: Sequence[int],
    names: Names,
    spec: PartitionSpec,
    mesh_shape: Mapping[str, int],
) -> None:
    """Raises ConfigError if a dimension does not divide by the mesh axes that cut it."""
    for size, name, entry in zip(shape, names, spec, strict=True):
        axes = mesh_axes(entry)
        parts = int(np.prod([mesh_shape[axis] for axis in axes], dtype=int))
        if size % parts:
            raise ConfigError(
                f"{what}: {name} = {size} does not divide over the mesh axes"
                f" {' x '.join(f'{a} = {mesh_shape[a]}' for a in axes)}"
                f" (choose a size of the mesh that divides {size})"
            )


def constrain(x: jax.Array, names: Names) -> jax.Array:
    """Says where an activation lies; the identity without a mesh.

    Args:
      x: array of any rank.
      names: one logical name (or None) a dimension.
    """
    if len(names) != x.ndim:
        raise PartitioningError(f"{names} names {len(names)} axes, the array has shape {x.shape}")
    spec = partition_spec(names, _active_rules.get())
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def fetched(tree: Tree) -> Tree:
    """Returns arrays as numpy, in whole in every process, wherever their parts lie.

    Must be called by all processes.

    Args:
      tree: arrays of any ranks.
    """

    def whole(x: jax.Array) -> np.ndarray:
        if not x.is_fully_addressable and not x.is_fully_replicated:
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree)


def sharded(
    fn: Callable[..., Any], in_names: Sequence[Names], out_names: Any
) -> Callable[..., Any]:
    """Returns `fn` to be run by every device on its own part (`jax.shard_map`).

    Without a mesh, `fn` itself. Inside, `exchange` and `total` talk to the other devices.

    Args:
      fn: function of arrays.
      in_names: logical names of every argument's dimensions.
      out_names: the same for the results, in their structure; a dimension that no name cuts must be
        equal on all devices.
    """
    rules = _active_rules.get()
    in_specs = tuple(partition_spec(names, rules) for names in in_names)
    out_specs = jax.tree.map(
        lambda names: partition_spec(names, rules), out_names, is_leaf=is_names
    )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def is_names(node: Any) -> bool:
    """Whether a node of a tree of logical axes is a leaf: the names of one parameter's axes."""
    return isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node)


def names_by_leaf(axes: Tree) -> dict[str, Names]:
    """Returns the logical axes of every leaf by its name, for updates of some leaves alone."""
    return dict(flatten_named(axes, is_leaf=is_names))


def exchange(x: jax.Array, name: str, split: int, concat: int) -> jax.Array:
    """All-to-all over the mesh axes of a logical name, inside `sharded`.

    Args:
      x: the local part, whose dimension `split` is cut in as many pieces as there are devices.
      name: logical axis, such as 'expert'.
      split: dimension whose pieces go to the other devices.
      concat: dimension along which the received pieces are put together, in order of devices.
    """
    axes = _manual_axes(name)
    return jax.lax.all_to_all(x, axes, split, concat, tiled=True) if axes else x


def total(x: Any, *names: str) -> Any:
    """Sum over the mesh axes of the logical names, inside `sharded`."""
    axes = tuple(axis for name in names for axis in _manual_axes(name))
    return jax.lax.psum(x, axes) if axes else x


def _manual_axes(name: str) -> MeshAxes:
    mesh = jax.sharding.get_abstract_mesh()
    rules = _active_rules.get()
    if name not in rules:
        raise PartitioningError(f"unknown logical axis {name!r}{nearest(name, rules)}")
    return tuple(a for a in rules[name] if a in mesh.manual_axes and mesh.shape[a] > 1)
