from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from paddle_kv.offload.decision import Prompt
from paddle_kv.offload.rates import LINK, TIER, RateSnapshot
from paddle_kv.testing.prefixes.meeting import Chunk, Load, Meeting

BLOCK = 16
RATES = RateSnapshot(link_s=0.008, tier_s=0.016, base_s=0.001, slope_s=0.0, block_tokens=BLOCK)  # a block: 16 ms
DISTRUST = RateSnapshot(0.008, 0.016, 0.001, 0.0, BLOCK, link_waits=False, tier_waits=False)


def meeting_of(host: int, tier: int = 0, end: int = 5, chunk_tokens: int = 64, piece_blocks: int = 2) -> Meeting:
    found = host + tier
    prompt = Prompt((0, host), (host, found), found * BLOCK, found * BLOCK + end)
    return Meeting(prompt, block_tokens=BLOCK, chunk_tokens=chunk_tokens, num_layers=4, piece_blocks=piece_blocks)


def chunk_of(meeting: Meeting, rates: RateSnapshot = RATES, now_s: float = 0.0) -> Chunk:
    found = meeting.next_chunk(now_s, rates)
    assert found is not None
    return found


def load_of(meeting: Meeting, place: str = LINK, now_s: float = 0.0, pass_s: float = 9.0, due_s: float = 0.0) -> Load:
    found = meeting.next_load(place, now_s, pass_s, RATES)
    assert found is not None
    found.due_s, found.late_s = due_s, due_s + 1
    return found


def test_loads_come_from_the_back_and_chunks_from_the_front_until_they_meet() -> None:
    meeting = meeting_of(12)
    assert meeting.plan(RATES).host_first == 4
    first = chunk_of(meeting)
    assert (first.start_token, first.stop_token, first.awaits) == (0, 64, ())
    loads = []
    while (load := meeting.next_load(LINK, 0.0, 9.0, RATES)) is not None:
        loads.append(load)
    assert [(one.start, one.stop) for one in loads] == [(4, 12)]  # there as soon as a chunk more were computed
    assert meeting.met and not meeting.done
    for load in loads:
        meeting.load_done(load)
    end = chunk_of(meeting)
    assert (end.start_token, end.stop_token, end.awaits, end.last) == (192, 197, (), True)
    assert meeting.done and meeting.next_chunk(0.0, RATES) is None and meeting.num_computed == 4


def test_a_chunk_of_less_than_a_block_is_one_block() -> None:
    meeting = meeting_of(4, chunk_tokens=8)
    meeting.load_from(0, 0)
    assert next_of(meeting) == (2, 4, False)


def next_of(meeting: Meeting, rates: RateSnapshot = RATES) -> tuple[int, int, bool] | None:
    load = meeting.next_load(LINK, 0.0, 9.0, rates)
    return load and (load.start, load.stop, load.layerwise)


def test_what_is_left_comes_as_one_as_soon_as_nothing_of_it_is_worth_computing_meanwhile() -> None:
    meeting = meeting_of(7, end=65)  # a pass of 64 ms, as long as the first chunk takes
    meeting.load_from(0, 0)
    rates = replace(RATES, link_s=0.02)
    assert [next_of(meeting, rates) for _ in range(3)] == [(5, 7, False), (0, 5, True), None]


@pytest.mark.parametrize("why", ["computed", "lost", "slow tier", "distrust", "distrust of the tier"])
def test_it_comes_piece_by_piece_where_something_else_is_left(why: str) -> None:
    meeting = meeting_of(6, tier=8 * ("tier" in why), end=65)
    meeting.load_from(1 * (why == "computed"), 0)
    if why == "lost":
        meeting.load_lost(meeting.probe(LINK))
    rates = DISTRUST if why == "distrust" else RATES
    if "tier" in why:
        rates = replace(RATES, link_s=0.005, tier_s=0.011, tier_waits=why == "slow tier")
    stop = 5 if why == "lost" else 6
    assert next_of(meeting, rates) == (stop - 2, stop, False)
    if why == "slow tier":
        loads = [meeting.next_load(TIER, 0.0, 9.0, rates) for _ in range(2)]
        assert [(one.start, one.stop, one.layerwise) for one in loads if one] == [(12, 14, False), (6, 12, True)]
        assert next_of(meeting, rates) == (0, 4, True)


@pytest.mark.parametrize(("tier_s", "start"), [(0.0213, 0), (0.0215, 6)])
def test_what_is_left_in_a_tier_comes_as_one_where_no_pass_were_left_behind_a_piece(tier_s: float, start: int) -> None:
    meeting = meeting_of(0, tier=8, end=65)  # a pass of 128 ms
    meeting.load_from(0, 0)
    load = meeting.next_load(TIER, 0.0, 9.0, replace(RATES, tier_s=tier_s, base_s=0.002, slope_s=0.0))
    assert load is not None and (load.start, load.layerwise) == (start, start == 0)


def test_beside_others_a_tier_is_asked_piece_by_piece() -> None:
    meeting = meeting_of(0, tier=8, end=65)
    meeting.load_from(0, 0)
    load = meeting.next_load(TIER, 0.0, 9.0, replace(RATES, tier_s=0.01), alone=False)
    assert load is not None and (load.start, load.layerwise) == (6, False)


def test_a_slow_load_moves_the_place_where_they_meet() -> None:
    meeting = meeting_of(20)
    meeting.plan(RATES)
    chunk_of(meeting)
    load = load_of(meeting, due_s=9.0)
    meeting.plan(RATES, link_wait_s=9.0)  # the link is not what it was
    again = chunk_of(meeting)
    assert (again.start, again.stop) == (4, 8)
    assert [(chunk_of(meeting).start, load.cancelled) for _ in range(3)] == [(8, False), (12, False), (16, False)]
    last = chunk_of(meeting)  # it comes to what is on its way, and does not wait so long
    assert load.cancelled and (last.start, last.stop, last.last) == (18, 20, True)
    assert meeting.num_computed == 20
    meeting.load_done(load)  # too late
    assert meeting.num_computed == 20


def test_what_is_nearly_there_is_awaited_if_its_source_is_trusted() -> None:
    for rates, awaited in ((RATES, True), (DISTRUST, False)):
        meeting = meeting_of(4)
        meeting.load_from(0, 0)
        load = load_of(meeting, pass_s=0.0, due_s=0.03)
        assert load.layerwise and (load.start, load.stop) == (0, 4)
        chunk = chunk_of(meeting, rates)
        assert chunk.awaits == ((load,) if awaited else ()) and load.cancelled != awaited
        assert (chunk.start_token, chunk.stop_token) == ((64, 69) if awaited else (0, 64))


def test_what_is_late_is_not_awaited() -> None:
    meeting = meeting_of(4)
    meeting.load_from(0, 0)
    load = load_of(meeting, pass_s=0.0, due_s=0.03)
    assert meeting.late(1.02) == [] and meeting.late(1.03) == [load]
    assert chunk_of(meeting, now_s=1.03).start_token == 0 and load.cancelled


def test_a_load_that_fails_while_it_is_awaited_costs_the_chunk() -> None:
    meeting = meeting_of(6, end=40)
    meeting.load_from(2, 6)
    load = load_of(meeting, pass_s=0.0, due_s=0.01)
    assert (load.start, load.stop) == (2, 6)
    front = chunk_of(meeting)
    assert (front.start_token, front.stop_token) == (0, 32)
    end = chunk_of(meeting, now_s=0.05)
    assert end.awaits == (load,) and (end.start_token, end.stop_token, end.last) == (96, 136, True)
    assert meeting.done
    meeting.load_lost(load)
    meeting.chunk_failed(end)
    again = chunk_of(meeting, now_s=1.0)
    assert (again.start_token, again.stop_token, again.last) == (32, 96, False)
    last = chunk_of(meeting, now_s=1.0)
    assert (last.start_token, last.stop_token, last.last) == (96, 136, True)


def test_the_last_load_is_layer_by_layer_where_the_model_is_about_to_need_it() -> None:
    meeting = meeting_of(20)
    meeting.load_from(0, 0)
    piece = load_of(meeting, now_s=0.0, pass_s=0.1)
    assert not piece.layerwise and (piece.start, piece.stop) == (18, 20)
    rest = load_of(meeting, now_s=0.07, pass_s=0.1)  # 18 blocks, a fourth of 144 ms until the first layer
    assert rest.layerwise and (rest.start, rest.stop) == (0, 18)
    slow = meeting_of(20)
    slow.load_from(0, 0)
    piece = slow.next_load(LINK, 0.07, 0.1, DISTRUST)  # type: ignore[assignment]
    assert not piece.layerwise and piece.stop - piece.start == 2


def test_both_places_are_loaded_from_their_backs() -> None:
    meeting = meeting_of(4, 8)
    found = meeting.plan(RATES)
    assert found.choice == "meet" and found.host_first <= 1 and 6 <= found.tier_first <= 10
    of_tier, of_host = load_of(meeting, TIER), load_of(meeting, LINK)
    assert (of_tier.stop, of_host.stop) == (12, 4)
    meeting.load_done(of_host)


def test_a_probe_is_taken_from_the_back_whatever_was_decided() -> None:
    meeting = meeting_of(0, 3)
    meeting.load_from(3, 3)
    assert meeting.next_load(TIER, 0.0, 9.0, RATES) is None
    assert meeting.can_probe(TIER) and not meeting.can_probe(LINK)
    probe = meeting.probe(TIER)
    assert (probe.start, probe.stop) == (2, 3)
    assert (chunk_of(meeting).start, chunk_of(meeting).stop) == (0, 3) or probe.cancelled
    assert probe.cancelled  # nobody waits


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_each_token_is_there_once(seed: int) -> None:
    """Random loads, failures, plans and distrust: in the end each block is either loaded or computed behind all before
    it, and no pass reads what is not there."""
    rng = random.Random(seed)
    host, tier, end = rng.randint(0, 12), rng.randint(0, 12), rng.randint(1, 200)
    meeting = meeting_of(host, tier, end, rng.choice([16, 40, 64]), rng.randint(1, 3))
    there = [False] * ((host + tier) * BLOCK + end)  # tokens
    under_way: list[Load] = []
    now_s, passes = 0.0, 0
    while not (meeting.done and all(there)):
        passes += 1
        assert passes < 500
        now_s += rng.random() * 0.05
        rates = rng.choice([RATES, DISTRUST])
        meeting.plan(rates, link_wait_s=rng.choice([0.0, 0.05]), tier_wait_s=rng.choice([0.0, 0.05]))
        for place in (LINK, TIER):
            if (load := meeting.next_load(place, now_s, now_s + rng.choice([0.0, 0.1]), rates)) is not None:
                load.due_s, load.late_s = now_s + rng.random() * 0.1, now_s + 0.2 + rng.random() * 0.1
                under_way.append(load)
        for load in [one for one in under_way if rng.random() < 0.5]:
            under_way.remove(load)
            if load.cancelled:
                continue
            if rng.random() < 0.3:
                meeting.load_lost(load)
            else:
                meeting.load_done(load)
                there[load.start * BLOCK : load.stop * BLOCK] = [True] * ((load.stop - load.start) * BLOCK)
        chunk = meeting.next_chunk(now_s, rates)
        assert chunk is not None
        failed = False
        for load in chunk.awaits:
            under_way.remove(load)
            if rng.random() < 0.3:
                meeting.load_lost(load)
                failed = True
            else:
                meeting.load_done(load)
                there[load.start * BLOCK : load.stop * BLOCK] = [True] * ((load.stop - load.start) * BLOCK)
        if failed:
            meeting.chunk_failed(chunk)
            continue
        assert all(there[: chunk.start_token]) and not any(there[chunk.start_token : chunk.stop_token])
        there[chunk.start_token : chunk.stop_token] = [True] * (chunk.stop_token - chunk.start_token)
        assert chunk.last == (chunk.stop_token == len(there))
    assert meeting.next_chunk(now_s, RATES) is None and math.isfinite(now_s)


def test_what_comes_before_all_that_is_computed_is_needed_when_the_model_begins() -> None:
    """And layer by layer, if it takes until then: the rest at the end of the prompt."""
    meeting = meeting_of(8, 8)
    meeting.load_from(0, 12)
    assert (meeting.needed_s(LINK, 1.0, 5.0), meeting.needed_s(TIER, 1.0, 5.0)) == (1.0, 5.0)
    load = meeting.next_load(LINK, 1.0, meeting.needed_s(LINK, 1.0, 5.0), RATES)
    assert load is not None and (load.start, load.stop, load.layerwise) == (0, 8, True)
    load.due_s, load.late_s = 1.0, 2.0
    chunk = chunk_of(meeting, now_s=1.0)
    assert (chunk.start, chunk.stop, chunk.awaits) == (8, 12, (load,))
    all_of_it = meeting_of(8, 8)
    all_of_it.load_from(0, 8)
    assert (all_of_it.needed_s(LINK, 1.0, 5.0), all_of_it.needed_s(TIER, 1.0, 5.0)) == (1.0, 1.0)
    piece = load_of(all_of_it, due_s=math.inf)
    all_of_it.load_lost(piece)  # it is computed now
    assert all_of_it.needed_s(TIER, 1.0, 5.0) == 5.0
    partly = meeting_of(8, 8)
    partly.load_from(2, 8)
    assert (partly.needed_s(LINK, 1.0, 5.0), partly.needed_s(TIER, 1.0, 5.0)) == (5.0, 5.0)


def test_a_load_is_awaited_that_is_there_before_others_of_the_same_pass() -> None:
    meeting = meeting_of(8, 2, end=40)
    meeting.load_from(0, 8)
    long = load_of(meeting, pass_s=0.0, due_s=9.0)
    small = load_of(meeting, TIER, pass_s=0.0, due_s=9.0)
    long.late_s = small.late_s = 99.0
    assert not chunk_of(meeting_of(0)).awaits
    meeting._is_worth_waiting = lambda load, now_s, rates, others_s: load is long or others_s == 9.0  # type: ignore
    assert chunk_of(meeting).awaits == (long, small)
    rates = RateSnapshot(0.008, 0.016, 0.001, 0.0, BLOCK)
    of_its_own = meeting_of(0, 2)
    of_its_own.load_from(0, 0)
    alone = of_its_own.next_load(TIER, 0.0, 0.0, rates)
    assert alone is not None
    alone.due_s, alone.late_s = 1.0, 99.0
    assert Meeting._is_worth_waiting(of_its_own, alone, 0.0, rates, 1.0)
    assert not Meeting._is_worth_waiting(of_its_own, alone, 0.0, rates, 0.5)
