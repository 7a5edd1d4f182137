from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.offload.figures import Pace, Prefill
from paddle_kv.offload.rates import FIRST_PROBATION, FIRST_REST_S, LATE_S, LONGEST_REST_S, UNSEEN_S, Rates, Standing


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rates(clock: Clock) -> Rates:
    return Rates(1000, 16, clock)


def load(rates: Rates, times: int = 1, bytes_per_s: float = 1e6, name: str = "tier") -> None:
    for _ in range(times):
        rates.observe_load(name, 1000, 1000 / bytes_per_s)


def test_nothing_is_known_at_first(rates: Rates) -> None:
    found = rates.snapshot()
    assert (found.link_s, found.tier_s, found.base_s) == (math.inf, math.inf, None)
    assert rates.load_s(3) is None and rates.compute_s(0, 3) is None and rates.late_s(3) == math.inf
    assert not found.link_waits and not found.tier_waits
    assert found.prefill_s(0, 5) == math.inf
    assert not any(value for name, value in rates.stats().items())


def test_a_pace_follows_noise_around_what_is_true() -> None:
    rng, pace = random.Random(1), Pace()
    for _ in range(300):
        pace.observe(2e-9 * rng.lognormvariate(0, 0.1))
    assert pace.s_per_byte == pytest.approx(2e-9, rel=0.1)
    assert 0.05 < pace.spread < 0.12


def test_bad_news_is_learned_at_once_and_good_news_slowly() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(1e-9)
    pace.observe(1e-8)
    bad = pace.s_per_byte
    assert bad == pytest.approx(math.sqrt(10) * 1e-9, rel=0.05)
    for _ in range(50):
        pace.observe(1e-8)
    pace.observe(1e-9)
    assert pace.s_per_byte == pytest.approx(1e-8 * 0.87, rel=0.05)
    for _ in range(60):
        pace.observe(1e-9)
    assert pace.s_per_byte == pytest.approx(1e-9, rel=0.2)  # but it is learned


def test_a_stall_does_not_end_all_averages() -> None:
    pace = Pace()
    for _ in range(50):
        pace.observe(1e-9)
    pace.observe(1e-6)
    for _ in range(60):
        pace.observe(1e-9)
    assert pace.s_per_byte == pytest.approx(1e-9, rel=0.3)


def test_prefill_grows_with_the_position() -> None:
    rng, prefill = random.Random(2), Prefill()
    for _ in range(400):
        start, count = rng.randrange(0, 100_000), rng.randint(100, 4000)
        true_s = count * (2e-5 + 3e-10 * (start + count / 2))
        prefill.observe(start, count, true_s * rng.lognormvariate(0, 0.05))
    assert prefill.base_s is not None
    for start, stop in ((0, 2000), (40_000, 60_000), (0, 120_000)):
        true_s = (stop - start) * (2e-5 + 1.5e-10 * (start + stop))
        assert prefill.seconds(start, stop) == pytest.approx(true_s, rel=0.05)
    assert 0.02 < prefill.spread < 0.1


def test_prefill_at_one_place_has_no_slope_and_parts_are_never_negative() -> None:
    prefill = Prefill()
    for _ in range(5):
        prefill.observe(1000, 100, 0.01)
    assert prefill.slope_s == 0 and prefill.base_s == pytest.approx(1e-4)
    for start in range(0, 50_000, 1000):
        prefill.observe(start, 100, 0.02 - start * 1e-7)
    assert prefill.slope_s == 0
    steep = Prefill()
    for start in (0, 10_000, 20_000):
        steep.observe(start, 100, 1e-9 * (1 + start) * 100)
    assert steep.base_s is not None and steep.base_s > 0


def test_a_pause_of_the_process_is_not_the_model(rates: Rates) -> None:
    for start in range(0, 50_000, 1000):
        rates.observe_prefill(start, 1000, 0.01)
    rates.observe_prefill(0, 1000, 10.0)
    assert rates.compute_s(0, 1000) == pytest.approx(0.16, rel=0.1)
    for _ in range(200):  # what lasts is
        rates.observe_prefill(0, 1000, 0.04)
        rates.observe_prefill(30_000, 1000, 0.04)
    assert rates.compute_s(0, 1000) == pytest.approx(0.64, rel=0.1)


def test_passes_that_began_meanwhile_share_the_time(rates: Rates) -> None:
    first = rates.begin_pass(100, 1.0, waits=False)
    assert rates.share_of(first, 100, 1.0) == 1.0
    second = rates.begin_pass(300, 2.0, waits=False)
    assert (rates.share_of(first, 100, 2.0), rates.share_of(second, 300, 1.0)) == (0.25, 1.0)
    rates.begin_pass(100, 3.0, waits=True)
    assert [rates.share_of(*one) for one in ((first, 100, 3.0), (second, 300, 2.0))] == [None, None]
    last = rates.begin_pass(100, 4.0, waits=False)
    assert rates.share_of(last, 100, 1.0) == 1.0


def test_passes_of_several_threads_may_be_noted_in_another_order_than_they_began(rates: Rates) -> None:
    rates.begin_pass(300, 1.0 + 1e-6, waits=True)  # began later, and was first
    own = rates.begin_pass(100, 1.0, waits=False)
    assert rates.share_of(own, 100, 1e-6) is None
    assert rates.share_of(own, 100, 2.0) is None
    own = rates.begin_pass(100, 5.0, waits=False)
    rates.begin_pass(100, 6.0, waits=True)
    assert rates.share_of(own, 100, 1.0) == 1.0


@pytest.mark.parametrize("num", [2, 4, 8])
def test_passes_that_began_together_share_the_time_whoever_is_asked_last(rates: Rates, num: int) -> None:
    """Also of the last ones of prompts that end with it, behind which no other pass begins."""
    rates.begin_pass(500, 1.0, waits=True)
    begun = [rates.begin_pass(100, 2.0 + 0.001 * number, waits=False) for number in range(num)]
    assert [rates.share_of(one, 100, 1.0) for one in begun] == [1 / num] * num
    shares = []
    for number, one in enumerate(begun):  # and go on with the next one, which that pass did not have
        shares.append(rates.share_of(one, 100, 0.98 - 0.001 * number))
        rates.begin_pass(100, 2.98 + 0.001 * number, waits=number == 0)
    assert shares == [1 / num] * num
    rates.begin_pass(100, 9.0, waits=True)
    beside = rates.begin_pass(100, 9.01, waits=False)
    assert rates.share_of(beside, 100, 1.0) is None  # the other one had to wait
    for number in range(300):  # as many as are remembered do no harm
        last = rates.begin_pass(100, 19.0 + number, waits=False)
    assert rates.share_of(last, 100, 1.0) == 1.0


def test_a_pass_that_shared_its_time_with_one_that_was_aborted_says_nothing(rates: Rates) -> None:
    early = rates.begin_pass(100, 0.0, waits=False)
    first = rates.begin_pass(100, 1.0, waits=False)
    aborted = rates.begin_pass(100, 1.05, waits=False)
    own = rates.begin_pass(100, 1.1, waits=False)
    late = rates.begin_pass(100, 3.0, waits=False)
    assert rates.share_of(first, 100, 1.0) == rates.share_of(own, 100, 1.0) == 1 / 3
    rates.abort_pass(aborted)
    assert [rates.share_of(one, 100, 1.0) for one in (first, aborted, own)] == [None] * 3
    assert rates.share_of(early, 100, 1.0) == rates.share_of(late, 100, 1.0) == 1.0  # with which it did not share
    assert rates.share_of(first, 100, 0.05) == 1.0  # it began just then


def test_saves_stand_for_loads_until_one_was_made(rates: Rates) -> None:
    rates.observe_save(1000, 0.5)
    assert rates.load_s(2) == pytest.approx(1.0) and rates.load_s(2, "tier") is None
    found = rates.snapshot()
    assert found.link_s == pytest.approx(0.5) and not found.link_waits
    load(rates, name="onload")
    assert rates.load_s(2) == pytest.approx(0.002)


def test_a_source_is_trusted_when_it_has_kept_its_time(rates: Rates) -> None:
    assert rates.standing("tier") is Standing.NEW and rates.snapshot().tier_s == math.inf
    assert rates.take_probe("tier") and not rates.take_probe("tier")
    load(rates)
    assert rates.standing("tier") is Standing.PROBATION
    assert rates.snapshot().tier_s == pytest.approx(0.001) and not rates.snapshot().tier_waits
    load(rates, FIRST_PROBATION - 1)
    assert not rates.snapshot().tier_waits
    load(rates)
    assert rates.standing("tier") is Standing.TRUSTED and rates.snapshot().tier_waits


def test_one_that_became_far_slower_is_not_awaited_any_more(rates: Rates) -> None:
    load(rates, 20)
    load(rates, 1, bytes_per_s=1e5)  # nobody waited for it
    assert rates.standing("tier") is Standing.PROBATION
    load(rates, FIRST_PROBATION)
    assert rates.standing("tier") is Standing.TRUSTED


@pytest.mark.parametrize("late", [True, False])
def test_a_fault_ends_its_use_until_a_probe_was_in_time(rates: Rates, clock: Clock, late: bool) -> None:
    load(rates, 10)

    def fault() -> None:
        rates.observe_late("tier", 1000, 0.1) if late else rates.observe_failed("tier")

    fault()
    fault()  # was under way: counts as the same one
    assert rates.standing("tier") is Standing.RESTING
    found = rates.snapshot()
    assert found.tier_s == math.inf and not found.tier_waits
    load(rates)  # was under way, too
    assert rates.standing("tier") is Standing.RESTING
    clock.now_s += FIRST_REST_S * 0.9
    assert not rates.take_probe("tier")
    clock.now_s += FIRST_REST_S * 0.2
    assert rates.take_probe("tier") and not rates.take_probe("tier")
    fault()
    clock.now_s += FIRST_REST_S * 1.1
    assert not rates.take_probe("tier")  # the rest is twice as long
    clock.now_s += FIRST_REST_S
    assert rates.take_probe("tier")
    load(rates)
    assert rates.standing("tier") is Standing.PROBATION
    load(rates, 4 * FIRST_PROBATION - 1)
    assert rates.standing("tier") is Standing.PROBATION  # four times as long after two faults
    load(rates)
    assert rates.standing("tier") is Standing.TRUSTED


def test_a_late_load_tells_a_bound(rates: Rates) -> None:
    load(rates, 10)
    rates.observe_late("tier", 1000, 0.1)
    assert rates.load_s(1, "tier") == pytest.approx(0.2)
    rates.observe_late("tier", 1000, 0.01)
    assert rates.load_s(1, "tier") == pytest.approx(0.2)


def test_faults_are_forgotten_when_it_works_for_long(rates: Rates, clock: Clock) -> None:
    for _ in range(3):
        load(rates, 100)
        rates.observe_failed("tier")
        clock.now_s += LONGEST_REST_S
        assert rates.take_probe("tier")
    load(rates, 2000)
    rates.observe_failed("tier")
    clock.now_s += FIRST_REST_S * 1.01
    assert rates.take_probe("tier")


def test_the_cost_of_a_source_that_never_works_is_bounded(rates: Rates, clock: Clock) -> None:
    load(rates, 10)
    probes = 0
    for _ in range(36_000):
        rates.observe_failed("tier") if rates.take_probe("tier") else None
        if rates.standing("tier") is Standing.TRUSTED:
            rates.observe_failed("tier")
        clock.now_s += 0.1
    probes = int(rates.stats()["tier_probes"])
    assert 3600 / LONGEST_REST_S <= probes <= 3600 / LONGEST_REST_S + 10


def test_a_probe_that_never_ends_is_followed_by_another(rates: Rates, clock: Clock) -> None:
    assert rates.take_probe("tier")
    clock.now_s += LONGEST_REST_S * 0.9
    assert not rates.take_probe("tier")
    clock.now_s += LONGEST_REST_S * 0.2
    assert rates.take_probe("tier")


def test_what_nobody_uses_is_probed_now_and_then(rates: Rates, clock: Clock) -> None:
    load(rates, 10)
    assert not rates.take_probe("tier")
    clock.now_s += UNSEEN_S * 1.1
    assert rates.take_probe("tier") and not rates.take_probe("tier")
    load(rates)
    assert not rates.take_probe("tier")
    clock.now_s += UNSEEN_S * 1.1
    assert rates.take_probe("tier")


@pytest.mark.parametrize("why", ["new", "on probation", "resting", "probe", "unseen"])
def test_a_load_beside_others_counts_where_nothing_better_is_known(rates: Rates, clock: Clock, why: str) -> None:
    if why != "new":
        load(rates, 1 if why == "on probation" else 10)
    if why == "resting":
        rates.observe_failed("tier")
        clock.now_s += FIRST_REST_S * 1.1
        assert rates.take_probe("tier")
    if why in ("probe", "unseen"):
        clock.now_s += UNSEEN_S * 1.1
        assert why == "unseen" or rates.take_probe("tier")
    before = rates.stats()["tier_bytes_per_s"]
    rates.observe_load("tier", 1_000_000, 1.3, shared=True)
    assert rates.stats()["tier_bytes_per_s"] != before
    assert not rates.take_probe("tier")  # it has told
    if why == "resting":
        assert rates.standing("tier") is Standing.PROBATION


def test_else_it_says_nothing(rates: Rates, clock: Clock) -> None:
    load(rates, 10)
    known = rates.stats()
    rates.observe_load("tier", 1_000_000, 1.3, shared=True)
    rates.observe_load("tier", 1_000_000, 50.0, shared=True)
    assert rates.stats() == known
    rates.observe_load("tier", 1_000_000, 1.3)
    assert rates.stats() != known


def test_a_deadline_follows_estimate_and_spread(rates: Rates) -> None:
    rates.set_load("tier", 1e6, spread=0.01)
    assert rates.late_s(100, "tier") == pytest.approx(0.1 * 1.5 + LATE_S)
    rates.set_load("tier", 1e6, spread=0.25)
    assert rates.late_s(100, "tier") == pytest.approx(0.1 * math.exp(1) + LATE_S)
    assert rates.snapshot().tier_late == pytest.approx(math.exp(1))
    assert rates.late_s(100, "tier", 0.3) == pytest.approx(0.4 * math.exp(1) + LATE_S)


def test_stalls_make_no_deadline_longer_than_four_times_what_is_expected(rates: Rates) -> None:
    """Else whoever waits for a source that stalls now and then would wait for a stall."""
    for _ in range(20):
        rates.observe_load("tier", 1_000_000, 1.0)
        rates.observe_load("tier", 1_000_000, 0.004)
    expected_s = rates.load_s(4, "tier")
    assert expected_s is not None
    assert rates.late_s(4, "tier") == pytest.approx(4 * expected_s + LATE_S)


def test_rates_set_by_hand(rates: Rates) -> None:
    rates.set_load("onload", 2e6)
    rates.set_prefill(1e-4, 1e-9)
    found = rates.snapshot()
    assert found.link_s == pytest.approx(5e-4) and found.link_waits
    assert found.prefill_s(0, 1000) == pytest.approx(0.1 + 5e-4)
    assert rates.compute_s(1, 3) == pytest.approx(found.prefill_s(16, 48))
    rates.observe_prefill(0, 10_000, 1.5)
    assert 1e-4 < rates.snapshot().base_s < 1.5e-4  # type: ignore[operator]
    assert rates.stats()["onload_bytes_per_s"] == pytest.approx(2e6)


@pytest.mark.parametrize(
    "call",
    [
        lambda rates: rates.observe_load("onload", 0, 1.0),
        lambda rates: rates.observe_load("onload", 1, 0.0),
        lambda rates: rates.observe_save(1, math.nan),
        lambda rates: rates.observe_late("tier", 1, -1.0),
        lambda rates: rates.observe_prefill(-1, 5, 1.0),
        lambda rates: rates.observe_prefill(0, 0, 1.0),
        lambda rates: rates.set_load("tier", math.inf),
        lambda rates: rates.set_load("tier", 1e-320),
        lambda rates: rates.set_load("tier", 1e6, spread=1e31),
        lambda rates: rates.set_prefill(0.0),
        lambda rates: rates.set_prefill(1e-4, math.nan),
        lambda rates: rates.set_prefill(5e-324),
        lambda rates: rates.load_s(-1),
        lambda rates: rates.load_s(2**63),
        lambda rates: rates.late_s(-1),
        lambda rates: rates.compute_s(-1, 3),
        lambda rates: rates.compute_s(3, 2),
        lambda rates: Rates(0, 16),
        lambda rates: Rates(1000, -1),
    ],
)
def test_what_is_no_rate_is_refused(rates: Rates, call: Callable[[Rates], object]) -> None:
    before = rates.stats()
    with pytest.raises(ValueError, match=r" = .* must be "):
        call(rates)
    assert rates.stats() == before


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_blocks", lambda rates, value: rates.load_s(value)),
        ("num_blocks", lambda rates, value: rates.late_s(value)),
        ("start_block", lambda rates, value: rates.compute_s(value, 3)),
        ("stop_block", lambda rates, value: rates.compute_s(0, value)),
        ("start_token", lambda rates, value: rates.observe_prefill(value, 3, 1.0)),
    ],
)
@pytest.mark.parametrize("value", [None, "3", 2.5, True])
@pytest.mark.parametrize("known", [False, True])
def test_what_counts_nothing_is_refused(rates: Rates, name: str, call: Any, value: Any, known: bool) -> None:
    if known:
        rates.set_load("onload", 1e6)
        rates.set_prefill(1e-4)
    with pytest.raises(TypeError, match=rf"^{name} is {value!r}; an integer is expected"):
        call(rates, value)


@pytest.mark.parametrize(
    "call",
    [
        lambda rates, name: rates.observe_load(name, 1, 1.0),
        lambda rates, name: rates.observe_late(name, 1, 1.0),
        lambda rates, name: rates.observe_failed(name),
        lambda rates, name: rates.set_load(name, 1e6),
        lambda rates, name: rates.load_s(3, name),
        lambda rates, name: rates.late_s(3, name),
        lambda rates, name: rates.standing(name),
        lambda rates, name: rates.take_probe(name),
    ],
)
@pytest.mark.parametrize("name", ["disk", "", None, ["tier"]])
def test_a_source_that_there_is_not_is_named_with_those_that_there_are(rates: Rates, call: Any, name: Any) -> None:
    before = rates.stats()
    with pytest.raises(
        ValueError, match=rf"^name = {re.escape(repr(name))} must be one of 'onload', 'offload', 'tier'"
    ):
        call(rates, name)
    assert rates.stats() == before


def test_the_slowest_and_the_quickest_that_can_be_set_stay_numbers(rates: Rates) -> None:
    for bytes_per_s, base_s in ((1e-30, 1e30), (1e30, 1e-30)):
        for name in ("onload", "offload", "tier"):
            rates.set_load(name, bytes_per_s)
        rates.set_prefill(base_s, 1e-30)
        found = rates.snapshot()
        assert 0 < found.link_s < math.inf and 0 < found.tier_s < math.inf
        assert 0 < found.prefill_s(0, 2**20) < math.inf
        assert 0 < (rates.load_s(2**62) or 0.0) < math.inf and rates.late_s(2**62) < math.inf
        rates.observe_load("onload", 1, 1.0)
        rates.observe_prefill(2**62, 1, 1.0)
        assert all(math.isfinite(value) for value in rates.stats().values())
