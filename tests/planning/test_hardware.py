"""The table of hardware: known names, sources, networks."""

import dataclasses
import pathlib

import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.planning.hardware import ASSUMED, TABLE, Figure, find, named


def figures(value: object) -> list[Figure]:
    if isinstance(value, Figure):
        return [value]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [f for field in fields for f in figures(getattr(value, field.name))]


def test_every_figure_has_a_source():
    assert set(TABLE) == {
        *("v4", "v5e", "v5p", "v6e", "V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200")
    }
    for hardware in TABLE.values():
        found = figures(hardware)
        assert len(found) >= 6
        for figure in found:
            assert figure.value > 0
            assert len(figure.source) > 10
    assert TABLE["v6e"].host_link.source.startswith(ASSUMED)
    assert not TABLE["H100"].host_link.source.startswith(ASSUMED)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("v6e:16x16", "v6e"),
        ("TPU v6 lite", "v6e"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v4", "v4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", None),
        ("cpu:8", None),
        (None, None),
    ],
)
def test_hardware_is_found_by_what_jax_calls_it(kind, name):
    found = find(kind)
    assert (found.name if found else None) == name


def test_a_misspelt_name_is_refused_with_the_nearest():
    assert named("H200").flops == 989.5e12
    with pytest.raises(ConfigError, match=r"unknown 'h200' \(did you mean 'H200'\?\)"):
        named("h200")


def test_the_documentation_has_the_table():
    page = pathlib.Path(__file__).parents[2] / "docs" / "planning.md"
    rows = [line.split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    written = {row[0].removeprefix("| "): row[1:7] for row in rows if len(row) > 7}
    for name, hardware in TABLE.items():
        network = hardware.network
        beyond = f" ({network.beyond.value / 1e9:g} beyond {network.group or 'a slice'})"
        assert written[name] == [
            f"{hardware.hbm_bytes.value / 1e9:g}",
            f"{hardware.flops / 1e12:g}",
            f"{hardware.hbm_bandwidth.value / 1e9:,g}",
            f"{network.bandwidth.value / 1e9:g}{beyond}",
            f"{hardware.host_link.value / 1e9:g}",
            f"{hardware.host_bytes.value / 1e9:g}",
        ]
