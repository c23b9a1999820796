"""Norms, embedding and feed-forward against formulas in numpy."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import linen as nn

from m6jax.modeling import layers
from m6jax.modeling.config import Activation, Norm

# B rows, T length, M width, H FFN width, V vocabulary, E experts.
B, T, M, H, V, E = 2, 3, 8, 12, 10, 4
COMMON = {"init_scale": 1.0, "dtype": jnp.float32, "param_dtype": jnp.float32}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


class ExpertWeights(layers.FeedForward):
    num_experts: int | None = None

    @nn.compact
    def __call__(self, x):
        return layers.ffn_weights(self, x.shape[-1], self.num_experts)


class TestNorm:
    def test_rms(self):
        x = jnp.array([[3.0, 4.0, 0.0, 0.0]])  # root mean square 2.5
        norm = layers.make_norm(Norm.RMS, jnp.float32, "norm")
        y = norm.apply({"params": {"scale": jnp.array([1.0, 2.0, 1.0, 1.0])}}, x)
        np.testing.assert_allclose(y, [[1.2, 3.2, 0.0, 0.0]], rtol=1e-6)

    def test_layer(self):
        x = jnp.array([[1.0, 3.0]])  # mean 2, variance 1
        norm = layers.make_norm(Norm.LAYER, jnp.float32, "norm")
        params = {"scale": jnp.array([2.0, 2.0]), "bias": jnp.array([0.5, 0.0])}
        np.testing.assert_allclose(norm.apply({"params": params}, x), [[-1.5, 2.0]], atol=1e-5)

    @pytest.mark.parametrize("kind", Norm)
    def test_statistics_are_float32_in_bfloat16(self, kind):
        # The mean square of 1000 and small numbers needs more than eight bits.
        x = jnp.concatenate([jnp.array([1000.0]), draw(255)]).astype(jnp.bfloat16)[None]
        params = models.unboxed(layers.make_norm(kind, jnp.float32, "norm"), x)
        y = layers.make_norm(kind, jnp.bfloat16, "norm").apply({"params": params}, x)
        exact = layers.make_norm(kind, jnp.float32, "norm").apply(
            {"params": params}, x.astype(jnp.float32)
        )
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-7, atol=1e-2)


class TestDropout:
    def test_is_the_identity_without_a_key_or_rate(self):
        x = draw(B, T)
        assert layers.dropout(x, 0.5, None) is x
        assert layers.dropout(x, 0.0, jax.random.key(0)) is x

    def test_drops_or_scales(self):
        y = np.asarray(layers.dropout(jnp.ones((100, 100)), 0.25, jax.random.key(0)))
        assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
        assert abs((y == 0).mean() - 0.25) < 0.02

    def test_keeps_the_type(self):
        x = jnp.ones(4, jnp.bfloat16)
        assert layers.dropout(x, 0.5, jax.random.key(0)).dtype == jnp.bfloat16


class TestEmbedder:
    TOKENS = jnp.array([[1, 9, 0]])

    def embedder(self, **changes):
        settings = {"vocab_size": V, "embed_dim": M, "max_length": None} | COMMON | changes
        return layers.Embedder(**settings)

    def test_gives_rows_times_the_root_of_the_width(self):
        table = draw(V, M)
        x = self.embedder().apply({"params": {"table": table}}, self.TOKENS, self.TOKENS)
        np.testing.assert_allclose(x, table[self.TOKENS] * np.sqrt(M), rtol=1e-6)

    def test_adds_learned_positions(self):
        params = {"table": draw(V, M), "positions": draw(T, M, seed=1)}
        positions = jnp.array([[2, 0, 1]])
        x = self.embedder(max_length=T).apply({"params": params}, self.TOKENS, positions)
        expected = params["table"][self.TOKENS] * np.sqrt(M) + params["positions"][positions]
        np.testing.assert_allclose(x, expected, rtol=1e-5)

    def test_initial_rows_have_unit_variance(self):
        embedder = self.embedder(vocab_size=1000, init_scale=0.5)
        table = models.unboxed(embedder, self.TOKENS, self.TOKENS)["table"]
        assert float(table.std()) == pytest.approx(0.5 * M**-0.5, rel=0.05)


class TestFeedForward:
    def test_two_matrices(self):
        x, up, down = draw(B, T, M), draw(M, H, seed=1), draw(H, M, seed=2)
        module = layers.FeedForward(H, False, **COMMON)
        y = module.apply({"params": {"up": up, "down": down}}, x)
        models.assert_close(y, jax.nn.gelu(x @ up) @ down)

    def test_three_matrices_with_a_gate(self):
        x, up, gate, down = (
            draw(B, T, M),
            draw(M, H, seed=1),
            draw(M, H, seed=2),
            draw(H, M, seed=3),
        )
        module = layers.FeedForward(H, True, **COMMON)

        def ours(x, params):
            return module.apply({"params": params}, x)

        def formula(x, params):
            gate = jax.nn.gelu(x @ params["gate"])
            return (gate * (x @ params["up"])) @ params["down"]

        params = {"up": up, "gate": gate, "down": down}
        models.assert_close(ours(x, params), formula(x, params))
        for fn in (ours, formula):
            assert fn(x, params).shape == (B, T, M)
        got = jax.grad(lambda *a: (ours(*a) ** 2).sum(), (0, 1))(x, params)
        models.assert_close(got, jax.grad(lambda *a: (formula(*a) ** 2).sum(), (0, 1))(x, params))

    @pytest.mark.parametrize(
        ("gated", "names"), [(False, {"up", "down"}), (True, {"up", "gate", "down"})]
    )
    def test_parameters(self, gated, names):
        module = layers.FeedForward(H, gated, **COMMON)
        boxed = models.boxed(module, draw(B, T, M))
        assert set(boxed) == names
        assert boxed["up"].axes == ("embed", "mlp")
        assert boxed["down"].axes == ("mlp", "embed")

    def test_arithmetic_is_of_dtype_and_weights_of_param_dtype(self):
        module = layers.FeedForward(H, False, 1.0, jnp.bfloat16, jnp.float32)
        x = draw(B, T, M).astype(jnp.bfloat16)
        params = models.unboxed(module, x)
        assert params["up"].dtype == jnp.float32
        assert module.apply({"params": params}, x).dtype == jnp.bfloat16


@pytest.mark.parametrize("num_experts", [None, 2, 16])
def test_initial_scale_does_not_depend_on_the_number_of_experts(num_experts):
    module = ExpertWeights(200, False, 2.0, jnp.float32, jnp.float32, num_experts)
    params = models.unboxed(module, jnp.ones((1, 1, 50)))
    assert float(params["up"].std()) == pytest.approx(2.0 * 50**-0.5, rel=0.05)
    assert float(params["down"].std()) == pytest.approx(2.0 * 200**-0.5, rel=0.05)


def test_expert_weights_have_an_axis_of_experts():
    boxed = models.boxed(ExpertWeights(H, True, **COMMON, num_experts=E), draw(B, T, M))
    assert boxed["gate"].axes == ("expert", "embed", "mlp")
    assert boxed["down"].axes == ("expert", "mlp", "embed")
    assert boxed["down"].value.shape == (E, H, M)


def test_output_head():
    kernel, x = draw(M, V), draw(B, T, M, seed=1)
    head = layers.OutputHead(vocab_size=V, **COMMON)
    models.assert_close(head.apply({"params": {"kernel": kernel}}, x), x @ kernel)
    assert models.boxed(head, x)["kernel"].axes == ("embed", "vocab")


def test_settings_of_other_families():
    """SiLU gates (SwiGLU), an epsilon that matters, rows of the table as they are."""
    x, matrices = draw(B, T, M), {n: draw(M, H, seed=i) for i, n in enumerate(("up", "gate"))}
    params = matrices | {"down": draw(H, M, seed=2)}
    module = layers.FeedForward(H, True, **COMMON, activation=Activation.SILU)
    gate = x @ params["gate"]
    hidden = gate / (1 + jnp.exp(-gate)) * (x @ params["up"])
    models.assert_close(module.apply({"params": params}, x), hidden @ params["down"])
    norm = layers.make_norm(Norm.RMS, jnp.float32, "norm", epsilon=0.75)
    y = norm.apply({"params": {"scale": jnp.ones(1)}}, jnp.array([[0.5]]))  # 0.5 / sqrt(1)
    np.testing.assert_allclose(y, [[0.5]], rtol=1e-6)
    embedder = layers.Embedder(V, M, None, **COMMON, scaled=False)
    table, tokens = draw(V, M), jnp.array([[1, 9]])
    x = embedder.apply({"params": {"table": table}}, tokens, tokens)
    np.testing.assert_array_equal(x, table[tokens])
