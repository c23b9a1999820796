"""What a step of a stage needs, as one value that both engines give.

The analytic engine computes it from shapes, shardings and memory kinds; the compiled engine reads
it off the compiled program. Both fill the same fields, so that they can be set side by side:

>>> estimate.hbm_bytes_per_device, estimate.host_bytes_per_device
(9_860_123_456, 78_643_201_024)
>>> estimate.to_json()["engine"]
'analytic'

All bytes and FLOPs are of one device and of one step, in which every device sees its share of one
global batch. `None` always means: this engine cannot know it.
"""

import dataclasses
from typing import Any, Literal

Engine = Literal["analytic", "compiled"]

# The kinds of parameters, in the order in which they are reported.
GROUPS = ("embedding", "attention", "experts", "router", "mlp", "norms", "patches", "head")
# Collectives as the compiler calls them.
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: one of COLLECTIVES.
      axes: the mesh axes along which their members lie, in the order of the mesh.
      bytes: of one device, of the larger of operands and results.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int

    @property
    def name(self) -> str:
        """What a person reads: 'all-reduce over data x expert'."""
        return f"{self.kind} over {' x '.join(self.axes)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device in one memory, split by what they are for.

    Attributes:
      weights: parameters and their averages.
      optimizer_state: moments and counts.
      gradients: those that exist together; None if not told apart from temporaries.
      activations: what waits for the backward pass, and the batch; None likewise.
      temporaries: the rest of what the step allocates.
      code: the program; None if unknown.
    """

    weights: int = 0
    optimizer_state: int = 0
    gradients: int | None = 0
    activations: int | None = 0
    temporaries: int = 0
    code: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all that is known."""
        return sum(value or 0 for value in dataclasses.asdict(self).values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step of a stage needs.

    Attributes:
      engine: which of the two says so.
      stage: name of the stage.
      devices: number of devices.
      mesh: size of every mesh axis.
      platform: what it was compiled for, such as 'tpu'; None for the analytic engine.
      hardware: name in `hardware.TABLE`; None if unknown, and then nothing is said of time.
      positions_per_step: positions of a global batch, rows x length.
      parameters_total: parameters, each distinct one once.
      parameters_active: parameters that a token meets, a shared one once for every use.
      parameters_by_group: `parameters_total` by kind, a subset of GROUPS.
      hbm: bytes in device memory.
      host: bytes in host memory.
      host_temp_bytes_per_device: of `host`, what the step allocates besides its arguments.
      flops_per_device: FLOPs of matrix products that are executed: recomputation, and the
        buffers of experts whether filled or not, included.
      model_flops_per_device: FLOPs that the model asks for, forward and backward, of the experts
        that a token really gets; what MFU counts. None for the compiled engine.
      flops_by_part: `flops_per_device` by part of the model; None for the compiled engine.
      host_traffic_bytes_per_device: bytes copied between host and device, both ways together.
      device_traffic_by_part: bytes between a device's memory and its arithmetic, a bound from below
        (see `device_traffic`); None for the compiled engine.
      collectives: of one device, one for each kind and mesh axes.
      compile_seconds: None for the analytic engine.
      assumptions: what was assumed, one line each.
    """

    engine: Engine
    stage: str
    devices: int
    mesh: dict[str, int]
    positions_per_step: int
    parameters_total: int
    parameters_active: int
    parameters_by_group: dict[str, int]
    hbm: Memory
    host: Memory
    host_temp_bytes_per_device: int | None
    flops_per_device: float
    host_traffic_bytes_per_device: int
    collectives: tuple[Collective, ...]
    platform: str | None = None
    hardware: str | None = None
    model_flops_per_device: float | None = None
    flops_by_part: dict[str, float] | None = None
    device_traffic_by_part: dict[str, int] | None = None
    compile_seconds: float | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def hbm_bytes_per_device(self) -> int:
        """Bytes in device memory at the step's peak."""
        return self.hbm.total

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes in host memory at the step's peak, for one device."""
        return self.host.total

    @property
    def device_traffic_bytes_per_device(self) -> int | None:
        """Bytes between a device's memory and its arithmetic; None if unknown."""
        parts = self.device_traffic_by_part
        return None if parts is None else sum(parts.values())

    @property
    def collective_bytes_per_device(self) -> int:
        """Bytes of all collectives."""
        return sum(collective.bytes for collective in self.collectives)

    def collective_bytes(self, kind: str) -> int:
        """Returns the bytes of all collectives of a kind."""
        return sum(c.bytes for c in self.collectives if c.kind == kind)

    def to_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds of it: fields and totals, ready for json.dumps."""
        return dataclasses.asdict(self) | {
            "hbm_bytes_per_device": self.hbm_bytes_per_device,
            "host_bytes_per_device": self.host_bytes_per_device,
            "device_traffic_bytes_per_device": self.device_traffic_bytes_per_device,
            "collective_bytes_per_device": self.collective_bytes_per_device,
            "collectives": [
                dataclasses.asdict(c) | {"axes": list(c.axes)} for c in self.collectives
            ],
            "assumptions": list(self.assumptions),
        }
