"""What devices say to each other in one sparse layer, read from the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.modeling.config import MoEConfig
from m6jax.modeling.moe import MoE

# B rows, T length, M width, H expert's width, E experts. All sizes differ, so that shapes tell.
B, T, M, H, E = 8, 4, 16, 32, 24

MESHES = {
    "1x8x1": Partitioning(data=1, expert=8, model=1),
    "2x4x1": Partitioning(data=2, expert=4, model=1),
}
DISPATCH = {
    "capacity": MoEConfig(num_experts=E, num_prototypes=2, capacity_factor=1.0),
    "dropless": MoEConfig(num_experts=E, num_prototypes=2, capacity_factor=None),
}


@functools.cache
def programs(where, experts):
    """Returns the text of the compiled layer, and of its gradient to weights and input."""
    layer = MoE(experts, H, False, 1.0, jnp.float32, jnp.float32)
    x = jax.ShapeDtypeStruct((B, T, M), jnp.float32)
    mask = jax.ShapeDtypeStruct((B, T), bool)
    boxed = jax.eval_shape(layer.init, jax.random.key(0), x, mask, None)["params"]
    mesh = where.make_mesh()
    rows, weights = where.batch_sharding(mesh), where.weight_shardings(boxed, mesh)

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(lambda p: p.value, boxed, is_leaf=is_parameter)
    arguments = (jax.tree.map(place, params, weights), place(x, rows), place(mask, rows))

    def forward(params, x, mask):
        return layer.apply({"params": params}, x, mask, None).x

    def loss(params, x, mask):
        return (forward(params, x, mask) ** 2).sum()

    with where.activate(mesh):
        layer_and_gradient = (
            models.jit(forward, out_shardings=rows),
            models.jit(jax.grad(loss, (0, 1)), out_shardings=(weights, rows)),
        )
        return tuple(f.lower(*arguments).compile().as_text() for f in layer_and_gradient)


def collectives(text, kind):
    """Returns the result shapes of a program's collectives of one kind."""
    return re.findall(rf"= (\S.*?) {kind}(?:-start)?\(", text)


def groups_of(line):
    """Returns the devices that take part together in the collective of a line."""
    groups = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if groups:
        return [
            [int(n) for n in group.split(",")] for group in re.findall(r"[\d,]+\d|\d", groups[1])
        ]
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)  # jax 0.12
    if named:
        axes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", named[1])}
        devices = np.arange(np.prod([*axes.values()])).reshape([*axes.values()])
        summed = [list(axes).index(axis) for axis in re.findall(r"'(\w+)'", named[2])]
        last = np.moveaxis(devices, summed, range(-len(summed), 0))
        return last.reshape(-1, np.prod([devices.shape[i] for i in summed])).tolist()
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    rows, columns = int(iota[1]), int(iota[2])
    devices = np.arange(rows * columns).reshape([int(n) for n in iota[3].split(",")])
    if iota[4]:
        devices = devices.transpose([int(n) for n in iota[4].split(",")])
    return devices.reshape(rows, columns).tolist()


@pytest.mark.parametrize("where", MESHES.values(), ids=MESHES)
def test_rows_go_to_the_experts_and_back_once(where):
    """Two all-to-alls forward; without rematerialisation two more backward."""
    forward, gradient = programs(where, DISPATCH["capacity"])
    assert len(collectives(forward, "all-to-all")) == 2
    assert len(collectives(gradient, "all-to-all")) == 4


@pytest.mark.parametrize("where", MESHES.values(), ids=MESHES)
def test_dropless_also_tells_the_experts_numbers(where):
    """Which expert a row is for goes along, once; it has no gradient."""
    forward, gradient = programs(where, DISPATCH["dropless"])
    numbers = [s for s in collectives(forward, "all-to-all") if re.search(r"s32\[", s)]
    assert len(collectives(forward, "all-to-all")) == 2 + len(numbers)
    assert len(numbers) == 1
    assert len(collectives(gradient, "all-to-all")) == 4 + len(numbers)


@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("where", MESHES.values(), ids=MESHES)
def test_neither_experts_nor_tokens_are_gathered(where, dispatch):
    """Only the router's matrix, [M, E], which every token needs whole."""
    for text in programs(where, DISPATCH[dispatch]):
        shapes = {re.sub(r"\{.*", "", shape) for shape in collectives(text, "all-gather")}
        assert shapes == {f"f32[{M},{E}]"}
        assert collectives(text, "collective-permute") == []


@pytest.mark.parametrize("where", MESHES.values(), ids=MESHES)
def test_gradients_of_experts_are_summed_over_data_alone(where):
    _, gradient = programs(where, DISPATCH["capacity"])
    own = E // where.expert
    of_experts = re.compile(rf"= .*f32\[{own},(?:{M},{H}|{H},{M})\].* all-reduce\(")
    sums = [line for line in gradient.splitlines() if of_experts.search(line)]
    assert sums
    for line in sums:
        assert groups_of(line) == np.arange(8).reshape(where.data, where.expert).T.tolist()
