"""The grouped product against a loop over all groups on all rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from m6jax.modeling.grouped import grouped_matmul

# N rows, E groups, M and H the two sides of a group's matrix.
N, E, M, H = 333, 5, 8, 6

LOADS = {
    "even": [66, 67, 66, 67, 67],
    "empty groups": [0, 120, 0, 213, 0],
    "one group": [0, 0, 0, 333, 0],
    "single rows": [1, 1, 1, 1, 1],
    "a tail": [40, 3, 0, 17, 100],
    "a tail that starts in the last block": [0, 0, 300, 0, 20],
    "no row": [0, 0, 0, 0, 0],
}
DOES_NOT_FIT = {
    "x of rank 3": ((1, 4, 8), (2, 8, 3), (2,), "float32", "int32"),
    "w of rank 2": ((4, 8), (8, 3), (2,), "float32", "int32"),
    "other M": ((4, 8), (2, 7, 3), (2,), "float32", "int32"),
    "other E": ((4, 8), (2, 8, 3), (3,), "float32", "int32"),
    "other type": ((4, 8), (2, 8, 3), (2,), "bfloat16", "int32"),
    "float sizes": ((4, 8), (2, 8, 3), (2,), "float32", "float32"),
}


def reference(x, w, group_sizes):
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(x.shape[0])[:, None]
    return sum(
        jnp.where((rows >= ends[e] - group_sizes[e]) & (rows < ends[e]), x, 0) @ w[e]
        for e in range(w.shape[0])
    )


def with_gradients(product):
    """Returns jitted (x, w, group_sizes, dy) -> (y, dx, dw)."""

    @jax.jit
    def run(x, w, group_sizes, dy):
        y, pullback = jax.vjp(lambda x, w: product(x, w, group_sizes), x, w)
        return y, *pullback(dy)

    return run


def operands(num_rows=N, dtype=jnp.float32):
    kx, kw, ky = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(kx, (num_rows, M), dtype)
    w = jax.random.normal(kw, (E, M, H), dtype)
    return x, w, jax.random.normal(ky, (num_rows, H), dtype)


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * np.max(np.abs(e), initial=1.0))


ours = with_gradients(grouped_matmul)
theirs = with_gradients(reference)


def test_small_case_by_hand():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    w = jnp.array([[[1.0], [1.0]], [[100.0], [100.0]], [[2.0], [-1.0]]])
    sizes = jnp.array([2, 0, 1])
    y, dx, dw = ours(x, w, sizes, jnp.ones((4, 1)))
    np.testing.assert_array_equal(y, [[3.0], [7.0], [4.0], [0.0]])
    np.testing.assert_array_equal(dx, [[1.0, 1.0], [1.0, 1.0], [2.0, -1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(dw, [[[4.0], [6.0]], [[0.0], [0.0]], [[5.0], [6.0]]])


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_float32_equals_the_plain_loop(load):
    x, w, dy = operands()
    sizes = jnp.array(load, jnp.int32)
    assert_close(ours(x, w, sizes, dy), theirs(x, w, sizes, dy), 1e-5)


@pytest.mark.parametrize("load", ["empty groups", "a tail"])
def test_bfloat16_sums_in_float32(load):
    x, w, dy = operands(dtype=jnp.bfloat16)
    sizes = jnp.array(LOADS[load], jnp.int32)
    results = ours(x, w, sizes, dy)
    assert {r.dtype for r in results} == {jnp.dtype(jnp.bfloat16)}
    expected = theirs(*(a.astype(jnp.float32) for a in (x, w)), sizes, dy.astype(jnp.float32))
    # Rounded once, at the end, to eight bits; sums of hundreds of rows in bfloat16 are far worse.
    assert_close(results, expected, 2**-8)


@pytest.mark.parametrize(
    ("num_rows", "load"),
    [(0, [0, 0, 0, 0, 0]), (1, [0, 0, 1, 0, 0]), (7, [3, 0, 1, 2, 0]), (65, [0, 60, 0, 3, 2])],
)
def test_any_number_of_rows(num_rows, load):
    x, w, dy = operands(num_rows)
    sizes = jnp.array(load, jnp.int32)
    assert_close(ours(x, w, sizes, dy), theirs(x, w, sizes, dy), 1e-5)


@pytest.mark.parametrize("load", ["a tail", "a tail that starts in the last block", "no row"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_of_no_group_take_no_part_whatever_they_hold(load, poison):
    x, w, dy = operands()
    sizes = jnp.array(LOADS[load], jnp.int32)
    used = sum(LOADS[load])
    clean = ours(x, w, sizes, dy)
    y, dx, dw = ours(x.at[used:].set(poison), w, sizes, dy.at[used:].set(poison))
    assert not np.asarray(y[used:]).any()
    assert not np.asarray(dx[used:]).any()
    for got, expected in zip((y, dx, dw), clean, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_infinities_stay_in_their_group():
    x, w, dy = operands()
    sizes = jnp.array(LOADS["even"], jnp.int32)
    y, dx, dw = ours(x.at[70].set(jnp.inf), w, sizes, dy.at[70].set(jnp.inf))
    others = np.array([0, 2, 3, 4])
    clean = ours(x, w, sizes, dy)
    np.testing.assert_array_equal(np.delete(y, 70, 0), np.delete(clean[0], 70, 0))
    np.testing.assert_array_equal(np.delete(dx, 70, 0), np.delete(clean[1], 70, 0))
    np.testing.assert_array_equal(dw[others], clean[2][others])
    assert not np.isfinite(dw[1]).any()


@pytest.mark.parametrize("load", ["empty groups", "a tail"])
def test_the_accelerators_form_gives_the_same(monkeypatch, load):
    x, w, dy = operands()
    sizes = jnp.array(LOADS[load], jnp.int32)
    used = sum(LOADS[load])
    x, dy = x.at[used:].set(jnp.nan), dy.at[used:].set(jnp.nan)

    def accelerators(*operands, cpu, default):
        return default(*operands)

    monkeypatch.setattr(lax, "platform_dependent", accelerators)
    product = with_gradients(grouped_matmul)
    assert "ragged_dot" in str(product.trace(x, w, sizes, dy).jaxpr)
    assert_close(product(x, w, sizes, dy), ours(x, w, sizes, dy), 1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_the_form_is_chosen_for_the_platform_that_is_lowered_for(platform):
    x, w, dy = operands()
    traced = ours.trace(x, w, jnp.array(LOADS["even"]), dy)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = ("stablehlo.while" in text, text.count('"chlo.ragged_dot"('))
    assert found == ((True, 0) if platform == "cpu" else (False, 3))


def test_no_block_copies_all_matrices():
    """A copy of w or dw in a loop would cost as much as the products."""
    x, w, dy = operands()
    text = ours.lower(x, w, jnp.array(LOADS["even"]), dy).compile().as_text()
    body = text[: text.index("\nENTRY ")]
    assert f"f32[{E},{M},{H}]" in body
    assert not re.findall(rf"= f32\[{E},{M},{H}\]\S* copy\(", body)


def test_under_scan_and_checkpoint():
    x, w, dy = operands()
    loads = jnp.array([LOADS["even"], LOADS["a tail"]], jnp.int32)
    square = jnp.concatenate([w, w[:, :, :2]], axis=2)  # [E, M, M]

    def chained(product):
        def loss(x, w):
            step = jax.checkpoint(lambda x, sizes: (jnp.tanh(product(x, w, sizes)), None))
            return jnp.sum(jax.lax.scan(step, x, loads)[0][:, :H] * dy)

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, square)

    (loss, gradients), (expected, expected_gradients) = chained(grouped_matmul), chained(reference)
    assert_close([loss, *gradients], [expected, *expected_gradients], 1e-5)


def test_under_shard_map_every_device_has_its_own_load():
    x, w, dy = operands()
    loads = jnp.array([LOADS["even"], LOADS["one group"]], jnp.int32)
    x, dy = (jnp.concatenate([a, -2 * a]) for a in (x, dy))
    w = jnp.concatenate([w, w + 1])
    mesh = Mesh(np.array(jax.devices()[:2]), ("expert",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("expert")
    sharded = jax.shard_map(
        lambda x, w, sizes: grouped_matmul(x, w, sizes[0]),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    apart = [theirs(x[d * N :][:N], w[d * E :][:E], loads[d], dy[d * N :][:N]) for d in range(2)]
    together = [np.concatenate(parts) for parts in zip(*apart, strict=True)]
    assert_close(with_gradients(sharded)(x, w, loads, dy), together, 1e-5)


def test_under_vmap_with_one_shared_operand():
    x, w, dy = operands()
    loads = jnp.array([LOADS["even"], LOADS["a tail"]], jnp.int32)
    batched = with_gradients(jax.vmap(grouped_matmul, in_axes=(0, None, 0)))
    y, dx, dw = batched(jnp.stack([x, -x]), w, loads, jnp.stack([dy, dy]))
    first, second = theirs(x, w, loads[0], dy), theirs(-x, w, loads[1], dy)
    assert_close((y[0], y[1]), (first[0], second[0]), 1e-5)
    assert_close((dx[0], dx[1]), (first[1], second[1]), 1e-5)
    assert_close((dw,), (first[2] + second[2],), 1e-5)


@pytest.mark.parametrize("case", DOES_NOT_FIT.values(), ids=DOES_NOT_FIT.keys())
def test_operands_that_do_not_fit_are_refused(case):
    x, w, sizes, dtype, int_dtype = case
    with pytest.raises(ValueError, match=r"grouped_matmul: got x float32\[.*needs x \[N, M\]"):
        grouped_matmul(jnp.ones(x), jnp.ones(w, dtype), jnp.ones(sizes, int_dtype))
