"""What accelerators can do, with where each figure is from.

>>> find("v6e").flops
918000000000000.0
>>> find("NVIDIA H200").name            # as jax calls the device
'H200'
>>> find("a toaster") is None           # unknown: nothing is said of time
True

Bytes are decimal (32 GB = 32e9), the smaller reading of what vendors print. Bandwidths are of one
direction of one chip; vendors often print the sum of both.
"""

import dataclasses
import re

from m6jax.foundation.validated import ConfigError, nearest

ASSUMED = "assumed: "  # how the source of a figure begins that no vendor prints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A number and where it is from; the source of an own assumption begins with ASSUMED."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """How many chips talk to each other.

    Attributes:
      bandwidth: bytes/s of one chip to its neighbours or its switch, one direction.
      dimensions: of the torus; 0 for a switched network.
      wraps_from: least number of chips along a dimension whose ends are connected (0: none).
      group: chips that share the fast switch; more of them talk over `beyond`. None: all do.
      beyond: bytes/s of one chip between groups, or between slices of a torus, one direction.
    """

    bandwidth: Figure
    dimensions: int = 0
    wraps_from: int = 0
    group: int | None = None
    beyond: Figure | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator.

    Attributes:
      name: what it is called here.
      kinds: patterns (re.fullmatch, any case) of what jax calls the device.
      hbm_bytes: device memory.
      peak_flops: FLOP/s of dense products in bfloat16 (float16 on V100).
      hbm_bandwidth: bytes/s.
      network: to other chips.
      host_link: bytes/s to the host, one direction, for one chip.
      host_bytes: memory of the host, for one chip.
    """

    name: str
    kinds: tuple[str, ...]
    hbm_bytes: Figure
    peak_flops: Figure
    hbm_bandwidth: Figure
    network: Network
    host_link: Figure
    host_bytes: Figure

    @property
    def flops(self) -> float:
        """Peak FLOP/s."""
        return self.peak_flops.value


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    *,
    hbm: float,
    flops: float,
    bandwidth: float,
    links: float,
    beyond: float,
    torus: tuple[int, int],
    host_link: float,
    host: tuple[float, str],
) -> Hardware:
    """Returns a TPU; `torus` is (dimensions, wraps_from), `host` (bytes a chip, machine).

    `beyond` is one chip's share of its host's network: 200 Gbit/s for the four chips of a v4 or v5p
    machine, 200 for the eight of v5e, 800 for the eight of v6e.
    """
    source = f"cloud.google.com/tpu/docs, page TPU {name}"
    link = (
        f"{ASSUMED}PCIe of {host_link / 1e9:.0f} GB/s for a chip; the vendor prints none (the JAX"
        " scaling book says 16 to 32)"
    )
    between = (
        f"{ASSUMED}an equal share of the host's network cards, {beyond * 8 / 1e9:.0f} Gbit/s a chip"
    )
    return Hardware(
        name=name,
        kinds=kinds,
        hbm_bytes=Figure(value=hbm, source=source),
        peak_flops=Figure(value=flops, source=source),
        hbm_bandwidth=Figure(value=bandwidth, source=source),
        network=Network(
            bandwidth=Figure(value=links, source=f"{source}, {links * 8 / 1e9:,.0f} Gbit/s"),
            dimensions=torus[0],
            wraps_from=torus[1],
            beyond=Figure(value=beyond, source=between),
        ),
        host_link=Figure(value=host_link, source=link),
        host_bytes=Figure(value=host[0], source=f"cloud.google.com/tpu/docs, machine {host[1]}"),
    )


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    *,
    hbm: float,
    flops: float,
    bandwidth: float,
    nvlink: float,
    pcie: int,
    machine: str,
    host: float,
    beyond: float,
    arithmetic: str = "bfloat16",
) -> Hardware:
    """Returns a GPU in NVIDIA's machine of eight; `host` and `beyond` are one GPU's share."""
    model = name.partition("-")[0]
    source = f"NVIDIA {model} data sheet, SXM, {arithmetic} without sparsity"
    shared = f"NVIDIA {machine} data sheet, an eighth of the machine"
    return Hardware(
        name=name,
        kinds=kinds,
        hbm_bytes=Figure(value=hbm, source=source),
        peak_flops=Figure(value=flops, source=source),
        hbm_bandwidth=Figure(value=bandwidth, source=source),
        network=Network(
            bandwidth=Figure(value=nvlink, source=f"{source}, NVLink, half of both directions"),
            group=8,
            beyond=Figure(value=beyond, source=shared),
        ),
        host_link=Figure(value=_PCIE[pcie], source=f"PCIe {pcie}.0 x16, one direction"),
        host_bytes=Figure(value=host, source=shared),
    )


_PCIE = {3: 16e9, 4: 32e9, 5: 64e9}

_ALL = (
    _tpu(
        "v4",
        ("TPU v4",),
        hbm=32e9,
        flops=275e12,
        bandwidth=1200e9,
        links=300e9,
        beyond=6.25e9,
        torus=(3, 4),
        host_link=16e9,
        host=(101e9, "ct4p-hightpu-4t: 407 GB"),
    ),
    _tpu(
        "v5e",
        ("TPU v5e", "TPU v5 ?lite"),
        hbm=16e9,
        flops=197e12,
        bandwidth=800e9,
        links=200e9,
        beyond=3.125e9,
        torus=(2, 16),
        host_link=16e9,
        host=(48e9, "ct5lp-hightpu-8t: 384 GB"),
    ),
    _tpu(
        "v5p",
        ("TPU v5p?",),
        hbm=95e9,
        flops=459e12,
        bandwidth=2765e9,
        links=600e9,
        beyond=6.25e9,
        torus=(3, 4),
        host_link=16e9,
        host=(112e9, "ct5p-hightpu-4t: 448 GB"),
    ),
    _tpu(
        "v6e",
        ("TPU v6e", "TPU v6 ?lite"),
        hbm=32e9,
        flops=918e12,
        bandwidth=1600e9,
        links=400e9,
        beyond=12.5e9,
        torus=(2, 16),
        host_link=32e9,
        host=(180e9, "ct6e-standard-8t: 1,440 GB"),
    ),
    _gpu(
        "V100-32GB",
        (".*V100-SXM.*32GB",),
        hbm=32e9,
        flops=125e12,
        bandwidth=900e9,
        nvlink=150e9,
        pcie=3,
        machine="DGX-1 (4 x 100 Gbit/s)",
        host=64e9,
        beyond=6.25e9,
        arithmetic="float16",
    ),
    _gpu(
        "A100-40GB",
        (".*A100-SXM.*40GB",),
        hbm=40e9,
        flops=312e12,
        bandwidth=1555e9,
        nvlink=300e9,
        pcie=4,
        machine="DGX A100 320 GB (8 x 200 Gbit/s)",
        host=128e9,
        beyond=25e9,
    ),
    _gpu(
        "A100-80GB",
        (".*A100-SXM.*80GB",),
        hbm=80e9,
        flops=312e12,
        bandwidth=2039e9,
        nvlink=300e9,
        pcie=4,
        machine="DGX A100 640 GB (8 x 200 Gbit/s)",
        host=256e9,
        beyond=25e9,
    ),
    _gpu(
        "H100",
        (".*H100 80GB HBM3",),
        hbm=80e9,
        flops=989.5e12,
        bandwidth=3350e9,
        nvlink=450e9,
        pcie=5,
        machine="DGX H100 (8 x 400 Gbit/s)",
        host=256e9,
        beyond=50e9,
    ),
    _gpu(
        "H200",
        (".*H200",),
        hbm=141e9,
        flops=989.5e12,
        bandwidth=4800e9,
        nvlink=450e9,
        pcie=5,
        machine="DGX H200 (8 x 400 Gbit/s)",
        host=256e9,
        beyond=50e9,
    ),
)
TABLE: dict[str, Hardware] = {hardware.name: hardware for hardware in _ALL}


def find(kind: str | None) -> Hardware | None:
    """Returns the hardware of a name here, a topology ('2*v6e:16x16'), or jax's device kind.

    None for what is not in the table: then there is no MFU, rather than a wrong one.
    """
    if kind is None:
        return None
    generation = kind.rpartition("*")[2].partition(":")[0]
    if generation in TABLE:
        return TABLE[generation]
    for hardware in TABLE.values():
        if any(re.fullmatch(pattern, kind, re.IGNORECASE) for pattern in hardware.kinds):
            return hardware
    return None


def named(name: str) -> Hardware:
    """Returns the hardware that a user named.

    Raises:
      ConfigError: it is not in the table.
    """
    if name not in TABLE:
        raise ConfigError(f"PlanSettings.hardware: unknown {name!r}{nearest(name, TABLE)}")
    return TABLE[name]
