"""When a stage ends, and what of it the checkpoint keeps."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from m6jax.foundation.validated import ConfigError
from m6jax.pseudo_to_real.triggers import AtStep, GradientAgreement, LossSlope

SLOPE = LossSlope(at_most=100, least_decrease=10.0, window=2, checks=2)
# Means of windows of 2: 5.0, 4.9, 4.89, 4.88, and falls in 1000 steps: 50, 5, 5.
LOSSES = [5.1, 4.9, 5.0, 4.8, 4.88, 4.9, 4.88, 4.88]
AGREEMENT = GradientAgreement(at_most=100, every=10, checks=2)
LOW, HALF, HIGH = [0.4, 0.3, 0.9], [0.4, 0.9], [0.6, 0.7, 0.1]


def as_saved(watch):
    return json.loads(json.dumps(watch.seen()))


def end_of(trigger, losses, start=0, resume_after=()):
    """The step at which a stage ends, and what was found on the way."""
    watch, found = trigger.watch(start, {}), {}
    for step, loss in enumerate(losses, start + 1):
        if measured := watch.see_loss(step, jnp.float32(loss)):
            found[step] = dict(measured)
        if step in resume_after:
            watch = trigger.watch(start, as_saved(watch))
        if watch.over(step):
            return step, found
    return None, found


def test_at_step_is_over_from_its_step_on():
    watch = AtStep(step=3).watch(0, {})
    assert not watch.see_loss(1, 5.0)
    assert not watch.wants_agreement(1)
    assert not watch.see_agreement(1, LOW)
    assert [watch.over(step) for step in (2, 3, 4)] == [False, True, True]
    assert AtStep(step=3).at_least == AtStep(step=3).at_most == 3


class TestLossSlope:
    def test_by_hand(self):
        step, found = end_of(SLOPE, LOSSES)
        assert step == 8
        assert found.keys() == {4, 6, 8}
        decreases = [found[s]["loss_decrease"] for s in (4, 6, 8)]
        np.testing.assert_allclose(decreases, [50, 5, 5], rtol=1e-3)
        assert [found[s]["flat_windows"] for s in (4, 6, 8)] == [0, 1, 2]

    def test_a_steep_window_starts_the_count_again(self):
        step, found = end_of(SLOPE, [5.0, 5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
        assert [found[s]["flat_windows"] for s in (4, 6, 8, 10)] == [1, 0, 1, 2]
        assert step == 10

    def test_a_rising_loss_is_flat(self):
        assert end_of(SLOPE, [4.0, 4.0, 5.0, 5.0, 6.0, 6.0])[0] == 6

    def test_a_loss_that_is_no_number_is_not(self):
        assert end_of(SLOPE, [np.nan] * 8)[0] is None

    def test_windows_begin_with_the_stage(self):
        assert end_of(SLOPE, LOSSES, start=3)[0] == 11

    def test_not_before_at_least_and_not_after_at_most(self):
        late = LossSlope(at_most=100, at_least=9, least_decrease=10.0, window=2)
        assert end_of(late, [5.0] * 20)[0] == 10
        early = LossSlope(at_most=5, least_decrease=10.0, window=2)
        assert end_of(early, [5.0 - 0.1 * i for i in range(9)])[0] == 5

    @pytest.mark.parametrize("resume_after", [(1,), (2,), (3, 6), (5,), (7,), range(1, 8)])
    def test_resumed_it_decides_alike(self, resume_after):
        """In the middle of a window, at its end, and between check and end, to the last bit."""
        assert end_of(SLOPE, LOSSES, resume_after=resume_after) == end_of(SLOPE, LOSSES)

    def test_a_stage_that_was_over_stays_over(self):
        watch = SLOPE.watch(0, {})
        for step, loss in enumerate(LOSSES, 1):
            watch.see_loss(step, loss)
        assert watch.over(8)
        assert SLOPE.watch(0, as_saved(watch)).over(8)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"window": 0}, "LossSlope.window: 0; at least 1 is needed"),
            ({"checks": 0}, "LossSlope.checks: 0; at least 1"),
            ({"at_most": 0}, "LossSlope.at_most: 0; at least 1"),
            ({"at_least": 101}, "LossSlope.at_least: 101 comes after at_most = 100"),
        ],
    )
    def test_refuses(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            LossSlope(**({"at_most": 100, "least_decrease": 1.0} | changes))

    def test_refuses_a_stage_without_room_for_its_windows(self):
        SLOPE.check_stage("stage 'a'", begin=94, shared=False)
        with pytest.raises(ConfigError, match="at step 95, and 3 windows of 2 steps do not fit"):
            SLOPE.check_stage("stage 'a'", begin=95, shared=True)


class TestGradientAgreement:
    def test_asks_at_multiples_of_its_interval(self):
        watch = AGREEMENT.watch(10, {})
        assert [s for s in range(10, 41) if watch.wants_agreement(s)] == [20, 30, 40]

    def test_most_pairs_low_in_checks_running(self):
        watch = AGREEMENT.watch(0, {})
        seen = []
        for step, correlations in zip(
            (10, 20, 30, 40, 50), (LOW, HALF, LOW, HIGH, LOW), strict=True
        ):
            found = watch.see_agreement(step, np.array(correlations))
            seen.append((round(found["disagreeing_pairs"], 3), found["low_checks"]))
            assert not watch.over(step)
        # Exactly half of the pairs is not most of them.
        assert seen == [(0.667, 1), (0.5, 0), (0.667, 1), (0.333, 0), (0.667, 1)]
        watch = AGREEMENT.watch(0, as_saved(watch))
        watch.see_agreement(60, LOW)
        assert watch.over(60)
        assert AGREEMENT.watch(0, as_saved(watch)).over(60)

    def test_not_before_at_least_and_not_after_at_most(self):
        trigger = GradientAgreement(at_most=60, every=10, checks=1, at_least=35)
        watch = trigger.watch(0, {})
        for step in (10, 20, 30, 40):
            assert not watch.over(step)
            watch.see_agreement(step, LOW)
        assert watch.over(40)
        assert [trigger.watch(0, {}).over(step) for step in (59, 60)] == [False, True]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"every": 0}, "GradientAgreement.every: 0; at least 1"),
            ({"checks": 0}, "GradientAgreement.checks: 0; at least 1"),
            ({"at_most": 0}, "GradientAgreement.at_most: 0; at least 1"),
            ({"threshold": 1.5}, "GradientAgreement.threshold: 1.5 is no correlation"),
            ({"share": 1.0}, r"GradientAgreement.share: 1.0 is not in \[0, 1\)"),
            ({"at_least": 101}, "GradientAgreement.at_least: 101 comes after at_most = 100"),
        ],
    )
    def test_refuses(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            GradientAgreement(**({"at_most": 100} | changes))

    def test_refuses_stages_that_it_cannot_end(self):
        AGREEMENT.check_stage("stage 'a'", begin=0, shared=True)
        with pytest.raises(ConfigError, match="in stage 'a' every layer has its own weights"):
            AGREEMENT.check_stage("stage 'a'", begin=0, shared=False)
        GradientAgreement(at_most=30, every=10, checks=2).check_stage("stage 'a'", 10, True)
        with pytest.raises(ConfigError, match="1 checks, at multiples of 10 steps, fit in stage"):
            GradientAgreement(at_most=29, every=10, checks=2).check_stage("stage 'a'", 10, True)
