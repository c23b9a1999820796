"""Masks by hand, attention against a plain loop over queries."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.modeling.attention import Attention, Cache, attend, rotate, training_mask

# B rows, T queries, S keys, M width, N heads, J heads of keys and values, D head size.
B, T, S, M, N, J, D = 2, 3, 5, 8, 4, 2, 6


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attend_plainly(query, key, value, mask):
    """One query, one head at a time."""
    rows = []
    for b in range(query.shape[0]):
        for t in range(query.shape[1]):
            seen = np.flatnonzero(mask[b, 0, t])
            for n in range(query.shape[2]):
                j = n // (query.shape[2] // key.shape[2])
                scores = key[b, seen, j] @ query[b, t, n] / np.sqrt(query.shape[3])
                weights = np.exp(scores) / np.exp(scores).sum()
                rows.append(weights @ value[b, seen, j])
    return np.array(rows).reshape(*query.shape)


class TestTrainingMask:
    def test_a_token_sees_its_document_up_to_itself(self):
        """B13: documents of 3 and 2 tokens in length 6."""
        mask = training_mask(jnp.array([[1, 1, 1, 2, 2, 0]]), None)
        assert mask.shape == (1, 1, 6, 6)
        expected = [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 1, 1, 0],
            [0, 0, 0, 0, 0, 0],  # padding sees nobody and is seen by nobody
        ]
        np.testing.assert_array_equal(mask[0, 0], np.array(expected, bool))

    def test_a_prefix_sees_itself_in_full(self):
        """B14: prefix-LM. The prefix of a document is not seen by another."""
        mask = training_mask(jnp.array([[1, 1, 1, 2, 2, 2]]), jnp.array([[1, 1, 0, 1, 1, 0]]))
        expected = [
            [1, 1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1, 1],
        ]
        np.testing.assert_array_equal(mask[0, 0], np.array(expected, bool))

    def test_padding_is_no_prefix(self):
        mask = training_mask(jnp.array([[1, 0, 0]]), jnp.array([[1, 1, 1]]))
        np.testing.assert_array_equal(mask[0, 0], np.array([[1, 0, 0], [0] * 3, [0] * 3], bool))


class TestRotate:
    def test_by_hand(self):
        # D = 4: pairs (0, 2) turned by the position, (1, 3) by a hundredth of it.
        x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
        p = 5
        turned = rotate(x, jnp.array([[p]]))[0, 0, 0]
        expected = [
            np.cos(p) - 3 * np.sin(p),
            2 * np.cos(p / 100) - 4 * np.sin(p / 100),
            3 * np.cos(p) + np.sin(p),
            4 * np.cos(p / 100) + 2 * np.sin(p / 100),
        ]
        np.testing.assert_allclose(turned, expected, rtol=1e-5)

    def test_another_base(self):
        x = draw(1, 1, 1, 4)
        turned = rotate(x, jnp.array([[100]]), 1e4)[0, 0, 0]
        other = rotate(x, jnp.array([[100]]), 1e6)[0, 0, 0]  # pair 1: a thousandth of the position
        expected = x[0, 0, 0, 1] * np.cos(0.1) - x[0, 0, 0, 3] * np.sin(0.1)
        assert float(other[1]) == pytest.approx(float(expected), rel=1e-5)
        assert float(other[0]) == float(turned[0])

    def test_position_0_is_not_turned(self):
        x = draw(B, T, N, D)
        np.testing.assert_array_equal(rotate(x, jnp.zeros((B, T), jnp.int32)), x)

    def test_products_depend_on_the_distance_alone(self):
        query, key = draw(1, 1, 1, D), draw(1, 1, 1, D, seed=1)

        def product(p, q):
            return (rotate(query, jnp.array([[p]])) * rotate(key, jnp.array([[q]]))).sum()

        assert float(product(7, 4)) == pytest.approx(float(product(103, 100)), rel=1e-4)
        assert float(product(7, 4)) != pytest.approx(float(product(4, 7)), rel=1e-2)

    def test_angles_are_float32_in_bfloat16(self):
        # bfloat16 has no 1001: angles of that type would turn this by a whole radian too little.
        x = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
        turned = rotate(x, jnp.array([[1001]])).astype(jnp.float32)[0, 0, 0]
        assert rotate(x, jnp.array([[1001]])).dtype == jnp.bfloat16
        expected = [np.cos(1001) - np.sin(1001), np.cos(1001) + np.sin(1001)]
        np.testing.assert_allclose(turned, expected, rtol=1e-2)


class TestAttend:
    MASK = np.random.default_rng(9).random((B, 1, T, S)) < 0.6

    def test_equals_a_loop_over_queries_and_heads(self):
        query, key, value = draw(B, T, N, D), draw(B, S, J, D, seed=1), draw(B, S, J, D, seed=2)
        expected = attend_plainly(*map(np.asarray, (query, key, value)), self.MASK)
        models.assert_close(attend(query, key, value, self.MASK), expected.astype(np.float32))

    def test_a_query_that_sees_nothing_gets_exactly_zero_and_no_gradient(self):
        mask = self.MASK.copy()
        mask[0, 0, 1] = False
        args = draw(B, T, N, D), draw(B, S, J, D, seed=1), draw(B, S, J, D, seed=2)
        assert not np.asarray(attend(*args, mask)[0, 1]).any()
        grad = jax.grad(lambda query: attend(query, *args[1:], mask).sum())(args[0])
        assert np.isfinite(grad).all()
        assert not np.asarray(grad[0, 1]).any()

    def test_what_is_not_seen_takes_no_part(self):
        mask = np.ones((B, 1, T, S), bool)
        mask[:, :, :, 3:] = False
        query, key, value = draw(B, T, N, D), draw(B, S, J, D, seed=1), draw(B, S, J, D, seed=2)
        other = attend(query, key.at[:, 3:].set(1e6), value.at[:, 3:].set(-1e6), mask)
        np.testing.assert_array_equal(other, attend(query, key, value, mask))

    def test_softmax_is_float32_in_bfloat16(self):
        # 600 equal values of 1: weights summed in bfloat16 would stop growing at 256.
        ones = jnp.ones((1, 600, 1, 2), jnp.bfloat16)
        y = attend(ones[:, :1], ones, ones, np.ones((1, 1, 1, 600), bool))
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(y.astype(jnp.float32), 1.0, rtol=1e-2)


class TestAttention:
    def attention(self, **changes):
        settings = {
            "num_heads": N,
            "num_kv_heads": J,
            "head_dim": D,
            "rotary": True,
            "init_scale": 1.0,
            "dtype": jnp.float32,
            "param_dtype": jnp.float32,
        }
        return Attention(**(settings | changes))

    def arguments(self):
        segments = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
        positions = jnp.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
        return draw(B, 6, M), positions, training_mask(segments, None)

    def test_parameters(self):
        boxed = models.boxed(self.attention(), *self.arguments())
        shapes = {name: (p.value.shape, p.axes) for name, p in boxed.items()}
        assert shapes == {
            "query": ((M, N, D), ("embed", "heads", "kv")),
            "key": ((M, J, D), ("embed", "heads", "kv")),
            "value": ((M, J, D), ("embed", "heads", "kv")),
            "output": ((N, D, M), ("heads", "kv", "embed")),
        }

    def test_initial_scale_is_one_over_the_root_of_the_fan_in(self):
        attention = self.attention(num_heads=32, num_kv_heads=32, head_dim=8)
        params = models.unboxed(attention, *self.arguments())
        assert float(params["query"].std()) == pytest.approx(M**-0.5, rel=0.1)
        assert float(params["output"].std()) == pytest.approx((32 * 8) ** -0.5, rel=0.1)

    @pytest.mark.parametrize("rotary", [True, False])
    def test_equals_its_parts(self, rotary):
        attention, (x, positions, mask) = self.attention(rotary=rotary), self.arguments()
        p = models.unboxed(attention, x, positions, mask)
        query, key, value = (
            jnp.einsum("btm,mnd->btnd", x, p[name]) for name in ("query", "key", "value")
        )
        if rotary:
            query, key = rotate(query, positions), rotate(key, positions)
        mask_of_real = np.asarray(mask).copy()
        mask_of_real[0, 0, 5, 5] = True  # the plain loop cannot see nothing
        y = attend_plainly(*map(np.asarray, (query, key, value)), mask_of_real)
        y[0, 5] = 0
        expected = np.einsum("btnd,ndm->btm", y, p["output"])
        output = models.jit(attention.apply)({"params": p}, x, positions, mask)
        models.assert_close(output.x, expected.astype(np.float32))
        assert output.cache is None

    def test_step_by_step_with_a_cache_equals_whole_rows(self):
        """B19, the attention's part."""
        attention = self.attention()
        x, positions = draw(B, 6, M), jnp.tile(jnp.arange(6), (B, 1))
        causal = training_mask(jnp.ones((B, 6), int), None)
        params = {"params": models.unboxed(attention, x, positions, causal)}
        apply = models.jit(attention.apply)
        whole = apply(params, x, positions, causal).x
        cache = Cache(jnp.zeros((B, 6, J, D)), jnp.zeros((B, 6, J, D)))
        for t in range(6):
            step = slice(t, t + 1)
            output = apply(params, x[:, step], positions[:, step], causal[:, :, step], cache)
            models.assert_close(output.x, whole[:, step], 1e-5)
            cache = output.cache

    def test_slots_out_of_range_are_not_written(self):
        attention = self.attention()
        x, mask = draw(B, 1, M), jnp.ones((B, 1, 1, 3), bool)
        positions = jnp.array([[2], [3]])  # row 1 has no slot 3
        cache = Cache(jnp.full((B, 3, J, D), 7.0), jnp.full((B, 3, J, D), 8.0))
        params = models.unboxed(attention, x, positions, mask, cache)
        new = models.jit(attention.apply)({"params": params}, x, positions, mask, cache).cache
        np.testing.assert_array_equal(new.keys[1], cache.keys[1])
        np.testing.assert_array_equal(new.values[1], cache.values[1])
        np.testing.assert_array_equal(new.values[0, :2], cache.values[0, :2])
        assert not (new.values[0, 2] == 8.0).any()
