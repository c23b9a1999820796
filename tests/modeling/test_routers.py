"""Every router against plain loops over experts, and padding."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.foundation.partitioning import Partitioning
from m6jax.foundation.validated import ConfigError
from m6jax.modeling import balancing
from m6jax.modeling.moe import MoE
from m6jax.modeling.routers import Asked, ExpertChoice, TokenHash, TopK, choose, mix

# B rows, T length, M width, H expert's width, E experts, P prototypes, K choices in a prototype,
# F = E / P, S tokens of a group, C capacity.
B, T, M, H = 2, 8, 8, 6
SIGMOID = TopK(scores="SIGMOID")
BIASED = TopK(scores="SIGMOID", bias_rate=0.01)
PLAIN = {"load_balance_loss": 0.0, "router_z_loss": 0.0}
CASES = {
    "sigmoid": models.experts(router=SIGMOID, capacity_factor=None),
    "sigmoid renormalised": models.experts(
        router=SIGMOID, capacity_factor=None, normalize_weights=True
    ),
    "sigmoid top 1": models.experts(router=SIGMOID, capacity_factor=None, num_selected_experts=1),
    "biased softmax": models.experts(router=TopK(bias_rate=0.01), capacity_factor=None),
    "biased sigmoid": models.experts(router=BIASED, capacity_factor=None, normalize_weights=True),
    "hash": models.experts(router=TokenHash(), capacity_factor=None, **PLAIN),
    "hash renormalised": models.experts(
        router=TokenHash(seed=7), capacity_factor=None, normalize_weights=True, **PLAIN
    ),
    "shared": models.experts(num_shared_experts=3, capacity_factor=None),
}
BY_EXPERTS = {
    "expert choice": models.experts(router=ExpertChoice(), load_balance_loss=0.0),
    "expert choice renormalised": models.experts(
        router=ExpertChoice(), load_balance_loss=0.0, normalize_weights=True, group_size=4
    ),
    "expert choice over rows": models.experts(
        router=ExpertChoice(), load_balance_loss=0.0, group_size=16, capacity_factor=0.5
    ),
}


def cases(experts):
    return [pytest.param(e, id=name) for name, e in experts.items()]


def layer(experts, gated=False):
    return MoE(experts, H, gated, 1.0, jnp.float32, jnp.float32)


def arguments(experts, seed=0):
    """Parameters (with biases), x, a mask in which row 1 ends with padding, and token ids."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    E, wide = experts.num_experts, experts.num_shared_experts * H
    params = {"up": draw(E, M, H), "down": draw(E, H, M), "router": {"kernel": draw(M, E)}}
    if not experts.router.learned:
        del params["router"]
    if experts.router.bias_rate:
        params["router"]["bias"] = 0.3 * draw(E)
    if wide:
        params["shared"] = {"up": draw(M, wide), "down": draw(wide, M)}
    mask = np.ones((B, T), bool)
    mask[1, 5:] = False
    return params, draw(B, T, M), mask, rng.integers(0, 1000, (B, T)).astype(np.int32)


def scores_plainly(params, x, experts):
    """[B, T, P, F]."""
    logits = (x @ params["router"]["kernel"]).reshape(*x.shape[:2], experts.num_prototypes, -1)
    sigmoid = isinstance(experts.router, TopK) and experts.router.scores.name == "SIGMOID"
    return jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)


def hash_plainly(token, seed):
    """MurmurHash3's last step on Python's numbers."""

    def finish(h):
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    return finish(int(token) ^ finish(seed))


def taken_plainly(params, x, mask, tokens, experts):
    """Which experts get which tokens, [B, T, P, F]: token after token, or expert after expert."""
    P, F, K = experts.num_prototypes, experts.experts_per_prototype, experts.num_selected_experts
    taken = np.zeros((B, T, P, F), np.float32)
    if isinstance(experts.router, TokenHash):
        for b, t, p, k in np.ndindex(B, T, P, K):
            number = hash_plainly(tokens[b, t], experts.router.seed + p) + k
            taken[b, t, p, number % F] = mask[b, t]
        return taken
    scores = np.asarray(scores_plainly(params, x, experts))
    if isinstance(experts.router, TopK):
        preferred = scores + params["router"].get("bias", np.zeros(P * F)).reshape(P, F)
        for b, t, p in np.ndindex(B, T, P):
            taken[b, t, p, np.argsort(-preferred[b, t, p])[:K]] = mask[b, t]
        return taken
    S = experts.group_size or T
    room = int(np.ceil(S * P * K * experts.capacity_factor / (P * F)))
    scores, real = scores.reshape(-1, S, P, F), mask.reshape(-1, S)
    taken = taken.reshape(-1, S, P, F)
    for g, p, f in np.ndindex(len(scores), P, F):
        best = [t for t in np.argsort(-scores[g, :, p, f]) if real[g, t]]
        taken[g, best[:room], p, f] = 1
    return taken.reshape(B, T, P, F)


def loop_over_experts(params, x, mask, taken, experts):
    """The layer's output, differentiable: every expert sees all tokens."""
    weights = taken
    if experts.router.learned:
        weights = taken * scores_plainly(params, x, experts)
    if experts.normalize_weights:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-15)
    weights, y = weights.reshape(*x.shape[:2], -1), 0.0
    for e in range(experts.num_experts):
        y += weights[..., e, None] * (jax.nn.gelu(x @ params["up"][e]) @ params["down"][e])
    if experts.num_shared_experts:
        own = jax.nn.gelu(x @ params["shared"]["up"]) @ params["shared"]["down"]
        y += mask[..., None] * own
    return y


COTANGENT = np.random.default_rng(7).normal(size=(B, T, M)).astype(np.float32)


@functools.cache
def ours(experts):
    """Jits (params, x, mask, tokens) -> (y, gradients of params and x, router statistics)."""

    @models.jit
    def run(params, x, mask, tokens):
        def output(params, x):
            output = layer(experts).apply(balancing.variables(params), x, mask, None, tokens)
            return output.x, output.router

        y, pullback, router = jax.vjp(output, params, x, has_aux=True)
        return y, pullback(COTANGENT), router

    return run


@pytest.mark.parametrize("experts", cases(CASES | BY_EXPERTS))
def test_equals_a_loop_over_experts(experts):
    params, x, mask, tokens = arguments(experts)
    y, gradients, router = ours(experts)(params, x, mask, tokens)
    taken = taken_plainly(params, x, mask, tokens, experts)
    plain, pullback = models.jit(
        lambda params, x: jax.vjp(
            lambda p, x: loop_over_experts(p, x, mask, taken, experts), params, x
        )
    )(params, x)
    models.assert_close(y, plain, 2e-6)
    expected = pullback(COTANGENT)
    if "router" in params and "bias" in params["router"]:
        np.testing.assert_array_equal(gradients[0]["router"]["bias"], 0.0)  # no gradient at all
        assert not np.asarray(expected[0]["router"]["bias"]).any()
    models.assert_close(gradients, expected, 5e-6)
    loads = taken.sum((0, 1)).reshape(-1)
    np.testing.assert_array_equal(router.chosen, loads)
    np.testing.assert_array_equal(router.served, loads)
    assert not np.asarray(y)[~mask].any()


@pytest.mark.parametrize("experts", cases(CASES | BY_EXPERTS))
def test_large_padding_changes_no_bit(experts):
    """B3 for every router and for shared experts, token ids of padding included."""
    params, x, mask, tokens = arguments(experts)
    rng = np.random.default_rng(3)
    noisy = np.where(mask[..., None], x, 1e4 * rng.normal(size=x.shape)).astype(np.float32)
    others = np.where(mask, tokens, rng.integers(0, 1000, (B, T))).astype(np.int32)
    clean = ours(experts)(params, x, mask, tokens)
    models.assert_equal(ours(experts)(params, noisy, mask, others), clean)
    assert not np.asarray(clean[1][1])[~mask].any()  # no gradient to padding


@pytest.mark.parametrize(
    "experts",
    cases(
        {n: CASES[n] for n in ("biased sigmoid", "hash", "shared")}
        | {"by experts": BY_EXPERTS["expert choice"]}
    ),
)
def test_experts_on_several_devices_equal_one(experts):
    params, x, mask, tokens = (
        np.tile(a, (4,) + (1,) * (a.ndim - 1)) if isinstance(a, np.ndarray) else a
        for a in arguments(experts)
    )
    mask[3:, 2:] = False

    def run(params, x, mask, tokens):
        output = layer(experts).apply(balancing.variables(params), x, mask, None, tokens)
        return output.x, output.router

    expected = models.jit(run)(params, x, mask, tokens)
    where = Partitioning(data=2, expert=2, model=2)
    with where.activate(where.make_mesh()):
        got = models.jit(run)(params, x, mask, tokens)
    models.assert_close(got, expected, 1e-5)


class TestBias:
    SCORES = jnp.array([[[[0.5, 0.3, 0.2]]]])  # [B, T, P, F]
    MASK = np.ones((1, 1), bool)

    def test_moves_the_choice_and_not_the_weight(self):
        routing, chosen = choose(self.SCORES, self.MASK, 1, False, jnp.array([[0.0, 0.0, 0.4]]))
        assert routing.expert_index.item() == 2
        assert routing.weights.item() == pytest.approx(0.2)
        np.testing.assert_array_equal(chosen, [[[[0, 0, 1]]]])

    def test_renormalised_weights_are_of_scores_alone(self):
        bias = jnp.array([[-9.0, 0.0, 9.0]])
        routing, _ = choose(self.SCORES, self.MASK, 2, True, bias)
        np.testing.assert_array_equal(routing.expert_index[0, 0, 0], [2, 1])
        np.testing.assert_allclose(routing.weights[0, 0, 0], [0.4, 0.6], rtol=1e-6)


class TestSigmoid:
    def choice(self, logits, **settings):
        logits = jnp.asarray(logits, jnp.float32)[None, None, None]
        asked = Asked(1, logits.shape[-1], 1, True, 1, None, np.ones((1, 1), bool), logits=logits)
        return TopK(scores="SIGMOID").choose(asked)

    def test_probabilities_are_scores_over_their_sum(self):
        choice = self.choice([0.0, np.log(3.0)])  # scores 1/2 and 3/4
        np.testing.assert_allclose(choice.probabilities[0, 0, 0], [0.4, 0.6], rtol=1e-6)
        assert choice.routing.weights.item() == 1.0

    def test_tiny_scores_give_no_nan(self):
        choice = self.choice([-200.0, -200.0])
        np.testing.assert_allclose(choice.probabilities[0, 0, 0], [0.5, 0.5], rtol=1e-6)
        assert choice.routing.weights.item() == 0.0


class TestHash:
    def test_mix_is_murmurs(self):
        """The published finalizer of 1, in the reference implementation 0x514E28B7."""
        assert int(mix(np.uint32(1))) == 0x514E28B7

    def test_spreads_tokens_over_the_experts_of_each_prototype_otherwise(self):
        tokens = np.arange(4000, dtype=np.int32)[None]
        asked = Asked(2, 4, 1, False, 1, None, np.ones((1, 4000), bool), tokens=tokens)
        choice = TokenHash().choose(asked)
        load = np.asarray(choice.chosen.sum((0, 1)))
        assert (np.abs(load / 1000 - 1) < 0.1).all()
        first, second = np.asarray(choice.routing.expert_index)[0, :, :, 0].T
        assert abs((first == second - 4).mean() - 0.25) < 0.03  # by chance
        np.testing.assert_array_equal(choice.routing.weights, 1.0)

    def test_another_seed_is_another_hash(self):
        tokens = np.arange(100, dtype=np.int32)[None]
        asked = Asked(1, 8, 1, False, 1, None, np.ones((1, 100), bool), tokens=tokens)
        zero, one = (TokenHash(seed=s).choose(asked).routing.expert_index for s in (0, 1))
        assert 0.6 < np.mean(zero != one) < 1.0

    def test_has_no_parameters_and_says_how_even_it_is(self):
        experts = CASES["hash"]
        _, x, mask, tokens = arguments(experts)
        assert "router" not in models.boxed(layer(experts), x, mask, None, tokens)
        _, _, router = ours(experts)(*arguments(experts))
        shares = np.asarray(router.chosen).reshape(2, 4) / router.chosen.sum() * 2
        assert float(router.load_balance_loss) == pytest.approx(4 * (shares**2).sum(1).mean())
        assert float(router.entropy) == pytest.approx(np.log(2), rel=1e-6)
        assert (float(router.router_z_loss), float(router.confidence)) == (0.0, 0.5)

    def test_without_token_ids_is_refused(self):
        params, x, mask, _ = arguments(CASES["hash"])
        with pytest.raises(ValueError, match="TokenHash needs token ids"):
            layer(CASES["hash"]).apply(balancing.variables(params), x, mask, None)


def test_expert_choice_fills_every_expert():
    """Even load, and tokens with different numbers of experts."""
    experts = BY_EXPERTS["expert choice"]
    params, x, _, tokens = arguments(experts)
    mask = np.ones((B, T), bool)
    _, _, router = ours(experts)(params, x, mask, tokens)
    np.testing.assert_array_equal(router.chosen, np.full(8, B * 4.0))  # ceil(8 * 4 * 1.0 / 8)
    per_token = taken_plainly(params, x, mask, tokens, experts).sum((2, 3))
    assert per_token.min() < 4 < per_token.max()
    assert float(router.fraction_dropped) == 0.0


def test_jitter_is_on_the_input_of_scores_in_training_alone():
    experts = models.experts(router=BIASED, router_jitter=0.9)
    params, x, mask, _ = arguments(experts)

    @models.jit(static_argnums=0)
    def run(experts, key):
        return layer(experts).apply(balancing.variables(params), x, mask, key).x

    models.assert_close(run(experts, None), run(models.experts(router=BIASED), None))
    first, second = (np.asarray(run(experts, jax.random.key(k))) for k in (0, 1))
    assert (first != second).any()


def test_shared_experts_are_one_feed_forward_of_their_width():
    experts = CASES["shared"]
    _, x, mask, tokens = arguments(experts)
    boxed = models.boxed(layer(experts, gated=True), x, mask, None, tokens)["shared"]
    shapes = {name: (p.value.shape, p.axes) for name, p in boxed.items()}
    assert shapes == {
        "up": ((M, 3 * H), ("embed", "mlp")),
        "gate": ((M, 3 * H), ("embed", "mlp")),
        "down": ((3 * H, M), ("mlp", "embed")),
    }


def test_expert_choice_refuses_groups_that_do_not_divide():
    experts = models.experts(router=ExpertChoice(), load_balance_loss=0.0, group_size=5)
    params, x, mask, _ = arguments(experts)
    with pytest.raises(ConfigError, match="groups of 5 tokens do not divide the 2 rows of 8"):
        layer(experts).apply(balancing.variables(params), x, mask, None)
