"""Dropless on a mesh: the buffers are large enough for the worst case, and are no larger."""

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.modeling.config import MoEConfig
from m6jax.modeling.moe import MoE

# B rows, T length, M width, H expert's width, E experts.
B, T, M, H, E = 8, 4, 8, 6, 16
WHERE = Partitioning(data=1, expert=8, model=1)

CASES = {
    "top 1": (MoEConfig(num_experts=E, capacity_factor=None), 1),
    "top 2": (MoEConfig(num_experts=E, num_selected_experts=2, capacity_factor=None), 2),
    "top 3": (MoEConfig(num_experts=E, num_selected_experts=3, capacity_factor=None), 2),
    "prototypes": (MoEConfig(num_experts=E, num_prototypes=16, capacity_factor=None), 2),
}


def arguments(experts, crowded):
    """Weights and tokens; crowded: of every prototype all tokens take the first K experts."""
    rng = np.random.default_rng(0)
    params = {
        "router": {"kernel": rng.normal(size=(M, E)).astype(np.float32)},
        "up": rng.normal(size=(E, M, H)).astype(np.float32),
        "down": rng.normal(size=(E, H, M)).astype(np.float32),
    }
    x = rng.uniform(1, 2, (B, T, M)).astype(np.float32)
    if crowded:  # scores fall with the number of the expert
        params["router"]["kernel"] = np.tile(-np.linspace(0, 1, E, dtype=np.float32), (M, 1))
    return params, x


def run(experts, params, x, where=None):
    """Returns the output, gradients of its squares' sum, and choices served."""
    layer = MoE(experts, H, False, 1.0, jnp.float32, jnp.float32)
    mask = np.ones((B, T), bool)

    def loss(params, x):
        output = layer.apply({"params": params}, x, mask, None)
        return (output.x**2).sum(), (output.x, output.router.served)

    fn = models.jit(jax.grad(loss, (0, 1), has_aux=True))
    if where is None:
        return fn(params, x)
    with where.activate(where.make_mesh()):
        return fn(params, x)


@pytest.mark.parametrize("crowded", [True, False], ids=["one expert", "even"])
@pytest.mark.parametrize("name", ["top 1", "top 2"])
def test_nothing_is_dropped_when_all_tokens_go_to_one_expert(name, crowded):
    """Eight devices with two experts each; all rows of all devices may go to one of them."""
    experts, _ = CASES[name]
    params, x = arguments(experts, crowded)
    grads, (y, served) = run(experts, params, x, WHERE)
    expected = run(experts, params, x)
    models.assert_close((grads, (y, served)), expected, 2e-6)
    K = experts.num_selected_experts
    assert served.sum() == B * T * K
    if crowded:
        np.testing.assert_array_equal(served, [B * T] * K + [0] * (E - K))
    assert (np.abs(np.asarray(y)).max(-1) > 0).all()


@pytest.mark.parametrize(("experts", "choices"), CASES.values(), ids=CASES)
def test_a_device_sends_to_another_what_it_could_have_for_it_at_worst(experts, choices):
    """Its T tokens, times the choices that can fall on the two experts there."""
    params, x = arguments(experts, crowded=False)
    layer = MoE(experts, H, False, 1.0, jnp.float32, jnp.float32)
    with WHERE.activate(WHERE.make_mesh()):
        apply = jax.jit(lambda params, x: layer.apply({"params": params}, x, x[..., 0] > 0, None).x)
        text = apply.lower(params, x).as_text()
    sent = re.findall(r"stablehlo.all_to_all.*?\(tensor<(\w+)xf32>\)", text, re.DOTALL)
    assert sent[0] == f"8x{T * choices}x{M}"
