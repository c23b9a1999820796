"""New and delinked states compiled for TPUs that are not here: what is on the device meanwhile.

Needs libtpu (extra `plan`).
"""

import models
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import state_building
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import AdamW
from m6jax.planning import topologies
from m6jax.pseudo_to_real import delinking
from m6jax.pseudo_to_real.delinking import Policy
from m6jax.training import train_state

LAYERS, WIDTH, MLP = 8, 512, 4096
CONFIG = models.tiny(
    num_layers=LAYERS,
    embed_dim=WIDTH,
    mlp_dim=MLP,
    pattern=("DENSE",),
    moe=None,
    dtype="bfloat16",
    param_dtype="bfloat16",
)
MATRICES = 2 * WIDTH * MLP  # up and down of one layer
# In bfloat16; float32 masters, averages and two moments.
LAYER_BYTES = MATRICES * (2 + 4 + 4 + 4 + 4)


def mesh_of(topology):
    pytest.importorskip("libtpu")
    return Partitioning().make_mesh(topologies.devices_of(topologies.parse(topology)))


def describe(mesh, layout):
    plain = train_state.abstract_state(
        Transformer(CONFIG), layout, AdamW(), Partitioning(), mesh, True, True
    )
    return OffloadPlan(weights=("mlp/(up|down)",), optimizer_state=True).place(plain, layout)


def assert_few_layers_at_a_time(memory, layers):
    """All layers end on the host; on the device are only so many."""
    assert memory.host_output_size_in_bytes >= LAYERS * LAYER_BYTES
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < layers * LAYER_BYTES


def test_a_new_state():
    mesh = mesh_of("v6e:1x1")  # For more chips libtpu 0.0.52 takes two minutes.
    layout = models.stacked(CONFIG)
    abstract = describe(mesh, layout)
    tx = AdamW().build(train_state.logical_axes(models.describe(CONFIG, layout)))
    make = train_state.one_layer(Transformer(CONFIG), layout, tx, 0, abstract)
    with Partitioning().activate(mesh):
        compiled = state_building.stacked_builder(make, abstract).lower().compile()
    # The layer, and what it is drawn with.
    assert_few_layers_at_a_time(compiled.memory_analysis(), 2)


def test_a_delinked_state():
    mesh = mesh_of("v6e:2x4")
    old, new = models.stacked(CONFIG, 1), models.stacked(CONFIG)
    make = delinking.one_layer(old, new, Policy.COPY)
    before, after = describe(mesh, old), describe(mesh, new)
    with Partitioning().activate(mesh):
        compiled = state_building.stacked_builder(make, after).lower(before).compile()
    # The shared layer, which stays, a copy, and one on its way to the host.
    assert_few_layers_at_a_time(compiled.memory_analysis(), 3)
