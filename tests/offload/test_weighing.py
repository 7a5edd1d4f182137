"""What a found prefix is worth by rates that are given: a block takes ten milliseconds over the link."""

from __future__ import annotations

import math

import pytest

from paddle_kv.offload.decision import Decision, Prompt, decide
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.rates import LINK, TIER, Rates
from paddle_kv.offload.weighing import LEAST_GAIN, TRY_BLOCKS, TRY_S, is_load_sooner, to_bring, weigh

BLOCK_BYTES, BLOCK_TOKENS, LINK_S, TIER_S = 1000, 16, 0.01, 0.02
HOST, BELOW = BlockState.PRESENT, BlockState.TIER


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rates(
    block_s: float | None = 1.0,
    link_s: float | None = LINK_S,
    tier_s: float | None = TIER_S,
    clock: Clock | None = None,
) -> Rates:
    """Seconds a block of computing, of the link and of the tier; None: not known."""
    found = Rates(BLOCK_BYTES, BLOCK_TOKENS, clock or Clock())
    if link_s is not None:
        found.set_load(LINK, BLOCK_BYTES / link_s)
    if tier_s is not None:
        found.set_load(TIER, BLOCK_BYTES / tier_s)
    if block_s is not None:
        found.set_prefill(block_s / BLOCK_TOKENS)
    return found


def weighed(states: list[BlockState], tier_s: float = TIER_S) -> tuple[Decision, int]:
    return weigh(rates(tier_s=tier_s), states, num_tokens=len(states) * 16 + 16, chunk_tokens=16, num_layers=1)


# ---- weigh ----
@pytest.mark.parametrize(
    ("states", "host", "tier"),
    [
        ([HOST, HOST, BELOW, BELOW, BELOW], (0, 2), (2, 5)),
        ([BELOW, BELOW, BELOW, HOST, HOST], (3, 5), (0, 3)),
        ([HOST, BELOW, HOST], (0, 2), (2, 3)),  # they alternate: as if each were together
        ([BELOW, HOST, BELOW], (2, 3), (0, 2)),
        ([HOST, HOST], (0, 2), (2, 2)),
        ([BELOW, BELOW], (2, 2), (0, 2)),
        ([], (0, 0), (0, 0)),
    ],
)
def test_blocks_of_each_kind_count_as_if_they_were_together(
    states: list[BlockState], host: tuple[int, int], tier: tuple[int, int]
) -> None:
    prompt = Prompt(host, tier, 16 * len(states), 16 * len(states) + 16)
    assert weighed(states)[0] == decide(rates().snapshot(), prompt, chunk_tokens=16, num_layers=1)


def test_the_end_of_the_prompt_begins_behind_all_that_was_found() -> None:
    found, _ = weighed([HOST, HOST, BELOW])  # three blocks and an end of one
    assert found.compute_s == pytest.approx(4.0) and found.choice == "load"
    assert (found.host_first, found.tier_first) == (0, 2)
    assert found.load_s == pytest.approx(1.0 + TIER_S + LINK_S)  # of the tier, and over the link
    assert weighed([BELOW, HOST, HOST])[0].load_s == pytest.approx(1.0 + max(TIER_S + LINK_S, 3 * LINK_S))


@pytest.mark.parametrize(
    ("states", "tier_s", "first", "blocks"),
    [
        ([HOST, BELOW] * 3, 0.9, 4, 2),
        ([BELOW, HOST] * 3, 0.5, 1, 2),
        ([BELOW, HOST] * 3, 2.0, 2, 1),
        ([BELOW] * 4, 0.5, 1, 3),
        ([BELOW] * 4, TIER_S, 0, 4),
        ([HOST] * 4 + [BELOW] * 4, 2.0, 7, 1),
        ([HOST, HOST], TIER_S, 2, 0),
        ([], TIER_S, 0, 0),
    ],
)
def test_of_the_tier_the_last_blocks_are_loaded_wherever_they_stand(
    states: list[BlockState], tier_s: float, first: int, blocks: int
) -> None:
    worth, tier_blocks = weighed(states, tier_s)
    assert (worth.tier_first, tier_blocks) == (first, blocks)


# ---- is_load_sooner ----
@pytest.mark.parametrize(
    ("block_s", "sooner"), [(1.0, True), (0.011, True), (0.01, False), (0.009, False), (None, False)]
)
def test_a_load_is_sooner_by_a_part_of_the_time_of_computing(block_s: float | None, sooner: bool) -> None:
    """Ten blocks over the link against ten blocks computed, and an end that is short beside them."""
    known = rates(block_s)
    assert is_load_sooner(known, [HOST] * 10, 161, 1) is sooner


def test_a_gain_of_less_than_a_hundredth_is_no_reason_to_wait() -> None:
    """All is computed in 100 s; of it the end takes 4 s. To load the block takes 95 s, more or less."""
    assert LEAST_GAIN == 0.01
    for link_s, sooner in ((94.9, True), (95.1, False)):
        known = Rates(1, 96, Clock())
        known.set_load(LINK, 1 / link_s)
        known.set_prefill(1.0)
        worth, _ = weigh(known, [HOST], num_tokens=100, chunk_tokens=100, num_layers=1)
        assert worth.compute_s == pytest.approx(100.0) and worth.load_s == pytest.approx(link_s + 4)
        assert is_load_sooner(known, [HOST], 100, 1) is sooner


def failed(known: Rates, clock: Clock) -> Rates:
    """Its link has failed, and rested."""
    known.observe_failed(LINK)
    assert math.isinf(known.snapshot().link_s)
    clock.now_s += 1e6
    return known


@pytest.mark.parametrize(("block_s", "tried"), [(0.025, True), (0.021, True), (0.019, False), (0.005, False)])
def test_a_link_that_failed_is_tried_again_where_it_would_be_twice_as_quick(block_s: float, tried: bool) -> None:
    clock = Clock()
    known = failed(rates(block_s, clock=clock), clock)
    assert is_load_sooner(known, [HOST] * 10, 161, 1) is tried
    assert known.take_probe(LINK) is not tried  # one at a time
    if tried:
        assert is_load_sooner(known, [HOST] * 10, 161, 1) is False


def test_what_tells_nothing_of_a_link_is_no_try() -> None:
    clock = Clock()
    known = failed(rates(clock=clock), clock)
    assert is_load_sooner(known, [], 16, 1) is False
    assert known.take_probe(LINK)  # it is left for another
    no_model = failed(rates(None, clock=clock), clock)
    assert is_load_sooner(no_model, [HOST], 32, 1) is False
    assert no_model.take_probe(LINK)
    no_pace = rates(1.0, None, clock=clock)
    assert is_load_sooner(no_pace, [HOST], 32, 1) is False
    assert no_pace.take_probe(LINK)


def test_a_link_that_works_and_is_not_sooner_is_not_tried() -> None:
    """Twice as quick for a block, and not sooner in all, since the tier's blocks come later."""
    clock = Clock()
    known = rates(1.0, LINK_S, 5.0, clock)
    clock.now_s = 1e6
    due = rates(1.0, LINK_S, 5.0, clock).take_probe(LINK)
    assert is_load_sooner(known, [HOST, BELOW], 33, 1) is False
    assert known.take_probe(LINK) is due


# ---- to_bring ----
def test_nothing_in_the_tier_is_nothing_to_bring() -> None:
    assert to_bring(rates(), []) == (0, 0.0)
    assert to_bring(rates(), [HOST, HOST]) == (0, 0.0)


def test_from_a_tier_that_is_known_all_is_brought_until_it_would_be_late() -> None:
    known = rates()
    assert to_bring(known, [HOST, BELOW, BELOW]) == (3, known.late_s(2, TIER))
    assert 2 * TIER_S < known.late_s(2, TIER) < TRY_S
    assert to_bring(rates(tier_s=100.0), [BELOW] * 3) == (3, TRY_S)


@pytest.mark.parametrize(
    ("num_host", "num_below", "tried"),
    [(0, 1, 1), (0, TRY_BLOCKS, TRY_BLOCKS), (0, 100, TRY_BLOCKS), (5, 100, 5 + TRY_BLOCKS), (5, 3, 8)],
)
def test_of_a_tier_that_is_not_known_a_few_are_tried_once(num_host: int, num_below: int, tried: int) -> None:
    known = rates(tier_s=None)
    states = [HOST] * num_host + [BELOW] * num_below
    assert to_bring(known, states) == (tried, TRY_S)
    assert to_bring(known, states) == (0, TRY_S)  # one probe at a time
