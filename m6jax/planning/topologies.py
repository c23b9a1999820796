"""Named devices, here or not, that a step can be compiled for.

>>> parse("v6e:16x16")
Topology(name='v6e:16x16', platform='tpu', generation='v6e', num_devices=256, num_slices=1)
>>> parse("2*v6e:16x16").num_devices          # two slices, joined by the data center's network
512
>>> devices_of(parse("v6e:16x16"))          # needs libtpu, but no TPU
[TpuTopologyDevice(...), ...]

libtpu compiles ahead of time for slices that are not here, once it is told not to look for a TPU
and for the metadata server beside it. CPU devices are emulated ones of this process; GPUs are those
that are here.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from m6jax.foundation import platforms
from m6jax.foundation.validated import ConfigError, nearest
from m6jax.planning import hardware

_PLANAR = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_TORI = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
HERE = ("cpu", "gpu")


def _tori(a_most: int, b_most: int, c_most: int) -> tuple[str, ...]:
    """Returns the slices of a three-dimensional pod: sides in fours, none less than the one before.

    Source: cloud.google.com/tpu/docs, pages "TPU v4" and "TPU v5p".
    """
    sides = itertools.product(*(range(4, most + 1, 4) for most in (a_most, b_most, c_most)))
    large = [f"{a}x{b}x{c}" for a, b, c in sides if a <= b <= c]
    return (*_SMALL_TORI, *large)


SHAPES: dict[str, tuple[str, ...]] = {
    "v4": _tori(16, 16, 16),
    "v5e": _PLANAR,
    "v5p": _tori(16, 16, 24),
    "v6e": _PLANAR,
}


class MissingCompilerError(ConfigError):
    """What compiles for a topology is not installed, or does not serve it."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Named devices.

    Attributes:
      name: as the user wrote it.
      platform: 'tpu', 'cpu' or 'gpu'.
      generation: 'v6e', or the platform where there are none.
      num_devices: chips of all slices, or devices.
      num_slices: slices of TPUs.
    """

    name: str
    platform: str
    generation: str
    num_devices: int
    num_slices: int = 1


def parse(name: str) -> Topology:
    """Returns what a name such as 'v5p:8x8x8', '2*v6e:16x16' or 'cpu:8' stands for.

    Raises:
      ConfigError: there is no such topology; gives the nearest, and those that there are.
    """
    slices, slice_name = _slices(name)
    generation, _, shape = slice_name.partition(":")
    if generation in HERE and slices == 1:
        if not shape.isdecimal() or int(shape) < 1:
            raise ConfigError(
                f"PlanSettings.topology: {name!r} does not say how many devices (such as"
                f" '{generation}:8')"
            )
        return Topology(name, generation, generation, int(shape))
    if slices and shape in SHAPES.get(generation, ()):
        return Topology(name, "tpu", generation, slices * math.prod(sides_of(name)), slices)
    raise ConfigError(f"PlanSettings.topology: unknown {name!r}{_way_out(generation, name)}")


def slices_of(name: str | None) -> int:
    """Returns the number of slices, 2 of '2*v6e:8x16'."""
    return _slices(name or "")[0]


def _slices(name: str) -> tuple[int, str]:
    found = re.fullmatch(r"(\d+)\*(.*)", name)
    return (int(found[1]), found[2]) if found else (1, name)


def sides_of(name: str | None) -> tuple[int, ...]:
    """Returns the sides of a slice, (8, 16) of 'v6e:8x16'; () for what is no slice of TPUs."""
    found = re.search(r":(\d+(?:x\d+)+)$", name or "")
    return tuple(int(side) for side in found[1].split("x")) if found else ()


def _way_out(generation: str, name: str) -> str:
    if generation in hardware.TABLE and generation not in SHAPES:
        return (
            f"; {generation} is no slice of TPUs (set PlanSettings.hardware = {generation!r} and"
            " PlanSettings.devices to their number, without a topology)"
        )
    if generation in SHAPES:
        return f"{_nearest_slice(generation, name)}; slices of {generation}: " + ", ".join(
            SHAPES[generation]
        )
    guess = nearest(name, [f"{g}:{shape}" for g, shapes in SHAPES.items() for shape in shapes])
    if "did you mean" not in guess:
        guess = ""
    examples = ", ".join(f"{g}:{shapes[-1]}" for g, shapes in SHAPES.items())
    return (
        f"{guess}; there are slices of {', '.join(SHAPES)} (up to {examples}), several of one kind"
        " (2*v6e:16x16), cpu:N and gpu:N"
    )


def _nearest_slice(generation: str, name: str) -> str:
    """Names the slice with the number of chips nearest to what was asked for, if a number was."""
    chips = math.prod(sides_of(name))
    if not sides_of(name) or not chips:
        return ""

    def distance(shape: str) -> float:
        return abs(math.log(math.prod(sides_of(f":{shape}")) / chips))

    found = min(SHAPES[generation], key=distance)
    return f" (did you mean '{generation}:{found}'?)"


def devices_of(topology: Topology) -> list[Any]:
    """Returns the devices that a step is to be compiled for.

    Raises:
      MissingCompilerError: libtpu is not installed, or would compile for something else.
      ConfigError: there are fewer CPU devices or GPUs here.
    """
    if topology.platform == "tpu":
        return _absent_tpus(topology)
    if topology.platform == "cpu":
        _ask_for_cpus(topology.num_devices)
    try:
        devices = jax.devices(topology.platform)
    except RuntimeError:  # jax has no such platform
        devices = []
    if len(devices) < topology.num_devices:
        raise ConfigError(
            f"PlanSettings.topology: {topology.name!r} asks for {topology.num_devices} devices,"
            f" here are {len(devices)}{_more_cpus(topology)}"
        )
    return devices[: topology.num_devices]


def _absent_tpus(topology: Topology) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise MissingCompilerError(
            f"PlanSettings.topology: to compile for {topology.name!r} libtpu is needed, which is"
            " not installed (pip install 'm6jax[plan]', no TPU needed; or set PlanSettings.engines"
            " = 'ANALYTIC', or plan for CPU devices, such as 'cpu:8')"
        )
    with _environment(topology.generation):
        _, one = _slices(topology.name)
        more = {} if topology.num_slices == 1 else {"num_slices": topology.num_slices}
        devices = topologies.get_topology_desc(one, "tpu", **more).devices
    if len(devices) != topology.num_devices:  # as of libtpu 0.0.52 for v4
        raise MissingCompilerError(
            f"PlanSettings.topology: libtpu takes the {topology.num_devices} chips of"
            f" {topology.name!r} for {len(devices)} devices, one a core, which is not how they run"
            " (set PlanSettings.engines = 'ANALYTIC', or choose another topology)"
        )
    return list(devices)


@contextlib.contextmanager
def _environment(generation: str) -> Iterator[None]:
    """Tells libtpu what it would ask the machine or its metadata server for."""
    if platforms.tpu_is_here():
        yield
        return
    told = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{generation}-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ask_for_cpus(count: int) -> None:
    """Asks for emulated devices, which is possible before jax is used for the first time."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def _more_cpus(topology: Topology) -> str:
    if topology.platform != "cpu":
        return " (compiling for GPUs needs them)"
    return f" (start Python with JAX_NUM_CPU_DEVICES={topology.num_devices} in the environment)"
