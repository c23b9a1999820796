"""A stage of a run as the analytic engine sees it: shapes, shardings, memory kinds, no device.

>>> shapes = stage_shapes(experiment, stage=1, devices=256)
>>> shapes.mesh
AbstractMesh('data': 1, 'expert': 256, 'model': 1)
>>> local_bytes(shapes.state.params["layers"]["moe"]["up"])
39_258_685_440

Axis letters: B rows, T length.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from m6jax.experiment import Experiment
from m6jax.experiment.programs import state_shapes
from m6jax.experiment.summary import parameters_by_use
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import MESH_AXES, Partitioning, check_divides
from m6jax.foundation.pytrees import Tree
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Layout, LeafName, offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.config import LayerKind, ModelConfig, MoEConfig
from m6jax.modeling.dispatch import check_groups, group_size_of, room_of
from m6jax.training.train_state import TrainState

_M6_PATCHES = 16  # of a picture, one a row
_GROUPS: tuple[tuple[str, str], ...] = (
    ("norm", "norms"),
    ("^embedder/", "embedding"),
    ("(^|/)attention/", "attention"),
    ("/router/", "router"),
    ("/moe/", "experts"),
    ("^head/", "head"),
    ("^patches/", "patches"),
)


@dataclasses.dataclass(frozen=True)
class StageShapes:
    """A stage and the devices that it is planned for.

    Attributes:
      experiment: the run.
      stage: number of the stage.
      devices: number of devices.
      layout: how the stack lies, cut in runs where the plan cuts it.
      partitioning: what lies where.
      plan: what rests on the host.
      mesh: axes and sizes.
      plain: the state's ShapeDtypeStructs with shardings, as if nothing were on the host.
      state: the same with the plan's memory kinds.
      microbatches: parts of a batch that are computed one after another.
      patches: I, image patches of a row; 0 for a model without.
      parameters_total: each distinct one once.
      parameters_active: those that a token meets, a shared one once for every use.
    """

    experiment: Experiment
    stage: int
    devices: int
    layout: Layout
    partitioning: Partitioning
    plan: OffloadPlan
    mesh: AbstractMesh
    plain: TrainState
    state: TrainState
    microbatches: int
    patches: int
    parameters_total: int
    parameters_active: int

    @property
    def model(self) -> ModelConfig:
        """The network."""
        return self.experiment.model

    @property
    def length(self) -> int:
        """T."""
        return self.experiment.data.length

    @property
    def local_tokens(self) -> int:
        """Positions of one device's rows of a microbatch."""
        rows = self.experiment.rows(self.stage) // self.microbatches
        return rows * self.length // self.partitioning.rows_divisor(self.devices)

    def with_plan(self, plan: OffloadPlan) -> "StageShapes":
        """Returns the same stage with another plan; raises ConfigError if it does not fit."""
        whole = self.layout.whole
        state = plan.place(self.plain, whole)
        return dataclasses.replace(self, plan=plan, layout=plan.split(whole), state=state)

    def with_microbatches(self, microbatches: int) -> "StageShapes":
        """Returns the same stage in other parts; raises ConfigError if rows do not divide."""
        changed = dataclasses.replace(self, microbatches=microbatches)
        changed.check_rows()
        return changed

    def on_mesh(self, where: Partitioning, devices: int) -> "StageShapes":
        """Returns the same stage on another mesh, its weights cut by the same rules.

        Raises:
          ConfigError: rows, groups or a parameter do not divide over the mesh.
        """
        mesh = abstract_mesh(where, devices)

        def move(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            assert leaf.sharding is not None  # described with shardings
            spec = leaf.sharding.spec
            names = tuple(f"dimension {i}" for i in range(len(spec)))
            check_divides(name, leaf.shape[: len(spec)], names, spec, mesh.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        plain = pytrees.map_named(move, self.plain)
        changed = dataclasses.replace(
            self,
            devices=devices,
            partitioning=where,
            mesh=mesh,
            plain=plain,
            state=self.plan.place(plain, self.layout.whole),
        )
        changed.check_rows()
        return changed

    def check_rows(self) -> None:
        """Raises ConfigError if rows or groups do not divide over devices and microbatches."""
        rows = self.experiment.rows(self.stage)
        parts = self.microbatches * self.partitioning.rows_divisor(self.devices)
        if rows % parts:
            raise ConfigError(
                f"Experiment.batch_size: {rows} rows do not divide into {self.microbatches}"
                f" microbatches over the {parts // self.microbatches} devices that have rows of"
                f" their own (choose a multiple of {parts})"
            )
        if LayerKind.SPARSE in self.model.pattern and self._room is not None:
            check_groups(self._group_size, rows // parts, self.length)

    def cut(self, name: str) -> int:
        """Returns in how many parts activations are cut along a logical axis."""
        axes = self.partitioning.activation_rules[name]
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes, of more than one place, that cut a logical axis."""
        return self.in_mesh_order(self.partitioning.activation_rules[name])

    def in_mesh_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the mesh axes that have more than one place, in the mesh's order."""
        wanted = set(axes)
        return tuple(a for a, size in self.mesh.shape.items() if size > 1 and a in wanted)

    @property
    def expert_rows(self) -> float:
        """Rows of all experts' buffers for one token, filled or not: P * K if dropless."""
        moe, room = self._moe, self._room
        if room is None:
            return moe.num_prototypes * moe.num_selected_experts
        return moe.num_experts * room / self._group_size

    @property
    def _moe(self) -> MoEConfig:
        assert self.model.moe is not None  # asked of sparse layers alone
        return self.model.moe

    @property
    def _group_size(self) -> int:
        rows = self.experiment.rows(self.stage) // self.microbatches
        return group_size_of(self._moe.group_size, rows, self.length)

    @property
    def _room(self) -> int | None:
        return room_of(self._moe, self._group_size)


def stage_shapes(
    experiment: Experiment,
    stage: int,
    devices: int,
    *,
    patches: int | None = None,
    plan: OffloadPlan | None = None,
) -> StageShapes:
    """Describes a stage on so many devices that need not exist.

    Args:
      experiment: the run.
      stage: number of the stage.
      devices: number of devices.
      patches: I, image patches of a row; None: see `patches_of`.
      plan: what rests on the host, in place of the stage's own plan.

    Raises:
      ConfigError: mesh, rows, groups, experts or plan do not fit.
    """
    where, layout = experiment.mesh_of(stage), experiment.layout(stage)
    mesh = abstract_mesh(where, devices)
    # Of the mesh nothing but its shape is asked.
    plain = state_shapes(experiment, layout, where, mesh)  # type: ignore[arg-type]
    plan = experiment.offload_of(stage) if plan is None else plan
    stored, active = parameters_by_use(experiment.model, layout)
    shapes = StageShapes(
        experiment=experiment,
        stage=stage,
        devices=devices,
        layout=plan.split(layout),
        partitioning=where,
        plan=plan,
        mesh=mesh,
        plain=plain,
        state=plan.place(plain, layout),
        microbatches=experiment.update.microbatches,
        patches=patches_of(experiment, patches),
        parameters_total=stored,
        parameters_active=active,
    )
    shapes.check_rows()
    return shapes


def patches_of(experiment: Experiment, given: int | None = None) -> int:
    """Returns I, image patches of a row; 0 for a model that takes none.

    Args:
      experiment: the run.
      given: what the user says; None: as many as the run's rows have room for, or, where no source
        has pictures, M6's 16.
    """
    if experiment.model.patch_dim is None:
        return 0
    return given or experiment.data.patches_per_row or _M6_PATCHES


def abstract_mesh(where: Partitioning, devices: int) -> AbstractMesh:
    """Returns the mesh over so many devices; raises ConfigError if they do not fit."""
    types = (AxisType.Auto,) * len(MESH_AXES)
    return AbstractMesh(where.mesh_shape(devices), MESH_AXES, axis_types=types)


def local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's part of a leaf."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def bytes_of(tree: Tree, host: bool) -> int:
    """Returns the bytes of one device's parts of the leaves on the host, or of the others."""
    return sum(local_bytes(leaf) for leaf in jax.tree.leaves(tree) if offload.on_host(leaf) == host)


def layers_held(name: str, leaf: jax.ShapeDtypeStruct) -> int:
    """Returns of how many layers a leaf holds parameters."""
    return leaf.shape[0] if LeafName.of(name).stacked else 1


def parameters_by_group(params: Tree) -> dict[str, int]:
    """Returns the number of parameters of each kind; see `estimate.GROUPS`."""
    sizes: dict[str, int] = {}
    for name, leaf in pytrees.flatten_named(params):
        group = pytrees.first_match(_GROUPS, name, "mlp")
        sizes[group] = sizes.get(group, 0) + leaf.size
    return sizes
