"""The sparse layer against a plain loop over experts, and against GShard's one-hot products."""

import functools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.config import CapacityMode, MoEConfig
from m6jax.modeling.moe import MoE, group_size_of, most_choices
from m6jax.training.losses import summarize_router

# B rows, T length, M width, H expert's width, E experts, P prototypes, K choices in a prototype,
# F = E / P, Q = P * K, S tokens of a group, G groups, C capacity.
B, T, M, H = 2, 8, 8, 6

CASES = {
    "switch": MoEConfig(num_experts=4, capacity_factor=1.0),
    "top 2": MoEConfig(num_experts=4, num_selected_experts=2, normalize_weights=True),
    "prototypes": MoEConfig(num_experts=8, num_prototypes=4, capacity_factor=1.0),
    "half rows": models.experts(group_size=4),
    "two rows": models.experts(group_size=16, capacity_factor=0.5),
}
ONE_X = {
    "1x": models.experts(capacity_mode="ONE_X", capacity_factor=1.5),
    "1x of 4": MoEConfig(num_experts=8, num_prototypes=4, capacity_mode="ONE_X", group_size=4),
}
DROPLESS = {
    "dropless": models.experts(capacity_factor=None),
}


def layer(experts, gated=False):
    return MoE(experts, H, gated, 1.0, jnp.float32, jnp.float32)


def arguments(experts, gated=False, seed=0):
    """Parameters, x and a mask in which row 1 ends with padding."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    E = experts.num_experts
    params = {"router": {"kernel": draw(M, E)}, "up": draw(E, M, H), "down": draw(E, H, M)}
    if gated:
        params["gate"] = draw(E, M, H)
    mask = np.ones((B, T), bool)
    mask[1, 5:] = False
    return params, draw(B, T, M), mask


def route_plainly(kernel, x, experts):
    """Returns the number inside the prototype and the weight of each choice, [B, T, P, K]."""
    logits = (x @ kernel).reshape(*x.shape[:2], experts.num_prototypes, -1)
    probabilities = jax.nn.softmax(logits, axis=-1)
    index = jnp.argsort(-jax.lax.stop_gradient(probabilities), axis=-1)
    index = index[..., : experts.num_selected_experts]
    weights = jnp.take_along_axis(probabilities, index, axis=-1)
    if experts.normalize_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    return index, weights


def serve_plainly(index, mask, experts):
    """Which choices find room, [B, T, P, K]: token after token, choice after choice."""
    index = np.asarray(index)
    P, K, E = experts.num_prototypes, experts.num_selected_experts, experts.num_experts
    S = experts.group_size or T
    one_x = experts.capacity_mode is CapacityMode.ONE_X
    wanted = S * (1 if one_x else P * K) * (experts.capacity_factor or math.inf)
    capacity = wanted / E if math.isinf(wanted) else math.ceil(wanted / E)
    served = np.zeros((B * T, P, K), np.float32)
    for group in range(B * T // S):
        load = np.zeros((P, E // P), int)
        for place in range(S):
            token = group * S + place
            for p, k in np.ndindex(P, K):
                if not mask.reshape(-1)[token] or (one_x and place < p * S // P):
                    continue
                expert = index.reshape(B * T, P, K)[token, p, k]
                served[token, p, k] = load[p, expert] < capacity
                load[p, expert] += 1
    return served.reshape(B, T, P, K)


def hidden_plainly(x, params, e):
    if "gate" in params:
        return jax.nn.gelu(x @ params["gate"][e]) * (x @ params["up"][e])
    return jax.nn.gelu(x @ params["up"][e])


def loop_over_experts(params, x, experts, served):
    index, weights = route_plainly(params["router"]["kernel"], x, experts)
    y = 0
    for e in range(experts.num_experts):
        p, f = divmod(e, experts.experts_per_prototype)
        scale = jnp.where(index[..., p, :] == f, weights[..., p, :] * served[..., p, :], 0).sum(-1)
        y += scale[..., None] * (hidden_plainly(x, params, e) @ params["down"][e])
    return y


def one_hot_products(params, x, mask, experts):
    """GShard's dispatch and combine tensors [G, S, E, C], tokens in order."""
    P, K, E = experts.num_prototypes, experts.num_selected_experts, experts.num_experts
    index, weights = route_plainly(params["router"]["kernel"], x, experts)
    S, Q = experts.group_size or T, P * K
    C = min(S, math.ceil(S * Q * (experts.capacity_factor or 0) / E))
    expert = index + (E // P) * np.arange(P)[:, None]
    choice = (
        jax.nn.one_hot(expert.reshape(-1, S * Q), E) * mask.reshape(-1, S).repeat(Q, 1)[..., None]
    )
    place = jnp.cumsum(choice, axis=1) - 1  # [G, S * Q, E]
    slot = choice[..., None] * jax.nn.one_hot(place.astype(int), C)  # [G, S * Q, E, C]
    combine = (slot * weights.reshape(-1, S * Q)[..., None, None]).reshape(-1, S, Q, E, C).sum(2)
    dispatch = slot.reshape(-1, S, Q, E, C).sum(2)
    rows = jnp.einsum("gsec,gsm->egcm", dispatch, x.reshape(-1, S, M))
    hidden = jax.nn.gelu(jnp.einsum("egcm,emh->egch", rows, params["up"]))
    rows = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
    return jnp.einsum("gsec,egcm->gsm", combine, rows).reshape(x.shape)


jit_route = models.jit(route_plainly, static_argnums=2)
jit_loop = models.jit(loop_over_experts, static_argnums=2)
COTANGENT = np.random.default_rng(7).normal(size=(B, T, M)).astype(np.float32)


def with_gradients(fn):
    """Jits (params, x, mask) -> (y, gradients of both, what else `fn` returns)."""

    @models.jit
    def run(params, x, mask):
        y, pullback, rest = jax.vjp(lambda *a: fn(*a, mask), params, x, has_aux=True)
        return y, pullback(COTANGENT), rest

    return run


@functools.cache
def ours(module):
    def run(params, x, mask):
        output = module.apply({"params": params}, x, mask, None)
        return output.x, output.router

    return with_gradients(run)


@models.jit(static_argnums=0)
def apply(module, params, x, mask, key=None):
    return module.apply({"params": params}, x, mask, key)


def cases(experts, *names):
    chosen = {name: experts[name] for name in names or experts}
    return [pytest.param(e, id=name) for name, e in chosen.items()]


def check_against_the_loop(experts, gated):
    params, x, mask = arguments(experts, gated)
    index, _ = jit_route(params["router"]["kernel"], x, experts)
    served = serve_plainly(index, mask, experts)
    y, gradients, router = ours(layer(experts, gated))(params, x, mask)
    loop = with_gradients(lambda p, x, _: (loop_over_experts(p, x, experts, served), None))
    models.assert_close((y, gradients), loop(params, x, mask)[:2], 2e-6)
    some_dropped = served.sum() < mask.sum() * served.shape[2] * served.shape[3]
    assert some_dropped == (experts.capacity_factor is not None)
    assert not np.asarray(y)[served.sum((2, 3)) == 0].any()  # exactly 0

    E, F = experts.num_experts, experts.experts_per_prototype
    expert = np.asarray(index) + F * np.arange(experts.num_prototypes)[:, None]
    for counted, choices in ((router.chosen, mask[..., None, None]), (router.served, served > 0)):
        taken = expert[np.broadcast_to(choices, expert.shape)]
        np.testing.assert_array_equal(counted, np.bincount(taken, minlength=E))


@pytest.mark.parametrize("experts", cases(CASES | ONE_X | DROPLESS))
def test_equals_a_loop_over_experts(experts):
    check_against_the_loop(experts, gated=False)


@pytest.mark.parametrize("experts", cases(CASES, "half rows"))
def test_with_a_gate_equals_a_loop_over_experts(experts):
    check_against_the_loop(experts, gated=True)


@pytest.mark.parametrize("experts", cases(CASES))
def test_equals_one_hot_products(experts):
    params, x, mask = arguments(experts)
    expected = with_gradients(lambda p, x, mask: (one_hot_products(p, x, mask, experts), None))
    y, gradients, _ = ours(layer(experts))(params, x, mask)
    models.assert_close((y, gradients), expected(params, x, mask)[:2], 2e-6)


class TestCapacity:
    def crowd(self, tokens, factor):
        """Tokens that all prefer expert 0 of 4: its score is the sum of positive numbers."""
        experts = MoEConfig(num_experts=4, capacity_factor=factor)
        x = np.random.default_rng(0).uniform(1, 2, (1, tokens, M)).astype(np.float32)
        params, _, _ = arguments(experts)
        params["router"]["kernel"] = np.tile(np.float32([1, 0, 0, 0]), (M, 1))
        return layer(experts), params, x, np.ones((1, tokens), bool)

    def test_five_tokens_prefer_expert_0(self):
        """B7: ceil(5 * 3.2 / 4) = 4 served in order, the fifth is exactly 0."""
        module, params, x, mask = self.crowd(5, 3.2)
        output = apply(module, params, x, mask)
        np.testing.assert_array_equal(output.router.chosen, [5, 0, 0, 0])
        np.testing.assert_array_equal(output.router.served, [4, 0, 0, 0])
        assert float(output.router.fraction_dropped) == pytest.approx(0.2, rel=1e-6)
        served = np.ones((1, 5, 1, 1), np.float32)
        served[0, 4] = 0
        expected = jit_loop(params, x, module.experts, served)
        models.assert_close(output.x, expected)
        assert np.asarray(output.x[0, :4]).all()
        np.testing.assert_array_equal(output.x[0, 4], np.zeros(M))

    @pytest.mark.parametrize(("factor", "served"), [(1.6, 2), (None, 3)])
    def test_padding_is_no_load(self, factor, served):
        """3 tokens and 2 of padding, ceil(5 * 1.6 / 4) = 2 places: 1 of 3 is dropped, not of 5."""
        module, params, x, mask = self.crowd(5, factor)
        mask[0, 1] = mask[0, 3] = False
        router = apply(module, params, x, mask).router
        np.testing.assert_array_equal(router.chosen, [3, 0, 0, 0])
        np.testing.assert_array_equal(router.served, [served, 0, 0, 0])
        metrics = summarize_router(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], router))
        np.testing.assert_array_equal(metrics["expert_load"], [[1, 0, 0, 0]])
        assert float(metrics["fraction_dropped"]) == pytest.approx(1 - served / 3, rel=1e-6)

    @pytest.mark.parametrize("factor", [4.0, 100.0, None])
    def test_a_factor_above_what_is_needed_drops_nothing(self, factor):
        """B7: with experts 1 to 3 empty."""
        module, params, x, mask = self.crowd(5, factor)
        output = apply(module, params, x, mask)
        np.testing.assert_array_equal(output.router.served, [5, 0, 0, 0])
        assert float(output.router.fraction_dropped) == 0.0
        served = np.ones((1, 5, 1, 1), np.float32)
        models.assert_close(output.x, jit_loop(params, x, module.experts, served))

    @pytest.mark.parametrize("factor", [0.1, 1.0, None])
    def test_a_single_token_is_served(self, factor):
        """B7."""
        module, params, x, mask = self.crowd(1, factor)
        output = apply(module, params, x, mask)
        np.testing.assert_array_equal(output.router.served, [1, 0, 0, 0])
        served = np.ones((1, 1, 1, 1), np.float32)
        models.assert_close(output.x, jit_loop(params, x, module.experts, served))

    def test_with_1x_late_tokens_are_served_too(self):
        """All tokens of a group want the same expert of each of 4 prototypes, each with room 2."""
        experts = MoEConfig(
            num_experts=4, num_prototypes=4, capacity_mode="ONE_X", capacity_factor=1.0
        )
        params, x, _ = arguments(experts)
        output = apply(layer(experts), params, x, np.ones((B, T), bool))
        assert (np.abs(np.asarray(output.x)).max(-1) > 0).all()
        np.testing.assert_array_equal(output.router.served, np.full(4, 2 * B))


@pytest.mark.parametrize("experts", cases(CASES | ONE_X | DROPLESS, "half rows", "1x", "dropless"))
def test_large_padding_changes_no_bit(experts):
    """B3: real outputs, gradients and statistics; padding itself is exactly 0."""
    params, x, mask = arguments(experts)
    noise = 1e4 * np.random.default_rng(3).normal(size=x.shape).astype(np.float32)
    noisy = np.where(mask[..., None], x, noise)
    run = ours(layer(experts))
    clean = run(params, x, mask)
    y, (_, to_x), _ = clean
    assert not np.asarray(y)[~mask].any()
    assert not np.asarray(to_x)[~mask].any()
    models.assert_equal(run(params, noisy, mask), clean)


def test_jitter_moves_choices_in_training_only():
    experts = models.experts(router_jitter=0.9)
    params, x, mask = arguments(experts)
    module = layer(experts)
    first, second = (apply(module, params, x, mask, jax.random.key(k)).x for k in (0, 1))
    assert (first != second).any()
    without = apply(layer(models.experts()), params, x, mask)
    models.assert_equal(apply(module, params, x, mask), without)


def test_parameters():
    _, x, mask = arguments(models.experts())
    boxed = models.boxed(layer(models.experts(), gated=True), x, mask, None)
    shapes = {name: (p.value.shape, p.axes) for name, p in boxed.items() if name != "router"}
    assert shapes == {
        "up": ((8, M, H), ("expert", "embed", "mlp")),
        "gate": ((8, M, H), ("expert", "embed", "mlp")),
        "down": ((8, H, M), ("expert", "mlp", "embed")),
    }


class TestGroupSize:
    @pytest.mark.parametrize(
        ("group_size", "rows", "length", "expected"),
        [
            (None, 4, 6, 6),
            (3, 4, 6, 3),
            (12, 4, 6, 12),
            (8, 4, 6, 8),
            (24, 4, 6, 24),
            (64, 1, 1, 1),
        ],
    )
    def test_is_the_stated_number_or_all_there_are(self, group_size, rows, length, expected):
        assert group_size_of(group_size, rows, length) == expected

    def test_refuses_groups_that_do_not_divide(self):
        params, x, mask = arguments(models.experts())
        with pytest.raises(ConfigError, match="groups of 5 tokens do not divide the 2 rows of 8"):
            apply(layer(models.experts(group_size=5)), params, x, mask)

    def test_refuses_groups_of_more_tokens_than_a_device_has(self):
        """B6: a group is the same on every mesh, so it is never cut silently."""
        partitioning = Partitioning()
        params, _, _ = arguments(models.experts())
        with (
            partitioning.activate(partitioning.make_mesh()),
            pytest.raises(ConfigError, match=r"MoEConfig\.group_size"),
        ):
            apply(
                layer(models.experts(group_size=2 * T)),
                params,
                np.ones((8, T, M), np.float32),
                np.ones((8, T), bool),
            )


@pytest.mark.parametrize(
    ("E", "P", "K"), [(8, 1, 1), (8, 1, 3), (8, 2, 2), (8, 4, 1), (8, 4, 2), (12, 3, 2)]
)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_most_choices_on_one_device(E, P, K, devices):
    experts = MoEConfig(num_experts=E, num_prototypes=P, num_selected_experts=K)
    F, own = E // P, E // devices

    def worst(device):
        mine = set(range(device * own, (device + 1) * own))
        return sum(min(K, len(mine & set(range(p * F, (p + 1) * F)))) for p in range(P))

    assert most_choices(experts, own) == max(map(worst, range(devices)))
