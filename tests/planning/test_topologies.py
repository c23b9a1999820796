"""Names of devices, and what stands in the way of compiling for them."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from m6jax.foundation import meshes
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.planning import hardware, topologies
from m6jax.planning.topologies import MissingCompilerError, Topology, parse


@pytest.mark.parametrize(
    ("name", "platform", "devices"),
    [
        ("v6e:16x16", "tpu", 256),
        ("v5p:8x8x8", "tpu", 512),
        ("v5e:2x4", "tpu", 8),
        ("v4:2x2x1", "tpu", 4),
        ("cpu:8", "cpu", 8),
        ("gpu:2", "gpu", 2),
    ],
)
def test_names(name, platform, devices):
    assert parse(name) == Topology(name, platform, name.split(":")[0], devices)


def test_several_slices():
    assert parse("3*v5e:4x4") == Topology("3*v5e:4x4", "tpu", "v5e", 48, num_slices=3)
    assert hardware.find("3*v5e:4x4").name == "v5e"
    for name in ("0*v5e:4x4", "2*cpu:8", "*v5e:4x4"):
        with pytest.raises(ConfigError, match=r"unknown '.*; there are slices|slices of v5e"):
            parse(name)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_devices_of_several_slices():
    mesh = Partitioning(expert=8).make_mesh(topologies.devices_of(parse("2*v6e:2x4")))
    assert meshes.crossing(mesh.devices, mesh.axis_names) == {"data": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e:16x61", r"did you mean 'v6e:16x16'.*slices of v6e: 1x1, 2x2, 2x4, .*16x16"),
        ("v5p:8x8", r"did you mean 'v5p:4x4x4'\?\); slices of v5p: 2x2x1, .*8x8x8"),
        ("v5e:64x64", r"did you mean 'v5e:16x16'\?\)"),  # by chips, not by letters
        ("v5e:0x4", r"unknown 'v5e:0x4'; slices of v5e"),
        ("v5e:many", r"unknown 'v5e:many'; slices of v5e"),
        ("H100:8", r"no slice of TPUs \(set PlanSettings.hardware = 'H100' and .*devices to"),
        ("v6:16x16", r"did you mean 'v6e:16x16'\?\); there are slices of v4, v5e, v5p, v6e"),
        ("toaster", r"unknown 'toaster'; there are slices of v4.*cpu:N and gpu:N"),
        ("cpu", r"'cpu' does not say how many devices \(such as 'cpu:8'\)"),
        ("cpu:0", r"does not say how many devices"),
    ],
)
def test_unknown_names_give_the_nearest_and_a_list(name, message):
    with pytest.raises(ConfigError, match=message):
        parse(name)


def test_devices_that_are_here():
    assert topologies.devices_of(parse("cpu:4")) == jax.devices("cpu")[:4]


def test_more_devices_than_are_here():
    with pytest.raises(ConfigError, match=r"asks for 64 devices, here are 8 .*NUM_CPU_DEVICES=64"):
        topologies.devices_of(parse("cpu:64"))
    with pytest.raises(ConfigError, match=r"asks for 2 devices, here are 0 \(compiling for GPUs"):
        topologies.devices_of(parse("gpu:2"))


def test_without_libtpu_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingCompilerError, match=r"pip install 'm6jax\[plan\]'"):
        topologies.devices_of(parse("v6e:2x2"))


def test_chips_that_libtpu_takes_for_two_devices_are_refused(monkeypatch):
    class Twice:
        devices = ("core",) * 8

    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(topologies.topologies, "get_topology_desc", lambda *_: Twice)
    with pytest.raises(MissingCompilerError, match=r"takes the 4 chips .* for 8 devices"):
        topologies.devices_of(parse("v4:2x2x1"))


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_absent_tpus_leave_the_environment_as_it_was():
    before = dict(os.environ)
    devices = topologies.devices_of(parse("v6e:2x4"))
    assert [device.platform for device in devices] == ["tpu"] * 8
    assert dict(os.environ) == before


def test_cpus_are_made_where_jax_was_not_used_yet():
    code = "from m6jax.planning import topologies as t\nprint(len(t.devices_of(t.parse('cpu:3'))))"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "3"
