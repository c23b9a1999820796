"""The stack with a layer simple enough to follow by hand: x -> 2 x + w."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax import layouts
from m6jax.layouts import Form, Layout, Part
from m6jax.modeling.config import Remat
from m6jax.modeling.stack import apply_stack

DEPTH = 4
LAYOUTS = [
    Layout(depth=DEPTH, unit=1),
    Layout(depth=DEPTH, unit=2),
    Layout(depth=DEPTH, unit=4),
    Layout(depth=DEPTH, unit=4, form=Form.UNROLLED),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=["1", "2", "4", "unrolled"])


def params_of(layout):
    """Layer i of the unit has w = 10 ** i."""
    w = 10.0 ** jnp.arange(layout.unit)
    return [{"w": w[i]} for i in range(DEPTH)] if layout.form is Form.UNROLLED else {"w": w}


def run(layout, apply_layer, remat=Remat.NOTHING, extras=None):
    return models.jit(
        lambda p, x: apply_stack(apply_layer, p, x, layout, extras=extras, remat=remat)
    )(params_of(layout), jnp.float32(0))


@every_layout
def test_layers_are_applied_in_a_cycle(layout):
    x_out, reports = run(layout, lambda p, x, use, _: (2 * x + p["w"], {"w": p["w"]}))
    applied = [10.0 ** (i % layout.unit) for i in range(DEPTH)]
    x = 0.0
    for w in applied:
        x = 2 * x + w
    assert float(x_out) == x
    np.testing.assert_array_equal(reports["w"], applied)


@every_layout
def test_every_use_gets_its_number_and_extras(layout):
    """B5: reports come back in order of use."""
    _, reports = run(
        layout,
        lambda p, x, use, extra: (x, (use, extra["k"])),
        extras={"k": 100.0 + jnp.arange(DEPTH * 2.0).reshape(DEPTH, 2)},
    )
    uses, extras = reports
    np.testing.assert_array_equal(uses, range(DEPTH))
    assert uses.dtype == jnp.int32
    np.testing.assert_array_equal(extras, 100.0 + np.arange(DEPTH * 2.0).reshape(DEPTH, 2))


@every_layout
def test_without_reports(layout):
    x_out, reports = run(layout, lambda p, x, use, _: (x + 1, ()))
    assert float(x_out) == DEPTH
    assert reports == ()


@every_layout
def test_gradient_of_a_layer_is_the_sum_over_its_uses(layout):
    """B15: d x / d w_use = 2 ** (uses that follow)."""

    def loss(params):
        layer = lambda p, x, use, _: (2 * x + p["w"], None)  # noqa: E731
        return apply_stack(layer, params, jnp.float32(0), layout)[0]

    grads = models.jit(jax.grad(loss))(params_of(layout))
    by_use = 2.0 ** np.arange(DEPTH - 1, -1, -1)
    got = np.array(jax.tree.leaves(grads)).reshape(-1)
    np.testing.assert_array_equal(got, by_use.reshape(-1, layout.unit).sum(0))


@every_layout
@pytest.mark.parametrize("remat", [Remat.ALL_BUT_PRODUCTS, Remat.FULL])
def test_rematerialised_gradients_are_the_same(layout, remat):
    def loss(params, remat):
        def layer(p, x, use, _):
            return jnp.sin(x * p["w"] + use), None

        return apply_stack(layer, params, jnp.float32(0.5), layout, remat=remat)[0]

    grad = models.jit(jax.grad(loss), static_argnums=1)
    models.assert_close(grad(params_of(layout), remat), grad(params_of(layout), Remat.NOTHING))


class TestUnitsOfTheirOwn:
    """x -> 2 x + w + v + u, with w of 4, v of 2 layers and u of one."""

    LAYOUT = Layout(depth=8, unit=4, parts=(Part(pattern="v", unit=2), Part(pattern="u", unit=1)))
    USED = np.array([[1000 + 100 * (1 + i % 2) + 1 + i % 4 for i in range(8)]])

    def params(self):
        return {"w": jnp.arange(1.0, 5), "v": jnp.array([100.0, 200.0]), "u": jnp.array([1000.0])}

    def apply(self, params, remat=Remat.NOTHING, extras=None):
        def layer(p, x, use, extra):
            added = p["u"] + p["v"] + p["w"]
            return 2 * x + added, (use, added, extra)

        return apply_stack(layer, params, jnp.float32(0), self.LAYOUT, extras, remat)

    def test_each_leaf_goes_in_a_cycle_of_its_own(self):
        extras = 10 * jnp.arange(8)
        x_out, reports = models.jit(lambda p: self.apply(p, extras=extras))(self.params())
        uses, added, extras = reports
        np.testing.assert_array_equal(uses, range(8))
        np.testing.assert_array_equal(extras, 10 * np.arange(8))
        np.testing.assert_array_equal(added, self.USED[0])
        assert float(x_out) == (self.USED[0] * 2.0 ** np.arange(7, -1, -1)).sum()

    @pytest.mark.parametrize("remat", [Remat.NOTHING, Remat.FULL])
    def test_gradients_are_sums_over_uses(self, remat):
        grads = models.jit(jax.grad(lambda p: self.apply(p, remat)[0]))(self.params())
        by_use = 2.0 ** np.arange(7, -1, -1)
        for name, unit in (("u", 1), ("v", 2), ("w", 4)):
            np.testing.assert_array_equal(grads[name], by_use.reshape(-1, unit).sum(0))


@pytest.mark.parametrize("borders", [(2,), (1, 3)])
def test_a_stack_in_runs_is_one_stack(borders):
    """Outputs and reports bit for bit, gradients of every run."""
    whole = Layout(depth=DEPTH, unit=DEPTH)
    layout = Layout(depth=DEPTH, unit=DEPTH, borders=borders)
    extras = jnp.arange(DEPTH * 2.0).reshape(DEPTH, 2)

    def apply(params, layout):
        def layer(p, x, use, extra):
            return jnp.sin(x * p["w"] + use) + extra.sum(), (use, p["w"])

        output = apply_stack(layer, params, jnp.float32(0.5), layout, extras, Remat.FULL)
        return output[0], output

    grad = models.jit(jax.grad(apply, has_aux=True), static_argnums=1)
    params = {"layers": {"w": 1 + jnp.arange(4.0)}}
    expected, expected_output = grad(params["layers"], whole)
    got, output = grad(layouts.cut(params, layout)["layers"], layout)
    models.assert_equal(output, expected_output)
    models.assert_equal(layouts.mend({"layers": got}, layout)["layers"], expected)


@pytest.mark.parametrize(
    ("remat", "sines", "products"),
    [(Remat.NOTHING, 1, 1), (Remat.ALL_BUT_PRODUCTS, 2, 1), (Remat.FULL, 2, 2)],
)
def test_what_is_computed_again(remat, sines, products):
    """One unrolled layer: the sine (and the product before it) in the backward pass again."""
    layout = Layout(depth=1, unit=1, form=Form.UNROLLED)

    def loss(params, x):
        def layer(p, x, use, _):
            return jnp.exp(jnp.sin(x @ p["w"])), None

        return apply_stack(layer, params, x, layout, remat=remat)[0].sum()

    params = [{"w": jnp.ones((3, 3))}]
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((2, 3))))
    assert jaxpr.count(" sin ") == sines
    # One more product is the gradient of w.
    assert jaxpr.count("dot_general") == products + 1
