"""What is learnt of rates, observation by observation, beside figures computed by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paddle_kv.offload.figures import Pace, Prefill


# ---- seconds a byte ----
def test_the_first_observations_are_averaged() -> None:
    pace = Pace()
    assert pace.s_per_byte is None
    for found, expected in ((1.0, 1.0), (math.exp(0.3), math.exp(0.15)), (1.0, math.exp(0.1))):
        pace.observe(found)
        assert pace.s_per_byte == pytest.approx(expected)


def test_what_lies_just_on_the_band_is_no_bad_news() -> None:
    for found, log in ((math.e, 0.1), (math.exp(1.01), 0.505)):
        pace = Pace()
        pace.set(1.0, 0.25)  # a band of 1 as a logarithm
        pace.observe(found)
        assert pace.s_per_byte == pytest.approx(math.exp(log))


def test_it_took_longer_than_this() -> None:
    pace = Pace()
    pace.at_least(3.0)
    assert (pace.s_per_byte, pace.observations) == (pytest.approx(6.0), 1)
    pace.observe(6.0 * math.exp(-0.2))
    assert pace.s_per_byte == pytest.approx(6.0 * math.exp(-0.1))  # the second: a half
    pace.at_least(1.0)
    assert pace.s_per_byte == pytest.approx(6.0 * math.exp(-0.1))  # more is known


def test_what_is_set_counts_like_ten_observations() -> None:
    pace = Pace()
    pace.set(2.0, 0.1)
    assert (pace.s_per_byte, pace.spread, pace.observations) == (pytest.approx(2.0), 0.1, 10)
    for _ in range(20):
        pace.observe(2.0)
    pace.set(3.0, 0.1)
    assert pace.observations == 30


# ---- seconds a token ----
def test_two_observations_give_a_line() -> None:
    prefill = Prefill()
    prefill.observe(0, 100, 1.0)
    assert (prefill.base_s, prefill.slope_s, prefill.spread) == (pytest.approx(0.01), 0.0, 0.2)
    prefill.observe(100, 100, 2.0)
    assert (prefill.base_s, prefill.slope_s) == (pytest.approx(0.005), pytest.approx(1e-4))
    assert prefill.spread == pytest.approx(0.2 + 0.5 * (math.log(2) - 0.2))
    assert prefill.seconds(0, 100) == pytest.approx(1.0) and prefill.seconds(100, 200) == pytest.approx(2.0)


def test_an_observation_that_is_far_off_spreads_by_one_at_most() -> None:
    prefill = Prefill()
    prefill.observe(0, 100, 1.0)
    prefill.observe(0, 100, math.exp(1.5))
    assert prefill.spread == pytest.approx(0.2 + 0.5 * (1.0 - 0.2))
    prefill.observe(0, 100, 100 * prefill.seconds(0, 1) * 1.0 + 0.0)
    assert prefill.spread == pytest.approx(0.6 + (0.0 - 0.6) / 3)


@pytest.mark.parametrize(("before", "counts_as"), [(2, 9.0), (3, 2.0)])
def test_a_pause_counts_twice_what_was_expected_once_three_were_seen(before: int, counts_as: float) -> None:
    prefill = Prefill()
    for _ in range(before):
        prefill.observe(0, 10, 1.0)
    prefill.observe(0, 10, 9.0)
    assert prefill.base_s == pytest.approx(0.1 * (before + counts_as) / (before + 1))


def test_old_observations_fade_from_the_ninth_on() -> None:
    prefill, expected = Prefill(), 0.0
    for number in range(10):
        prefill.observe(number, 1, 1.0)
        expected = (expected if number < 8 else 0.975 * expected) + 1
        assert prefill._sums[0] == pytest.approx(expected)
        assert prefill.observations == number + 1


def test_positions_that_are_nearly_one_tell_no_slope() -> None:
    for middles, has_slope in (((9, 11), False), ((8, 12), True)):
        prefill = Prefill()
        for number, middle in enumerate(middles):
            prefill.observe(middle - 1, 2, 2.0 + number)
        assert (prefill.slope_s > 0) == has_slope


def test_neither_part_is_negative() -> None:
    steep, falling = Prefill(), Prefill()
    for prefill, first, second in ((steep, 0.01, 2.0), (falling, 2.0, 1.2)):
        prefill.observe(0, 100, first)
        prefill.observe(100, 100, second)
    mean_y = (0.0001 + 0.02) / 2
    assert (steep.slope_s, steep.base_s) == (pytest.approx(mean_y / 100), pytest.approx(0.01 * mean_y))
    assert (falling.slope_s, falling.base_s) == (0.0, pytest.approx(0.016))


def test_before_the_first_token_positions_count_as_one() -> None:
    prefill = Prefill()
    for _ in range(2):
        prefill.observe(0, 1, 0.001)
    prefill.observe(1, 1, 1.0)
    assert prefill.slope_s == pytest.approx(1.002 / 3)
    assert prefill.base_s == pytest.approx(1.002 / 3 * (1 - 2.5 / 3))


@pytest.mark.parametrize("slow_s", [2.1, 5.0, 1000.0])
def test_a_first_pass_that_took_far_longer_than_the_second_is_forgotten(slow_s: float) -> None:
    """It compiled its kernels, say."""
    prefill = Prefill()
    prefill.observe(0, 100, slow_s)
    prefill.observe(100, 100, 1.0)
    assert (prefill.seconds(0, 100), prefill.slope_s) == (pytest.approx(1.0), 0.0)
    assert not prefill.is_doubted


def test_but_not_for_one_over_few_tokens() -> None:
    prefill = Prefill()
    prefill.observe(0, 100, 5.0)
    prefill.observe(100, 49, 0.49)
    assert prefill.seconds(0, 100) > 3.0 and prefill.is_doubted


def test_two_that_are_far_quicker_are_believed_wherever_they_are() -> None:
    """All positions take a share of what they took, and what comes next counts as much as all before."""
    prefill = Prefill()
    prefill.set(1.0, 1e-3)
    prefill.observe(0, 100, 100 * 0.4 * 1.05)
    assert prefill.is_doubted and prefill.base_s > 0.9
    before = prefill.seconds(100, 200), prefill.seconds(5000, 5100)
    prefill.observe(100, 100, 0.4 * before[0])
    assert not prefill.is_doubted and prefill.spread == 0.2
    assert prefill.seconds(100, 200) == pytest.approx(0.4 * before[0], rel=1e-3)
    assert prefill.seconds(5000, 5100) == pytest.approx(0.4 * before[1], rel=0.02)
    prefill.observe(100, 200, 0.6 * 2 * before[0])
    assert prefill.seconds(100, 300) == pytest.approx((0.4 + 0.6) * before[0], rel=0.1)


def test_noise_of_a_quarter_is_believed_to_be_noise() -> None:
    """And passes over few tokens, which take longer for each, do not blow up what was believed."""
    rng, prefill = random.Random(5), Prefill()
    for _ in range(400):
        prefill.observe(0, 100, math.exp(rng.gauss(0.0, 0.25)))
        if prefill.observations > 20:
            assert 0.75 < prefill.seconds(0, 100) < 1.4
    for _ in range(4):
        for _ in range(10):
            prefill.observe(0, 4, 0.3)
        for _ in range(2):
            prefill.observe(0, 100, 1.0)
    assert 0.8 < prefill.seconds(0, 100) < 1.6


@pytest.mark.parametrize(
    ("tokens", "seconds", "is_believed"),
    [(100, 100.0, False), (51, 51.0, False), (50, 50.0, False), (49, 49.0, True), (1, 10.0, True), (100, 300.0, False)],
)
def test_one_quick_pass_is_none(tokens: int, seconds: float, is_believed: bool) -> None:
    """As many tokens at the usual time between them: nobody knows what that was. Of few tokens each takes longer."""
    prefill = Prefill()
    prefill.set(1.0, 0.0)
    prefill.observe(0, 100, 10.0)
    prefill.observe(0, tokens, seconds)
    assert prefill.is_doubted == is_believed
    prefill.observe(0, 100, 10.0)
    assert (prefill.base_s < 0.2) == is_believed


def test_half_the_time_is_not_far_quicker() -> None:
    prefill = Prefill()
    for _ in range(4):
        prefill.observe(0, 100, 10.0)
    prefill.observe(0, 100, 5.01)
    assert not prefill.is_doubted
    prefill.observe(0, 100, 0.49 * prefill.seconds(0, 100))
    assert prefill.is_doubted


def test_what_is_set_is_a_line_of_three_points() -> None:
    prefill = Prefill()
    prefill.observe(0, 10, 3.0)  # is forgotten
    prefill.set(2e-4, 1e-8)
    assert (prefill.base_s, prefill.slope_s, prefill.observations) == (2e-4, 1e-8, 8)
    prefill.observe(10_000, 5_000, 5_000 * 7e-4)
    weights = np.array([9_750.0] * 3 + [5_000.0])
    x = np.array([1_000.0, 30_000.0, 100_000.0, 12_500.0])
    y = np.append(2e-4 + 1e-8 * x[:3], min(7e-4, 2 * (2e-4 + 1e-8 * x[3])))
    slope, base = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assert (prefill.base_s, prefill.slope_s) == (pytest.approx(base, rel=1e-9), pytest.approx(slope, rel=1e-9))
    for _ in range(10):
        prefill.observe(0, 10, 3e-3)
    prefill.set(1e-4, 0.0)
    assert prefill.observations == 19
