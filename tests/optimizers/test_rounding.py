"""Rounding of weights of few bits: unbiased, the same for every layout, mesh and step."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.layouts import Form, Layout, cut, unstack
from m6jax.layouts.offload import OffloadPlan
from m6jax.modeling.transformer import Transformer
from m6jax.optimizers import Adafactor, AdamW
from m6jax.optimizers.rounding import Rounding, check_rounding, leaf_keys, stochastic, to_types
from m6jax.training import train_state
from m6jax.training.losses import Loss
from m6jax.training.streaming import streamed_step
from m6jax.training.train_step import Update, model_loss, train_step

KEY = jax.random.key(0)
HOST = OffloadPlan(weights=("",), optimizer_state=True, min_bytes=0)
NONE = OffloadPlan()
ADAMW = AdamW(weight_decay=0.1)
MESH = Partitioning(data=2, expert=4)
CONFIG = models.tiny(
    num_layers=2,
    moe=models.experts(num_experts=4, num_selected_experts=1, group_size=4),
    param_dtype="bfloat16",
    remat="FULL",
)


class TestStochastic:
    # bfloat16 is 1/128 apart from 1 to 2, 1/32 from 4 to 8; below 1 it is 1/256.
    @pytest.mark.parametrize(
        ("value", "below", "above"),
        [
            (1 + 1 / 1024, 1, 1 + 1 / 128),
            (-1 - 1 / 1024, -1 - 1 / 128, -1),
            (5 + 1 / 40, 5, 5 + 1 / 32),
            (1 - 1 / 2048, 1 - 1 / 256, 1),
        ],
    )
    def test_is_one_of_the_neighbours_and_right_on_average(self, value, below, above):
        draws = 40_000
        got = stochastic(jnp.full(draws, value, jnp.float32), KEY)
        assert got.dtype == jnp.bfloat16
        got = np.asarray(got, np.float64)
        assert set(got) == {below, above}
        share = (value - below) / (above - below)
        # Five standard deviations of a mean of so many draws.
        tolerance = 5 * (above - below) * (share * (1 - share) / draws) ** 0.5
        assert abs(got.mean() - value) < tolerance

    def test_what_bfloat16_has_stays(self):
        values = jnp.array([0.0, -0.0, 1.0, -1.5, 3.0e38, 1e-38, jnp.inf, -jnp.inf], jnp.bfloat16)
        many = jnp.tile(values.astype(jnp.float32), (500, 1))
        np.testing.assert_array_equal(stochastic(many, KEY), np.tile(values, (500, 1)))
        assert np.isnan(np.asarray(stochastic(jnp.full(500, jnp.nan), KEY))).all()

    def test_updates_that_nearest_loses_add_up(self):
        """1000 times 1/4096 of a weight's spacing of 1/128: 1000 / 4096 / 128 in all."""
        update, weights = 1 / 4096 / 128, jnp.ones(20_000, jnp.bfloat16)

        def step(weights, key):
            return stochastic(weights.astype(jnp.float32) + update, key), None

        after, _ = jax.jit(lambda w: jax.lax.scan(step, w, jax.random.split(KEY, 1000)))(weights)
        moved = np.asarray(after, np.float64).mean() - 1
        assert moved == pytest.approx(1000 * update, rel=0.05)
        assert (weights.astype(jnp.float32) + update).astype(jnp.bfloat16).max() == 1


PARAMS = {
    "head": jnp.ones(3, jnp.bfloat16),
    "layers": {"w": jnp.ones((12, 2), jnp.bfloat16), "norm": jnp.ones((12, 2))},
}
RUNS = Layout(depth=12, unit=12, borders=(5,))


class TestKeys:
    def test_one_for_each_leaf_and_layer(self):
        keys = leaf_keys(KEY, PARAMS)
        rows = np.concatenate([np.reshape(leaf, (-1, 2)) for leaf in jax.tree.leaves(keys)])
        assert len({tuple(row) for row in rows}) == 12 + 12 + 1

    def test_unrolled_layers_have_those_of_the_stack(self):
        stacked, unrolled = leaf_keys(KEY, PARAMS), leaf_keys(KEY, unstack(PARAMS))
        models.assert_equal(unstack(stacked), unrolled)

    def test_runs_of_a_stack_have_those_of_the_stack(self):
        models.assert_equal(cut(leaf_keys(KEY, PARAMS), RUNS), leaf_keys(KEY, cut(PARAMS, RUNS)))

    def test_float32_needs_none(self):
        assert leaf_keys(KEY, {"w": jnp.ones(3)}) is None

    def test_each_layer_and_purpose_rounds_by_itself(self):
        params = {"layers": {"w": jnp.ones((2, 200), jnp.bfloat16), "b": jnp.ones((2, 200))}}
        keys = leaf_keys(KEY, params)
        values = jax.tree.map(lambda x: jnp.full(x.shape, 1 + 1 / 256), params)
        first, other = (to_types(values, params, keys, purpose=i)["layers"] for i in (0, 1))
        assert first["b"].dtype == jnp.float32
        np.testing.assert_array_equal(first["b"], values["layers"]["b"])
        drawn = {np.asarray(w, np.float32).tobytes() for x in (first, other) for w in x["w"]}
        assert len(drawn) == 4


@pytest.mark.parametrize(
    ("how", "dtype", "message"),
    [
        ("STOCHASTIC", "float16", r"Update.rounding: STOCHASTIC is for bfloat16, not .*'float16'"),
        ("MASTER", "float32", r"Update.rounding: MASTER keeps float32 copies of weights that are"),
    ],
)
def test_refuses_what_a_type_cannot_have(how, dtype, message):
    with pytest.raises(ConfigError, match=message):
        check_rounding(Rounding[how], dtype)
    check_rounding(Rounding.NEAREST, dtype)
    check_rounding(Rounding[how], "bfloat16")


@functools.cache
def train(
    streamed=False,
    form=Form.STACKED,
    unit=2,
    how=Rounding.STOCHASTIC,
    where=None,
    plan=NONE,
    optimizer=ADAMW,
    steps=3,
):
    """Returns the state after some steps from the same bfloat16 weights."""
    model, layout = Transformer(CONFIG), CONFIG.layout(unit, form)
    update = Update(clip_norm=None, average_decay=0.9, rounding=how)
    devices = jax.devices()[: 8 if where else 1]
    where = where or Partitioning()
    mesh = where.make_mesh(devices)
    master = how is Rounding.MASTER
    plain = train_state.abstract_state(model, layout, optimizer, where, mesh, True, master)
    shardings = train_state.shardings_of(plan.place(plain, layout))
    tx = optimizer.build(train_state.logical_axes(model.parameters(layout)))
    common = {"layout": layout, "learning_rate": lambda step: 1e-3, "update": update}
    loss = Loss(chunk_length=4)
    if streamed:
        step = functools.partial(
            streamed_step, model=model, loss=loss, optimizer=optimizer, **common
        )
    else:
        step = functools.partial(
            train_step, loss_fn=model_loss(model, layout, loss), tx=tx, **common
        )
    params = models.draw(CONFIG, models.stacked(CONFIG, unit))
    params = unstack(params) if form is Form.UNROLLED else params
    with where.activate(mesh):
        state = models.jit(lambda p: train_state.create(p, tx, 0, True, None, master))(params)
        state = jax.device_put(jax.device_get(state), shardings)
        batch = jax.device_put(models.make_batch(), where.batch_sharding(mesh))
        run = models.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        run = run.lower(state, batch).compile()
        for _ in range(steps):
            state, _ = jax.block_until_ready(run(state, batch))
    return state


def assert_rounds_alike(state, expected):
    """Nearly all bfloat16 weights are equal bit for bit; the others are neighbours.

    What is rounded differs by rounding itself (another order of additions), so that one in some
    thousands lies on the other side of the random bits.
    """
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        few_bits = wanted.dtype == jnp.bfloat16
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_allclose(got, wanted, rtol=2**-6, atol=1e-5)
        assert not few_bits or (got != wanted).mean() < 0.02


class TestSteps:
    def test_stochastic_moves_weights_that_nearest_leaves(self):
        """Updates of 1e-3 are below half the spacing of weights near 1/4 and above."""
        stochastic_, nearest, master = (
            train(how=how) for how in (Rounding.STOCHASTIC, Rounding.NEAREST, Rounding.MASTER)
        )
        start = models.draw(CONFIG, models.stacked(CONFIG))["layers"]["moe"]["up"]
        large = np.abs(np.asarray(start, np.float32)) > 0.5  # 1/256 apart
        exact = np.asarray(master.extra.master["layers"]["moe"]["up"])[large]
        start = np.asarray(start, np.float64)[large]
        moved = np.sign(exact - start)
        got = [
            (moved * (np.asarray(state.params["layers"]["moe"]["up"], np.float64)[large] - start))
            for state in (stochastic_, nearest)
        ]
        wanted = np.abs(exact - start).mean()
        assert got[0].mean() == pytest.approx(wanted, rel=0.5)
        assert got[1].mean() < 0.1 * wanted

    def test_unrolled_layers_round_like_the_stack(self):
        assert_rounds_alike(train(form=Form.UNROLLED).params, unstack(train().params))

    def test_a_mesh_rounds_like_one_device(self):
        state, expected = train(where=MESH), train()
        assert_rounds_alike(state.params, expected.params)
        assert_rounds_alike(state.extra.averaged, expected.extra.averaged)

    def test_weights_on_the_host_are_bit_equal(self):
        models.assert_equal(jax.device_get(train(plan=HOST)), jax.device_get(train()))

    @pytest.mark.parametrize("form", Form)
    @pytest.mark.parametrize("how", [Rounding.STOCHASTIC, Rounding.MASTER])
    @pytest.mark.long("Rounding.STOCHASTIC-Form.UNROLLED", "Rounding.MASTER-Form.STACKED")
    def test_the_streamed_step_rounds_alike(self, how, form):
        state = train(streamed=True, plan=HOST, how=how, form=form)
        expected = train(how=how, form=form)
        assert_rounds_alike(state.params, expected.params)
        assert_rounds_alike(state.extra.averaged, expected.extra.averaged)
        if how is Rounding.MASTER:
            models.assert_close(state.extra.master, expected.extra.master, 1e-4)

    @pytest.mark.parametrize("unit", [1, 2])
    @pytest.mark.long("1")
    def test_the_streamed_step_rounds_alike_on_a_mesh(self, unit):
        case = {"where": MESH, "optimizer": Adafactor(min_dim_size_to_factor=4), "unit": unit}
        assert_rounds_alike(train(streamed=True, plan=HOST, **case).params, train(**case).params)


class TestMaster:
    def test_weights_are_rounded_from_it(self):
        state = train(how=Rounding.MASTER, plan=HOST)
        rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), state.extra.master, state.params)
        models.assert_equal(jax.device_get(rounded), jax.device_get(state.params))
        up = state.extra.master["layers"]["moe"]["up"]
        assert up.dtype == state.extra.averaged["layers"]["moe"]["up"].dtype == jnp.float32
        assert up.sharding.memory_kind == "pinned_host"
        assert (np.asarray(up) != np.asarray(state.params["layers"]["moe"]["up"])).mean() > 0.9
