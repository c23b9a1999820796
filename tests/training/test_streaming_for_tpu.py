"""The streamed step compiled for TPUs that are not here: what is copied, when, and what is kept.

Needs libtpu (extra `plan`). The model is dense, since it compiles in seconds; what is asked
of the program concerns the layers' weights, whatever the layers do with them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import models
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.layouts import Form
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor
from m6jax.planning import topologies
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update

LAYERS, WIDTH, MLP, ROWS, LENGTH = 4, 512, 4096, 64, 128
UNROLLED_LAYERS = 3  # Each is compiled.
STACK = rf"bf16\[{LAYERS},(?:{WIDTH},{MLP}|{MLP},{WIDTH})\]"
LAYER_BYTES = 2 * WIDTH * MLP * 2  # up and down of one layer, bfloat16
HOST = "S(5)"  # how the text says that an array is in host memory
MATRIX = rf"bf16\[(?:{WIDTH},{MLP}|{MLP},{WIDTH})\]"


def compile_step(form, dump, layers=LAYERS):
    """Returns the compiled step's memory and its text."""
    pytest.importorskip("libtpu")
    devices = topologies.devices_of(topologies.parse("v6e:2x4"))
    where = Partitioning()
    mesh = where.make_mesh(devices)
    config = models.tiny(
        num_layers=layers,
        embed_dim=WIDTH,
        mlp_dim=MLP,
        pattern=("DENSE",),
        moe=None,
        dtype="bfloat16",
        param_dtype="bfloat16",
        max_length=LENGTH,
    )
    model, layout, optimizer = Transformer(config), config.layout(layers, form), Adafactor()
    plain = train_state.abstract_state(model, layout, optimizer, where, mesh, averaged=False)
    state = OffloadPlan(weights=("mlp/(up|down)",), streamed=True).place(plain, layout)
    batch = {
        name: jax.ShapeDtypeStruct(
            (ROWS, LENGTH),
            jnp.float32 if name == "loss_weights" else jnp.int32,
            sharding=where.batch_sharding(mesh),
        )
        for name in ("tokens", "targets", "segment_ids", "positions", "loss_weights")
    }
    step = functools.partial(
        streamed_step,
        model=model,
        layout=layout,
        loss=Loss(),
        optimizer=optimizer,
        learning_rate=lambda step: jnp.float32(1e-3),
        update=Update(clip_norm=None),
    )
    with where.activate(mesh):
        run = jax.jit(step, donate_argnums=0, out_shardings=(train_state.shardings_of(state), None))
        options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
        compiled = run.lower(state, batch).compile(compiler_options=options)
    (text,) = dump.glob("*after_optimizations.txt")
    return compiled.memory_analysis(), text.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_step(Form.STACKED, tmp_path_factory.mktemp("stacked"))


@pytest.fixture(scope="module")
def unrolled_program(tmp_path_factory):
    return compile_step(Form.UNROLLED, tmp_path_factory.mktemp("unrolled"), UNROLLED_LAYERS)


def layer_loops(text):
    """For each loop over layers: lines where copies begin and end, and of the layers' products."""
    loops = []
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        lines = computation.splitlines()

        def find(pattern, lines=lines):
            return [i for i, line in enumerate(lines) if re.search(pattern, line)]

        starts = find(rf"%dynamic-slice-start\S* = \(\({STACK}")
        if starts and not computation.startswith("ENTRY"):
            done = rf"%dynamic-slice-done\S* = bf16\[1,(?:{WIDTH},{MLP}|{MLP},{WIDTH})\]"
            products = find(r" = .*(fusion|convolution)\(.*/mlp/\S*dot_general")
            loops.append((starts, find(done), products))
    return loops


def test_the_host_keeps_the_stacks_and_nothing_else(program):
    memory, _ = program
    assert memory.host_argument_size_in_bytes == LAYERS * LAYER_BYTES
    assert memory.host_alias_size_in_bytes == LAYERS * LAYER_BYTES
    assert memory.host_temp_size_in_bytes == 0


def test_no_whole_stack_is_on_the_device(program):
    _, text = program
    found = re.findall(rf"{STACK}\{{[^}}]*\}}", text)
    assert found
    layouts = [shape for shape in found if ":" in shape]  # of instructions; others have no memory
    assert layouts
    assert [shape for shape in layouts if HOST not in shape] == []


def test_the_next_layer_is_copied_beside_the_current_layer(program):
    """Forward and backward: before its work begins, and awaited after it."""
    loops = layer_loops(program[1])
    assert len(loops) == 2
    for starts, ends, products in loops:
        of_first_layer = [line for line in products if line < min(ends)]
        assert of_first_layer
        assert max(starts[:2]) < of_first_layer[0]


def test_at_most_two_layers_are_on_the_device(program):
    """What is carried, and one more: the layer after is copied when the first is done with."""
    memory, text = program
    for starts, ends, products in layer_loops(text):
        assert len(starts) == len(ends) == 4  # two matrices of two layers
        assert starts[2] > max(line for line in products if line < min(ends))
    # Neither weights nor gradients of four layers are among what is on the device besides.
    assert memory.argument_size_in_bytes < 2 * LAYER_BYTES
    assert memory.temp_size_in_bytes < 4 * LAYER_BYTES


def events(text):
    """Of the main program, in order: branches, and copies from and to the host that begin."""
    kinds = {
        r" conditional\(": "branch",
        rf"= \({MATRIX}\{{[^}}]*\}}, {MATRIX}\{{[^}}]*S\(5\)\}}.* copy-start\(": "fetch",
        rf"= \({MATRIX}\{{[^}}]*S\(5\)\}}, .* copy-start\(": "write",
    }
    lines = text[text.index("\nENTRY") :].splitlines()
    return [kind for line in lines for pattern, kind in kinds.items() if re.search(pattern, line)]


@pytest.mark.long
def test_unrolled_layers_too_come_and_go_one_by_one(unrolled_program):
    """Copies are in branches, but for the first layer's; an update is written before the next."""
    memory, text = unrolled_program
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < 5 * LAYER_BYTES
    first, updated = 2 * ["fetch"], 2 * ["write"]  # two matrices
    others = UNROLLED_LAYERS - 1
    assert events(text) == first + others * ["branch"] + others * ["branch", *updated] + updated
