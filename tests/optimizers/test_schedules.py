import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.optimizers.schedules import (
    Constant,
    Cosine,
    Decay,
    InverseSquareRoot,
    WarmupStableDecay,
    rewarmup,
)


def values(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_constant():
    assert values(Constant(peak=0.5), (0, 1, 10**6)) == [0.5, 0.5, 0.5]
    assert values(Constant(peak=0.5, warmup_steps=2), (0, 1, 2, 9)) == [0.0, 0.25, 0.5, 0.5]


def test_inverse_square_root():
    # Linear to step 4, then 2 * sqrt(4 / step).
    schedule = InverseSquareRoot(peak=2.0, warmup_steps=4)
    assert values(schedule, (0, 1, 4, 16, 64)) == [0.0, 0.5, 2.0, 1.0, 0.5]


def test_cosine():
    # Half way through the 8 steps after the warm-up: the mean of peak and final.
    schedule = Cosine(peak=1.0, total_steps=10, warmup_steps=2, final=0.2)
    quarter = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    np.testing.assert_allclose(
        values(schedule, (0, 1, 2, 4, 6, 10, 99)), [0, 0.5, 1, quarter, 0.6, 0.2, 0.2], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("decay", "quarter"),
    [
        (Decay.LINEAR, 0.75),
        (Decay.SQRT, 0.5),
        (Decay.COSINE, (1 + math.cos(math.pi / 4)) / 2),
    ],
)
def test_warmup_stable_decay(decay, quarter):
    # Steps 0-10 up, 10-60 constant, 60-100 down to 0.2: at 70 a quarter of the way.
    schedule = WarmupStableDecay(
        peak=1.2, total_steps=100, warmup_steps=10, decay_fraction=0.4, final=0.2, decay=decay
    )
    assert (schedule.stable_steps, schedule.decay_steps) == (50, 40)
    np.testing.assert_allclose(
        values(schedule, (0, 5, 10, 35, 60, 70, 100, 1000)),
        [0.0, 0.6, 1.2, 1.2, 1.2, 0.2 + quarter, 0.2, 0.2],
        rtol=1e-6,
    )


def test_without_decay_the_peak_stays():
    schedule = WarmupStableDecay(peak=0.5, total_steps=4, decay_fraction=0.0)
    assert values(schedule, (0, 4, 5, 100)) == [0.5] * 4


def test_decay_right_after_the_warmup():
    schedule = WarmupStableDecay(peak=1.0, total_steps=4, warmup_steps=2, decay_fraction=0.5)
    assert values(schedule, range(6)) == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(peak=1.0, warmup_steps=3),
        InverseSquareRoot(peak=1.0, warmup_steps=3),
        Cosine(peak=1.0, warmup_steps=3, total_steps=9),
        WarmupStableDecay(peak=1.0, warmup_steps=3, total_steps=9, decay_fraction=0.3),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_traced_steps_give_float32_scalars(schedule):
    traced = jax.jit(jax.vmap(schedule))(jnp.arange(12))
    assert traced.dtype == jnp.float32
    assert schedule(3).shape == ()
    assert schedule(3).dtype == jnp.float32
    np.testing.assert_allclose(traced, values(schedule, range(12)), rtol=1e-6, atol=1e-7)


def test_large_steps_stay_exact():
    # In float32 the steps 2**24 and 2**24 + 1 are the same number: the subtraction must be of ints.
    schedule = WarmupStableDecay(peak=1.0, total_steps=2**24 + 4, decay_fraction=4 / (2**24 + 4))
    assert values(schedule, range(2**24, 2**24 + 5)) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_rewarmup():
    steps = (4, 5, 10, 15, 99)  # the switch is at 5, the factor from 0.2 to 1 in 10 steps
    got = [float(rewarmup(jnp.float32(2.0), step, 5, 10, 0.2)) for step in steps]
    np.testing.assert_allclose(got, [2.0, 0.4, 1.2, 2.0, 2.0], rtol=1e-6)
    traced = jax.jit(lambda step, start: rewarmup(jnp.float32(2.0), step, start, 10, 0.2))(10, 5)
    np.testing.assert_allclose(traced, 1.2, rtol=1e-6)
    assert rewarmup(jnp.float32(2.0), 5, 5, 0) == 2.0


def test_rewarmup_refuses_what_cannot_be():
    with pytest.raises(ConfigError, match="-1 steps"):
        rewarmup(jnp.float32(1.0), 0, 0, -1)
    with pytest.raises(ConfigError, match=r"start_fraction = 0.0 is not in \(0, 1\]"):
        rewarmup(jnp.float32(1.0), 0, 0, 1, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(peak=0.0), r"Constant.peak: 0.0; a learning rate above 0"),
        (lambda: Constant(peak=float("nan")), r"Constant.peak: nan"),
        (lambda: Constant(peak=1.0, warmup_steps=-1), r"Constant.warmup_steps: -1"),
        (lambda: InverseSquareRoot(peak=1.0, warmup_steps=0), r"warmup_steps: 0 makes every"),
        (lambda: Cosine(peak=1.0, total_steps=5, warmup_steps=5), r"5 leaves nothing of .* = 5"),
        (lambda: Cosine(peak=1.0, total_steps=5, final=2.0), r"Cosine.final: 2.0 is not between"),
        (lambda: WarmupStableDecay(peak=1.0, total_steps=0), r"total_steps: 0; at least 1"),
        (
            lambda: WarmupStableDecay(peak=1.0, total_steps=10, decay_fraction=1.5),
            r"decay_fraction: 1.5 is not between 0 and 1",
        ),
        (
            lambda: WarmupStableDecay(peak=1.0, total_steps=10, warmup_steps=8, decay_fraction=0.3),
            r"warmup_steps = 8 and a decay of 3 steps exceed total_steps = 10",
        ),
    ],
)
def test_refuses_what_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
