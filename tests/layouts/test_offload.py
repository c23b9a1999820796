"""What rests on the host, before and after every step, and that it changes no number."""

import functools
import types

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.checkpointing import Checkpoints
from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.pytrees import flatten_named
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import offload
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.adam import over_layers
from m6jax.optimizers.weight_update import leaf_squares
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.train_step import (
    ClipBy,
    Update,
    evaluation_step,
    global_norm,
    model_loss,
    shrinks,
    train_step,
)

MESH, ONE = Partitioning(data=2, expert=4), Partitioning(data=1)
CONFIG = models.tiny(
    num_layers=2,
    moe=models.experts(num_experts=4, num_selected_experts=1),
    remat="FULL",
)
STACKED, UNROLLED = models.stacked(CONFIG), models.unrolled(CONFIG)
FOUR = models.unrolled(models.tiny(num_layers=4))
PLANS = {
    "moments": OffloadPlan(optimizer_state=True, min_bytes=0),
    "weights": OffloadPlan(weights=("",), min_bytes=0),
    "both": OffloadPlan(weights=("moe", "attention"), optimizer_state=True, min_bytes=64),
}
OPTIMIZERS = {"adamw": AdamW(), "adafactor": Adafactor(min_dim_size_to_factor=4)}


def describe(
    config=CONFIG, layout=STACKED, optimizer=OPTIMIZERS["adamw"], averaged=False, where=MESH
):
    mesh = where.make_mesh(jax.devices()[: where.data * where.expert])
    return train_state.abstract_state(Transformer(config), layout, optimizer, where, mesh, averaged)


def kinds(tree):
    """Names of leaves on the host."""
    return [n for n, leaf in flatten_named(tree) if leaf.sharding.memory_kind == "pinned_host"]


@functools.cache
def five_steps(plan, optimizer, layout=STACKED, config=CONFIG, where=MESH, **update):
    """Returns the state after five steps; asserts where everything rests after each."""
    model, update = Transformer(config), Update(**update)
    plain = describe(config, layout, optimizer, update.average_decay is not None, where)
    abstract = plan.place(plain, layout)
    shardings = train_state.shardings_of(abstract)
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    step = functools.partial(
        train_step,
        loss_fn=model_loss(model, layout, Loss(), plan.activations),
        layout=layout,
        tx=tx,
        learning_rate=lambda step: 1e-2 / (1 + step),
        update=update,
    )
    mesh = plain.step.sharding.mesh
    with where.activate(mesh):
        state = train_state.create(
            models.draw(config, layout), tx, 0, update.average_decay is not None
        )
        state = jax.device_put(jax.device_get(state), shardings)
        batch = jax.device_put(
            models.make_batch(8 * update.microbatches), where.batch_sharding(mesh)
        )
        run = models.jit(step, exact=True, donate_argnums=0, out_shardings=(shardings, None))
        run = run.lower(state, batch).compile()
        for _ in range(5):
            assert kinds(state) == kinds(abstract)
            state, metrics = jax.block_until_ready(run(state, batch))
        assert kinds(state) == kinds(abstract)
    return state, metrics


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.long("moments")
def test_five_steps_are_bit_equal(plan):
    """B12."""
    check_bit_equal(plan)


@pytest.mark.parametrize("where", [MESH, ONE], ids=["mesh", "one"])
@pytest.mark.long("mesh")
def test_five_steps_with_factored_moments_are_bit_equal(where):
    """B12: means over a matrix too are the same for one layer as for a stack."""
    check_bit_equal(PLANS["both"], OPTIMIZERS["adafactor"], where=where)


def test_five_steps_of_unrolled_layers_are_bit_equal():
    """Some layers' weights, an average that lies with them, microbatches and clipping by layer."""
    plan = OffloadPlan(weights=("moe",), layers=1, activations=True, min_bytes=0)
    settings = {"microbatches": 2, "average_decay": 0.9, "clip_norm": 0.1, "clip_by": "LAYER"}
    state = check_bit_equal(plan, layout=UNROLLED, where=ONE, **settings)
    assert {name.split("/moe/")[0] for name in kinds(state)} == {
        "params/layers_1",
        "extra/averaged/layers_1",
    }


def test_five_steps_of_shared_layers_are_bit_equal():
    check_bit_equal(PLANS["both"], layout=models.stacked(CONFIG, 1), where=ONE)


def check_bit_equal(plan, optimizer=OPTIMIZERS["adamw"], **case):
    state, metrics = five_steps(plan, optimizer, **case)
    expected, expected_metrics = five_steps(OffloadPlan(), optimizer, **case)
    assert kinds(state)
    models.assert_equal(jax.device_get(state), jax.device_get(expected))
    models.assert_equal(jax.device_get(metrics), jax.device_get(expected_metrics))
    return state


class TestPlan:
    def place(self, layout=UNROLLED, averaged=False, **plan):
        config = CONFIG if layout is not FOUR else models.tiny(num_layers=4)
        return kinds(OffloadPlan(**plan).place(describe(config, layout, averaged=averaged), layout))

    def test_nothing_is_moved_by_default(self):
        plain = describe()
        assert OffloadPlan().place(plain, STACKED) is plain
        assert kinds(plain) == []

    def test_weights_by_pattern_and_layer(self):
        moved = self.place(weights=("moe/(up|down)",), layers=(1,), min_bytes=0)
        assert moved == ["params/layers_1/moe/down", "params/layers_1/moe/up"]

    def test_a_count_takes_the_last_layers(self):
        assert self.place(FOUR, weights=("moe/up",), layers=3, min_bytes=0) == [
            f"params/layers_{i}/moe/up" for i in (1, 2, 3)
        ]

    def test_averages_lie_with_their_weights(self):
        moved = self.place(STACKED, averaged=True, weights=("moe/up",), min_bytes=0)
        assert moved == ["params/layers/moe/up", "extra/averaged/layers/moe/up"]

    def test_optimizer_state_of_embeddings_too(self):
        moved = self.place(layers=(0,), optimizer_state=True, min_bytes=0)
        assert "opt_state/mu/embedder/table" in moved
        assert {name.split("/")[2] for name in moved} == {"embedder", "final_norm", "layers_0"}
        assert all(name.startswith("opt_state/") for name in moved)

    def test_small_leaves_stay(self):
        """One layer's up: 4 experts x 16 x 16 x 4 bytes; attention's matrices: 16 x 16 x 4."""
        moved = self.place(STACKED, weights=("",), min_bytes=4096)
        assert moved == ["params/layers/moe/down", "params/layers/moe/up"]

    def test_bytes_are_told_by_memory(self):
        plain = describe()
        before = offload.bytes_by_memory(plain)
        assert before["pinned_host"] == 0
        placed = OffloadPlan(weights=("moe/up",), min_bytes=0).place(plain, STACKED)
        after = offload.bytes_by_memory(placed)
        assert after == {
            "pinned_host": 2 * 4096,
            "device": before["device"] - 2 * 4096,
        }

    @pytest.mark.parametrize(
        ("layout", "plan", "message"),
        [
            (
                STACKED,
                {"weights": ("moe/up", "atention")},
                r"OffloadPlan.weights: 'atention' is found in no name .*params/layers/moe/up",
            ),
            (
                STACKED,
                {"weights": ("moe",)},
                r"OffloadPlan.weights: .*largest has 4,096 bytes, less .*min_bytes = 1,048,576",
            ),
            (STACKED, {"optimizer_state": True}, r"OffloadPlan.optimizer_state: .* 4,096 bytes"),
            (
                UNROLLED,
                {"weights": ("moe",), "layers": (0, 2), "min_bytes": 0},
                r"OffloadPlan.layers: \(0, 2\) goes beyond the 2 distinct layers",
            ),
            (
                UNROLLED,
                {"weights": ("moe",), "layers": 3, "min_bytes": 0},
                r"OffloadPlan.layers: 3 goes beyond the 2 distinct layers",
            ),
            (
                models.stacked(CONFIG, 1),
                {"weights": ("moe",), "layers": 1, "min_bytes": 0},
                r"OffloadPlan.layers: 1 of a stack in which layers share .*\(1 distinct of 2\)",
            ),
        ],
    )
    def test_refuses_what_it_cannot_place(self, layout, plan, message):
        with pytest.raises(ConfigError, match=message):
            self.place(layout, **plan)

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            ({"weights": ("moe(",)}, r"OffloadPlan.weights: 'moe\(' is no pattern"),
            ({"layers": 0}, r"OffloadPlan.layers: 0 \(numbers from 0, a count from 1"),
            ({"layers": ()}, r"OffloadPlan.layers: \(\)"),
            ({"layers": (1, -1)}, r"OffloadPlan.layers: \(1, -1\)"),
            ({"min_bytes": -1}, r"OffloadPlan.min_bytes: -1 is negative"),
        ],
    )
    def test_refuses_what_cannot_be(self, plan, message):
        with pytest.raises(ConfigError, match=message):
            OffloadPlan(**plan)

    def test_refuses_devices_without_host_memory(self):
        memory = types.SimpleNamespace(kind="device")
        device = types.SimpleNamespace(
            platform="abacus", device_kind="Roman", addressable_memories=lambda: [memory]
        )
        message = r"abacus devices \(Roman\) have no memory 'pinned_host' \(they have: device\)"
        with pytest.raises(ConfigError, match=message):
            offload.check_host_memory(types.SimpleNamespace(local_devices=[device]))


class TestMoving:
    """Inside of a compiled function a value knows where it is."""

    def run(self, fn, kind):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        return models.jit(fn)(jax.device_put(jnp.arange(4.0), sharding))

    @pytest.mark.parametrize("kind", ["pinned_host", "device"])
    def test_to_device_and_to_host(self, kind):
        there, here, back = self.run(
            lambda x: (
                (offload.to_host({"x": x}), offload.to_device(x), offload.like(x + 0, x))
                if kind == "device"
                else (offload.to_host({"x": x}), offload.to_device(x), offload.like(x, x))
            ),
            kind,
        )
        assert there["x"].sharding.memory_kind == "pinned_host"
        assert here.sharding.memory_kind == "device"
        assert back.sharding.memory_kind == kind
        np.testing.assert_array_equal(here, np.arange(4.0))

    def test_evaluation_of_weights_on_the_host(self):
        state, _ = five_steps(PLANS["weights"], OPTIMIZERS["adamw"])
        plain, _ = five_steps(OffloadPlan(), OPTIMIZERS["adamw"])
        evaluate = functools.partial(evaluation_step, model=Transformer(CONFIG), layout=STACKED)
        with MESH.activate(state.step.sharding.mesh):
            got, expected = (
                models.jit(evaluate, exact=True)(s.params, models.make_batch())
                for s in (state, plain)
            )
        models.assert_equal(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("back", [False, True], ids=["host_to_device", "device_to_host"])
def test_checkpoints_cross_memories_and_meshes(back, tmp_path):
    """B12: saved with offload and restored without on another mesh, and the reverse."""
    plans = [PLANS["both"], OffloadPlan()]
    saved, restored = plans[::-1] if back else plans
    state, _ = five_steps(saved, OPTIMIZERS["adamw"])
    other = Partitioning(data=4, expert=2)
    abstract = restored.place(describe(where=other), STACKED)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, {}, {}, wait=True)
        got = checkpoints.restore(5, abstract)
    models.assert_equal(jax.device_get(got), jax.device_get(state))
    assert kinds(got) == kinds(abstract)
    assert bool(kinds(got)) == back


STACK = {"layers": {"a": jnp.array([[3.0], [0.0]]), "b": jnp.array([4.0, 1.0])}}
LAYERS = {
    "layers_0": {"a": jnp.array([3.0]), "b": jnp.array(4.0)},
    "layers_1": {"a": jnp.array([0.0]), "b": jnp.array(1.0)},
}
REST = {"head": jnp.array([5.0, 12.0]), "norm": jnp.array(0.0)}


class TestClipByLayer:
    """Layers [3, 4] and [0, 1] of norms 5 and 1, and the rest of norm 13; clipped to 2."""

    UPDATE = Update(clip_norm=2.0, clip_by=ClipBy.LAYER)

    def clip(self, grads, layout):
        squares = leaf_squares(grads)
        factors = shrinks(squares, global_norm(squares, layout), self.UPDATE)
        return jax.tree.map(lambda g, c: g * over_layers(c, g.ndim), grads, factors)

    def test_stacked(self):
        grads = REST | STACK
        clipped = self.clip(grads, STACKED)
        np.testing.assert_allclose(clipped["layers"]["a"], [[1.2], [0.0]], rtol=1e-6)
        np.testing.assert_allclose(clipped["layers"]["b"], [1.6, 1.0], rtol=1e-6)
        np.testing.assert_allclose(clipped["head"], [10 / 13, 24 / 13], rtol=1e-6)

    def test_unrolled(self):
        grads = REST | LAYERS
        clipped = self.clip(grads, UNROLLED)
        np.testing.assert_allclose(clipped["layers_0"]["a"], [1.2], rtol=1e-6)
        np.testing.assert_allclose(clipped["layers_0"]["b"], 1.6, rtol=1e-6)
        np.testing.assert_allclose(clipped["layers_1"]["b"], 1.0, rtol=1e-6)
        np.testing.assert_allclose(clipped["head"], [10 / 13, 24 / 13], rtol=1e-6)
