"""Slots by hand, and moving rows against the one-hot products of GShard (GSEC)."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

from m6jax.modeling.config import CapacityMode
from m6jax.modeling.dispatch import (
    Slots,
    assign_slots,
    capacity_of,
    combine,
    count_choices,
    dispatch,
    first_tokens,
)

jit_assign = models.jit(assign_slots, static_argnums=(1, 2))
KX, ONE_X = CapacityMode.KX, CapacityMode.ONE_X


@pytest.mark.parametrize(
    ("mode", "factor", "S", "Q", "E", "capacity"),
    [
        (KX, 1.0, 16, 2, 8, 4),
        (KX, 1.25, 16, 2, 8, 5),
        (KX, 1.0, 5, 2, 4, 3),  # 2.5, rounded up
        (ONE_X, 1.0, 16, 2, 8, 2),
        (ONE_X, 1.25, 2304, 80, 10240, 1),
        (KX, 1.25, 2304, 80, 10240, 23),  # 22.5
        (KX, 100.0, 16, 2, 8, 16),  # a token chooses an expert at most once
        (KX, 0.1, 1, 1, 8, 1),
    ],
)
def test_capacity(mode, factor, S, Q, E, capacity):
    assert capacity_of(mode, factor, S, Q, E) == capacity


def test_prototypes_begin_at_other_tokens_with_one_x_only():
    np.testing.assert_array_equal(first_tokens(ONE_X, 16, 4), [0, 4, 8, 12])
    np.testing.assert_array_equal(first_tokens(ONE_X, 5, 3), [0, 1, 3])
    np.testing.assert_array_equal(first_tokens(KX, 16, 4), [0, 0, 0, 0])


def test_counts_choices_of_every_expert():
    """Two tokens with K = 1 in P = 2 prototypes of F = 2 experts, then padding."""
    index = jnp.array([[[[0], [3]], [[0], [2]], [[4], [4]]]])
    np.testing.assert_array_equal(count_choices(index, 4), [2, 0, 1, 1])


class TestAssignSlots:
    def test_the_example_of_the_module(self):
        slots = jit_assign(jnp.array([[[0], [0], [1], [0]]]), 2, 2)
        np.testing.assert_array_equal(slots.of_choice, [[0], [1], [2], [4]])  # 4: no slot
        np.testing.assert_array_equal(slots.choice, [0, 1, 2, 4])  # 4: empty
        np.testing.assert_array_equal(slots.token, [0, 1, 2, 4])

    def test_five_tokens_that_all_prefer_expert_0(self):
        """B7: four served in order, the fifth has no slot."""
        slots = jit_assign(jnp.zeros((1, 5, 1), jnp.int32), 4, 4)
        np.testing.assert_array_equal(slots.of_choice[:, 0], [0, 1, 2, 3, 16])
        np.testing.assert_array_equal(slots.choice, [0, 1, 2, 3] + [5] * 12)

    def test_each_group_has_room_of_its_own(self):
        # Slots are counted through [E, G, C] = [2, 2, 1].
        slots = jit_assign(jnp.array([[[0], [0]], [[1], [0]]]), 2, 1)
        np.testing.assert_array_equal(slots.of_choice[:, 0], [0, 4, 3, 1])
        np.testing.assert_array_equal(slots.choice, [0, 3, 4, 2])

    def test_a_token_with_two_choices_and_padding(self):
        # Token 1 is padding: expert number 2 does not exist.
        slots = jit_assign(jnp.array([[[0, 1], [2, 2], [1, 0]]]), 2, 2)
        np.testing.assert_array_equal(slots.of_choice, [[0, 2], [4, 4], [3, 1]])
        np.testing.assert_array_equal(slots.choice, [0, 5, 1, 4])
        np.testing.assert_array_equal(slots.token, [0, 2, 0, 2])

    @pytest.mark.parametrize("capacity", [1, 3, 8])
    def test_the_tables_are_inverse_and_serve_in_order(self, capacity):
        G, S, Q, E = 3, 8, 2, 5
        index = np.random.default_rng(0).integers(0, E + 1, (G, S, Q))
        slots = jit_assign(index, E, capacity)
        of_choice, choice = np.asarray(slots.of_choice).reshape(-1), np.asarray(slots.choice)
        R, choices = E * G * capacity, G * S * Q
        assert choice.shape == (R,)
        taken = {(expert, group): 0 for expert in range(E) for group in range(G)}
        for number, expert in enumerate(index.reshape(-1)):
            group = number // (S * Q)
            row = taken.get((expert, group), capacity)
            if row < capacity:
                slot = (expert * G + group) * capacity + row
                assert of_choice[number] == slot
                assert choice[slot] == number
                taken[expert, group] += 1
            else:
                assert of_choice[number] == R
        assert (choice == choices).sum() == R - sum(taken.values())


class TestMoving:
    """Forward and backward against [tokens, slots] one-hot matrices."""

    G, S, Q, E, C, M = 2, 6, 2, 4, 2, 3

    def slots(self):
        index = np.random.default_rng(1).integers(0, self.E + 1, (self.G, self.S, self.Q))
        return jit_assign(index, self.E, self.C)

    def one_hot(self):
        """[N, Q, R]."""
        slots = self.slots()
        return jax.nn.one_hot(slots.of_choice, slots.choice.shape[0])

    def draw(self, *shape, seed):
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

    def test_dispatch(self):
        N, R = self.G * self.S, self.E * self.G * self.C
        x, cotangent = self.draw(N, self.M, seed=2), self.draw(R, self.M, seed=3)
        slots, mask = self.slots(), np.asarray(self.one_hot()).sum(1)

        @models.jit
        def both(x, cotangent):
            y, pullback = jax.vjp(lambda x: dispatch(x, slots), x)
            return y, *pullback(cotangent)

        y, gradient = both(x, cotangent)
        np.testing.assert_array_equal(y, mask.T @ x)
        np.testing.assert_allclose(gradient, mask @ cotangent, rtol=1e-6)

    def test_combine(self):
        N, R = self.G * self.S, self.E * self.G * self.C
        y, weights = self.draw(R, self.M, seed=4), self.draw(N, self.Q, seed=5)
        cotangent = self.draw(N, self.M, seed=6)

        slots, one_hot = self.slots(), self.one_hot()

        @models.jit(static_argnums=0)
        def both(fn, y, weights, cotangent):
            result, pullback = jax.vjp(fn, y, weights)
            return result, pullback(cotangent)

        got = both(lambda y, w: combine(y, w, slots), y, weights, cotangent)
        expected = both(
            lambda y, w: jnp.einsum("nqr,nq,rm->nm", one_hot, w, y), y, weights, cotangent
        )
        models.assert_close(got, expected)

    def test_a_token_without_a_slot_gets_exactly_zero(self):
        """B7: the fifth token's output is exactly 0."""
        slots = jit_assign(jnp.zeros((1, 5, 1), jnp.int32), 4, 4)
        rows = dispatch(1.0 + jnp.arange(5.0)[:, None], slots)
        np.testing.assert_array_equal(rows[:, 0], [1, 2, 3, 4] + [0] * 12)
        y = combine(rows + 100, jnp.full((5, 1), 0.5), slots)
        np.testing.assert_array_equal(y[:, 0], [50.5, 51, 51.5, 52, 0])

    def test_no_gradient_has_a_scatter(self):
        """The point of the two tables: rows move by gathers alone."""
        slots = self.slots()

        def loss(x, weights):
            return combine(dispatch(x, slots), weights, slots).sum()

        N = self.G * self.S
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((N, 3)), jnp.ones((N, self.Q))))
        assert "gather" in text
        assert "scatter" not in text

    def test_bfloat16_rows_keep_their_type(self):
        slots = Slots(of_choice=jnp.array([[0], [1]]), choice=jnp.array([0, 1]))
        x = jnp.ones((2, 3), jnp.bfloat16)

        def loss(x, weights):
            y = combine(dispatch(x, slots), weights, slots)
            return y.astype(jnp.float32).sum(), y

        grads, y = models.jit(jax.grad(loss, (0, 1), has_aux=True))(x, jnp.ones((2, 1)))
        assert [a.dtype for a in (y, *grads)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
