"""A source of loads, step by step: what each arrival and fault makes of its standing, its rest and its probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.offload.rates import (
    FIRST_PROBATION,
    FIRST_REST_S,
    LINK,
    LINK_UP,
    LONGEST_REST_S,
    TIER,
    UNSEEN_S,
    Rates,
    RateSnapshot,
    Source,
    Standing,
)


def source(standing: Standing, log_spread: float = 0.25) -> Source:
    """One second a byte, and a band of a factor e."""
    made = Source()
    made.pace.set(1.0, log_spread)
    made.standing = standing
    return made


@pytest.mark.parametrize(("took_s", "standing"), [(math.e, Standing.TRUSTED), (2.719, Standing.PROBATION)])
def test_just_on_the_band_is_in_time(took_s: float, standing: Standing) -> None:
    one = source(Standing.TRUSTED)
    one.arrived(1000, 1000 * took_s, 0.0)
    assert one.standing is standing


@pytest.mark.parametrize(("took_s", "standing"), [(0.0158, Standing.TRUSTED), (0.0160, Standing.PROBATION)])
def test_a_small_load_may_wait_for_a_thread_to_wake_up(took_s: float, standing: Standing) -> None:
    one = Source()
    one.pace.set(0.001, 0.25)
    one.standing = Standing.TRUSTED
    one.arrived(4, took_s, 0.0)  # expected in 4 ms, within the band in 10.9
    assert one.standing is standing


@pytest.mark.parametrize(("standing", "log"), [(Standing.RESTING, -0.2), (Standing.PROBATION, -0.04)])
def test_a_probe_behind_a_rest_counts_for_more(standing: Standing, log: float) -> None:
    one = source(standing)
    one.arrived(1000, 1000 * math.exp(-0.4), 10.0)
    assert one.pace.s_per_byte == pytest.approx(math.exp(log))


@pytest.mark.parametrize(
    ("now_s", "standing"),
    [(100.5, Standing.RESTING), (101.0, Standing.PROBATION), (150.0, Standing.PROBATION)],
)
def test_what_arrives_in_a_rest_was_under_way_before(now_s: float, standing: Standing) -> None:
    one = source(Standing.TRUSTED)
    one.fault(100.0)
    one.arrived(1000, 1000.0, now_s)
    assert one.standing is standing


@pytest.mark.parametrize(("now_s", "until_s"), [(100.5, 101.0), (101.0, 103.0), (150.0, 152.0)])
def test_what_fails_in_a_rest_was_under_way_before(now_s: float, until_s: float) -> None:
    one = source(Standing.TRUSTED)
    one.fault(100.0)
    one.fault(now_s)
    assert (one.standing, one._until_s) == (Standing.RESTING, until_s)


def test_faults_are_forgotten_one_by_one() -> None:
    one = source(Standing.TRUSTED)
    one.fault(0.0)
    one.fault(1.0)
    assert (one._probation, one._rest_s) == (4 * FIRST_PROBATION, 4 * FIRST_REST_S)
    one.arrived(1000, 1000.0, 10.0)  # of a probe
    seen = []
    for _ in range(12 + 4 * 12 + 4 * 6 + 4 * 3):
        one.arrived(1000, 1000.0, 10.0)
        seen.append((one.standing is Standing.TRUSTED, one._probation, one._rest_s))
    expected = [(False, 12, 4.0)] * 11 + [(True, 12, 4.0)] * 48 + [(True, 6, 2.0)] * 24 + [(True, 3, 1.0)] * 13
    assert seen == expected


def test_when_a_probe_is_due() -> None:
    new = Source()
    assert new.probe_due(0.0)
    new.begin_probe(0.0)
    assert new.probe_due(LONGEST_REST_S - 0.001) is False and new.probe_due(LONGEST_REST_S)
    used = source(Standing.TRUSTED)
    assert used.probe_due(5.0)  # nobody has ever seen it in time
    used.arrived(1000, 1000.0, 5.0)
    assert not used.probe_due(5.0 + UNSEEN_S - 0.001) and used.probe_due(5.0 + UNSEEN_S)


# ---- all of them ----
@pytest.fixture
def rates() -> Rates:
    return Rates(1000, 16, clock=lambda: 100.0)


def test_the_smallest_blocks() -> None:
    rates = Rates(1, 1)
    rates.observe_load(LINK, 2, 4.0)
    assert rates.load_s(3) == pytest.approx(6.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates.observe_load(TIER, 10, 1.0),
        lambda rates: rates.observe_save(10, 1.0),
        lambda rates: rates.observe_late(TIER, 10, 1.0),
        lambda rates: rates.observe_failed(TIER),
        lambda rates: rates.observe_prefill(0, 10, 1.0),
        lambda rates: rates.set_load(TIER, 1e6),
        lambda rates: rates.set_prefill(1e-4),
    ],
)
def test_a_snapshot_is_of_what_is_known_now(rates: Rates, change: Callable[[Rates], None]) -> None:
    before = rates.snapshot()
    assert rates.snapshot() is before
    change(rates)
    assert rates.snapshot() is not before


def test_a_link_that_has_failed_is_not_used(rates: Rates) -> None:
    rates.observe_load(LINK, 1000, 0.5)
    assert rates.snapshot().link_s == pytest.approx(0.5)
    rates.observe_failed(LINK)
    assert rates.snapshot().link_s == math.inf


def test_figures_for_metrics(rates: Rates) -> None:
    rates.set_load(LINK, 2e6, spread=0.07)
    rates.observe_save(1000, 0.001)
    for _ in range(2):
        rates.observe_late(TIER, 1000, 1.0)
    for _ in range(3):
        rates.observe_failed(TIER)
    assert rates.take_probe(LINK) is True and rates.take_probe(LINK) is False
    rates.set_prefill(2e-4, 1e-9)
    assert rates.stats() == pytest.approx(
        {
            f"{LINK}_bytes_per_s": 2e6,
            f"{LINK}_spread": 0.07,
            f"{LINK}_late_loads": 0,
            f"{LINK}_failed_loads": 0,
            f"{LINK}_probes": 1,
            f"{LINK}_trusted": True,
            f"{LINK_UP}_bytes_per_s": 1e6,
            f"{LINK_UP}_spread": 0.2,
            f"{LINK_UP}_late_loads": 0,
            f"{LINK_UP}_failed_loads": 0,
            f"{LINK_UP}_probes": 0,
            f"{LINK_UP}_trusted": False,
            f"{TIER}_bytes_per_s": 500.0,
            f"{TIER}_spread": 0.2,
            f"{TIER}_late_loads": 2,
            f"{TIER}_failed_loads": 3,
            f"{TIER}_probes": 0,
            f"{TIER}_trusted": False,
            "prefill_tokens_per_s": 5000.0,
            "prefill_s_per_token_and_position": 1e-9,
            "prefill_spread": 0.2,
        }
    )


@pytest.mark.parametrize("wrong", [True, "1", None, 1j])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_bytes", lambda rates, wrong: rates.observe_load(LINK, wrong, 1.0)),
        ("num_bytes", lambda rates, wrong: rates.observe_save(wrong, 1.0)),
        ("num_bytes", lambda rates, wrong: rates.observe_late(LINK, wrong, 1.0)),
        ("seconds", lambda rates, wrong: rates.observe_prefill(0, 10, wrong)),
    ],
)
def test_what_is_no_number_is_named(rates: Rates, name: str, call: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*; a number is expected$"):
        call(rates, wrong)


def test_what_is_taken_where_nothing_is_said(rates: Rates) -> None:
    rates.set_load(TIER, 1e6)
    assert rates.stats()[f"{TIER}_spread"] == 0.05
    rates.set_prefill(1e-4)
    assert rates.compute_s(1000, 1001) == pytest.approx(16e-4)
    snapshot = RateSnapshot(1.0, 1.0, None, 0.0, 16)
    assert snapshot.link_waits and snapshot.tier_waits
    assert rates.late_s(0, TIER) == 0.005  # of threads that have to wake up


def test_what_is_set_by_hand_in_a_rest_ends_it(rates: Rates) -> None:
    rates.observe_failed(TIER)
    rates.set_load(TIER, 1e6)
    assert rates.standing(TIER) is Standing.TRUSTED
    rates.observe_failed(TIER)  # of what was loaded since
    assert rates.standing(TIER) is Standing.RESTING
