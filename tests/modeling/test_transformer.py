"""The whole network: layouts, initial values, randomness, types."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import linen as nn

from m6jax import layouts
from m6jax.foundation import pytrees
from m6jax.foundation.partitioning import Partitioning, is_parameter
from m6jax.layouts import Form
from m6jax.modeling.block import Layer, join_pattern
from m6jax.modeling.config import LayerKind, ModelConfig, MoEConfig
from m6jax.modeling.transformer import Transformer

FOUR = models.tiny(num_layers=4)
DROPLESS = models.experts(capacity_factor=None)
EVERYTHING = models.tiny(
    num_layers=4,
    num_kv_heads=2,
    head_dim=4,
    pattern=("DENSE", "SPARSE"),
    norm="LAYER",
    sandwich_norm=True,
    positions="LEARNED",
    gated_mlp=True,
    tied_output=False,
    patch_dim=3,
)
BATCH = models.make_batch(rows=4)


@functools.cache
def initial(layout, seed=0):
    # Not jitted: one program for each shape serves all layers and layouts.
    return jax.device_get(Transformer(FOUR).init(jax.random.key(seed), layout))


def uses_one_by_one(config, layers, rest, key):
    """Logits from `block` with the use's number as given: layers is [(parameters, use)]."""
    model = Transformer(config)

    @models.jit
    def run(layers, rest):
        context = model.context(BATCH, key)
        x = model.embed(rest, BATCH)
        for params, use in layers:
            x, _ = model.block(params, x, context, use)
        return model.logits(model.head_params(rest), x)

    return run([(params, jnp.int32(use)) for params, use in layers], rest)


class TestLayouts:
    """B5: four MoE layers, however they lie."""

    def params(self):
        return models.draw(FOUR, models.stacked(FOUR))

    def expected(self):
        return models.loss_fn(FOUR, models.stacked(FOUR))(self.params(), BATCH)

    def test_unrolled_equals_scanned(self):
        (total, output), grads = self.expected()
        params = layouts.unstack(self.params())
        (got_total, got), got_grads = models.loss_fn(FOUR, models.unrolled(FOUR))(params, BATCH)
        models.assert_close(got.logits, output.logits)
        models.assert_close(got_total, total)
        models.assert_close(got.router, output.router, 2e-6)
        models.assert_close(layouts.stack(got_grads), grads, 5e-6)

    @pytest.mark.parametrize("remat", ["ALL_BUT_PRODUCTS", "FULL"])
    def test_rematerialised_equals_plain(self, remat):
        config = models.tiny(num_layers=4, remat=remat)
        (total, output), grads = self.expected()
        (got_total, got), got_grads = models.loss_fn(config, models.stacked(config))(
            self.params(), BATCH
        )
        models.assert_close((got_total, got.logits), (total, output.logits))
        models.assert_close(got.router, output.router, 2e-6)
        models.assert_close(got_grads, grads, 5e-6)

    @pytest.mark.parametrize("unit", [1, 2])
    def test_shared_equals_copies(self, unit):
        """B15: bit-equal logits between scans; a shared gradient is the sum over its uses."""
        shared = models.draw(FOUR, models.stacked(FOUR, unit))
        copies = layouts.expand(shared, models.stacked(FOUR, unit), models.stacked(FOUR))
        (total, output), grads = models.loss_fn(FOUR, models.stacked(FOUR))(copies, BATCH)
        (got_total, got), got_grads = models.loss_fn(FOUR, models.stacked(FOUR, unit))(
            shared, BATCH
        )
        models.assert_equal(got.logits, output.logits)
        models.assert_close(got_total, total)
        models.assert_close(got.router, output.router)
        summed = jax.tree.map(lambda g: g.reshape(-1, unit, *g.shape[1:]).sum(0), grads["layers"])
        models.assert_close(got_grads, grads | {"layers": summed}, 5e-6)

    def test_every_layer_reports_for_itself(self):
        """Four different values; that they are in order, unrolled layers show."""
        (_, output), _ = self.expected()
        assert output.router.load_balance_loss.shape == (4,)
        assert output.router.chosen.shape == (4, 8)
        assert len(set(np.asarray(output.router.load_balance_loss).tolist())) == 4

    def test_everything_at_once(self):
        """Both kinds of layers, patches, and every option that is off by default."""
        batch = models.make_batch(rows=2, prefix=2) | {
            "patches": np.random.default_rng(0).normal(size=(2, 2, 3)).astype(np.float32),
            "patch_mask": np.array([[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]),
        }
        shared_layout, layout = models.stacked(EVERYTHING, 2), models.stacked(EVERYTHING)
        shared = models.draw(EVERYTHING, shared_layout)
        copies = layouts.expand(shared, shared_layout, layout)
        scanned = models.logits_fn(EVERYTHING, layout)(copies, batch)
        assert scanned.dtype == jnp.float32
        assert np.isfinite(scanned).all()
        models.assert_equal(models.logits_fn(EVERYTHING, shared_layout)(shared, batch), scanned)
        apart = models.logits_fn(EVERYTHING, models.unrolled(EVERYTHING))(
            layouts.unstack(copies), batch
        )
        models.assert_close(apart, scanned)


class TestParameters:
    def test_names(self):
        assert pytrees.names(models.draw(FOUR, models.stacked(FOUR))) == [
            "embedder/table",
            "final_norm/scale",
            "layers/attention/key",
            "layers/attention/output",
            "layers/attention/query",
            "layers/attention/value",
            "layers/attention_norm/scale",
            "layers/mlp_norm/scale",
            "layers/moe/down",
            "layers/moe/router/kernel",
            "layers/moe/up",
        ]

    def test_names_of_everything(self):
        names = set(pytrees.names(models.draw(EVERYTHING, models.unrolled(EVERYTHING))))
        assert {"head/kernel", "patches/kernel", "embedder/positions"} <= names
        assert "layers_1/sparse_1/moe/gate" in names
        assert "layers_0/dense_0/mlp/up" in names
        assert "layers_0/dense_0/attention_after_norm/bias" in names
        assert not any(name.startswith("layers_2") for name in names)  # two blocks of two layers

    @pytest.mark.parametrize("form", Form)
    @pytest.mark.parametrize("config", [FOUR, EVERYTHING], ids=["four", "everything"])
    def test_initial_values_are_as_described(self, config, form):
        layout = config.layout(4, form)
        described = Transformer(config).parameters(layout)
        values = jax.eval_shape(lambda: Transformer(config).init(jax.random.key(0), layout))
        shapes = jax.tree.map(lambda p: p.value, described, is_leaf=is_parameter)
        assert pytrees.differences(values, shapes) == []
        for name, p in pytrees.flatten_named(described, is_leaf=is_parameter):
            assert len(p.axes) == len(p.value.shape), name
            assert (p.axes[:1] == ("layers",)) == name.startswith("layers/"), name

    def test_every_layout_begins_with_the_same_numbers(self):
        whole = initial(models.stacked(FOUR))
        models.assert_equal(initial(models.unrolled(FOUR)), layouts.unstack(whole))
        for unit in (1, 2):
            first = pytrees.map_named(
                lambda name, p, unit=unit: p[:unit] if layouts.LeafName.of(name).in_stack else p,
                whole,
            )
            models.assert_equal(initial(models.stacked(FOUR, unit)), first)

    def test_layers_leaves_and_seeds_begin_with_different_numbers(self):
        attention = initial(models.stacked(FOUR))["layers"]["attention"]
        draws = [*attention["query"], attention["key"][0], attention["value"][0]]
        draws += [initial(models.stacked(FOUR), seed=1)["layers"]["attention"]["query"][0]]
        for i, first in enumerate(draws):
            for second in draws[i + 1 :]:
                assert abs(np.corrcoef(np.ravel(first), np.ravel(second))[0, 1]) < 0.3

    def test_describing_works_while_a_mesh_is_active(self):
        partitioning = Partitioning(expert=2, model=2)
        model, layout = Transformer(FOUR), models.stacked(FOUR)
        expected = model.parameters(layout)
        with partitioning.activate(partitioning.make_mesh()):
            described = model.parameters(layout)
        assert pytrees.differences(described, expected) == []

    def test_the_headline_has_ten_trillion_parameters(self):
        experts = MoEConfig(num_experts=10240, num_prototypes=80)
        config = ModelConfig(
            vocab_size=50000, num_layers=48, embed_dim=1024, num_heads=16, mlp_dim=9984, moe=experts
        )
        real, pseudo = (
            Transformer(config).parameters(models.stacked(config, unit)) for unit in (48, 1)
        )
        assert 10.0e12 < pytrees.size(real) < 10.1e12
        assert pytrees.size(pseudo["layers"]) * 48 == pytrees.size(real["layers"])


class TestDropout:
    """The key of a layer's dropout is folded from the number of its use."""

    CONFIG = models.tiny(num_layers=2, dropout=0.5, moe=models.experts(router_jitter=0.3))
    KEY = jax.random.key(5)

    def test_scanned_equals_unrolled(self):
        layout = models.stacked(self.CONFIG)
        params = models.draw(self.CONFIG, layout)
        scanned = models.logits_fn(self.CONFIG, layout)(params, BATCH, self.KEY)
        apart = models.logits_fn(self.CONFIG, models.unrolled(self.CONFIG))(
            layouts.unstack(params), BATCH, self.KEY
        )
        models.assert_close(apart, scanned)
        again = models.logits_fn(self.CONFIG, layout)(params, BATCH, self.KEY)
        models.assert_equal(again, scanned)
        for key in (None, jax.random.key(6)):
            assert (models.logits_fn(self.CONFIG, layout)(params, BATCH, key) != scanned).any()

    @pytest.mark.parametrize("form", Form)
    def test_differs_between_uses_of_one_layer(self, form):
        """B15: in both forms."""
        shared_layout = models.stacked(self.CONFIG, 1)
        shared = models.draw(self.CONFIG, shared_layout)
        rest, _ = layouts.split_stack(shared, shared_layout)
        (layer,) = (layouts.unstack(shared)["layers_0"],)
        if form is Form.STACKED:
            got = models.logits_fn(self.CONFIG, shared_layout)(shared, BATCH, self.KEY)
        else:
            real = models.stacked(self.CONFIG)
            copies = layouts.unstack(layouts.expand(shared, shared_layout, real))
            got = models.logits_fn(self.CONFIG, models.unrolled(self.CONFIG))(
                copies, BATCH, self.KEY
            )
        by_use = uses_one_by_one(self.CONFIG, [(layer, 0), (layer, 1)], rest, self.KEY)
        same = uses_one_by_one(self.CONFIG, [(layer, 0), (layer, 0)], rest, self.KEY)
        models.assert_close(got, by_use)
        assert np.abs(np.asarray(got - same)).max() > 0.1

    def test_layers_of_a_pattern_have_keys_of_their_own(self):
        """The use of a layer counts layers, not blocks: no two layers of a pass share a key."""
        config = models.tiny(num_layers=4, pattern=("DENSE", "DENSE"), moe=None)
        model, seen = Transformer(config), []

        def note_key(layer, args, kwargs, context):
            if not isinstance(context.module, Layer):
                return layer(*args, **kwargs)
            x, _, key, _ = args
            seen.append(jax.random.key_data(key).tolist())
            return x, None, None

        with nn.intercept_methods(note_key):
            for use in range(2):
                model.block({}, jnp.zeros(1), model.context(BATCH, self.KEY), jnp.int32(use))
        expected = [jax.random.fold_in(self.KEY, use) for use in range(4)]
        assert seen == [jax.random.key_data(key).tolist() for key in expected]


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16_is_close_to_float32(param_dtype):
    config = models.tiny(dtype="bfloat16", param_dtype=param_dtype, moe=DROPLESS)
    exact = models.tiny(moe=DROPLESS)
    layout = models.stacked(config)
    params = models.draw(config, layout)
    types = {name: leaf.dtype for name, leaf in pytrees.flatten_named(params)}
    assert types["layers/moe/up"] == types["embedder/table"] == jnp.dtype(param_dtype)
    (total, output), grads = models.loss_fn(config, layout)(params, BATCH)
    exact_params = jax.tree.map(lambda p: p.astype(np.float32), params)
    (expected, _), _ = models.loss_fn(exact, layout)(exact_params, BATCH)
    assert output.logits.dtype == total.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(output.router)} == {jnp.dtype("float32")}
    assert float(total) == pytest.approx(float(expected), rel=0.02)
    assert pytrees.differences(grads, params) == []
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads))


def test_join_pattern_puts_sparse_layers_in_order_of_use():
    # Two blocks of a pattern with two sparse layers: 0 1, then 2 3.
    first, second = {"loss": jnp.array([0, 2])}, {"loss": jnp.array([1, 3])}
    np.testing.assert_array_equal(join_pattern((first, second))["loss"], [0, 1, 2, 3])
    assert join_pattern(()) is None


def test_a_dense_model_reports_no_router():
    config = models.tiny(pattern=(LayerKind.DENSE,), moe=None)
    layout = models.stacked(config)
    output = jax.eval_shape(
        lambda: Transformer(config).apply(
            Transformer(config).init(jax.random.key(0), layout), BATCH, layout
        )
    )
    assert output.router is None
    assert output.logits.shape == (4, 8, 32)


def test_a_pattern_reports_its_sparse_layers_alone():
    """B4: the mean of the balance loss is over MoE layers only."""
    layout = models.stacked(EVERYTHING)
    params = models.draw(EVERYTHING, layout)
    output = jax.eval_shape(lambda: Transformer(EVERYTHING).apply(params, BATCH, layout))
    assert output.router.load_balance_loss.shape == (2,)
    assert output.router.chosen.shape == (2, 8)
