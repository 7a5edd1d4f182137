"""A meeting of loads and computation by itself: copies, reads, time and what the rates say are the test's."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest

from paddle_kv.errors import ClosedError, ForkedError
from paddle_kv.offload import bringing
from paddle_kv.offload.feed import Feed
from paddle_kv.offload.feeding import Meeting
from paddle_kv.offload.pieces import PieceState
from paddle_kv.offload.rates import LATE_S, LINK, TIER
from paddle_kv.offload.waits import Step
from paddle_kv.schedule.movement import State
from tests.offload.meeting_rig import (
    BELOW,
    BLOCK_BYTES,
    BLOCKS,
    HERE,
    Bench,
    Copy,
    states_of,
    wait_as_long_as_computing,
    worth,
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(monkeypatch)


# ---- from the back ----
def test_two_pieces_are_on_the_link_and_the_next_one_follows_each(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    meeting = bench.meeting([HERE] * 4 * BLOCKS)
    bench.fill()
    assert bench.loaded == [[12, 15], [8, 11]]
    assert Feed().free_s == 0.0
    assert [piece.due_s for piece in meeting.moving] == pytest.approx([4.0, 8.0])  # one behind the other
    bench.now_s = 1.0
    bench.fill()
    assert (len(bench.copies), bench.feed.free_s) == (2, pytest.approx(8.0))
    for copy in bench.copies:
        copy.end()
    for tell in bench.copies[0].callbacks:
        assert tell.args[0]() is bench  # type: ignore[attr-defined]
    bench.fill()
    assert states_of(meeting) == ["loading", "loading", "loaded", "loaded"]
    assert [piece.due_s for piece in meeting.moving] == pytest.approx([5.0, 9.0])  # the link has nothing of before
    assert bench.told == []
    assert meeting.under_way == bench.copies[2:]


def test_only_what_is_in_host_memory_is_loaded(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    meeting = bench.meeting([HERE] * 2 * BLOCKS + [BELOW] * 2 * BLOCKS)
    assert [piece.start for piece in meeting._here] == [0, BLOCKS]
    assert [piece.start for piece in meeting._below] == [2 * BLOCKS, 3 * BLOCKS]


def test_a_load_that_is_over_at_once_is_looked_at_soon(bench: Bench) -> None:
    bench.over_at_once = True
    meeting = bench.meeting([HERE] * BLOCKS)
    bench.fill()
    [piece] = meeting.line.pieces
    assert (piece.due_s, piece.late_s) == (0.0, math.inf)  # nothing is known
    assert len(bench.told) == 1
    assert bench.copies[0].callbacks == []


def test_a_load_waits_for_what_stood_before_it_on_the_device_until_that_is_over(bench: Bench) -> None:
    bench.know(0.1, None)
    meeting = bench.meeting([HERE] * 3 * BLOCKS)
    assert bench.recorded == [("event 0", "stream")]
    bench.fill()
    bench.copies[0].end()
    bench.events.clear()
    bench.fill()
    assert [copy.behind for copy in bench.copies] == [["event 0"], ["event 0"], []]
    bench.events.append("event 0")  # of somebody else by now
    assert meeting._events(bench) == []  # type: ignore[arg-type]
    behind: Any = ["over", "event 0"]
    meeting._behind = behind
    assert meeting._events(bench) is behind  # type: ignore[arg-type]


def test_the_prompt_whose_model_comes_to_a_load_first_is_loaded_first(bench: Bench) -> None:
    bench.know(0.25, 1.0)
    first = bench.meeting([HERE] * 4 * BLOCKS)
    second = bench.meeting([HERE] * 3 * BLOCKS, first_key=100)
    third = bench.meeting([HERE] * 4 * BLOCKS, first_key=200)
    third.begun = True
    third.line.set(third.line.pieces[0], PieceState.COMPUTED)
    third._front = 1
    assert [one.blocks_left for one in (first, second, third)] == [(True, 12), (True, 8), (False, 8)]
    bench.fill()
    assert bench.loaded == [[212, 215], [208, 211]]
    third.end()
    bench.fill()
    assert bench.loaded[2:] == [[108, 111], [104, 107]]


def test_what_is_not_there_any_more_does_not_count_as_loaded(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.know(0.1, None)
    meeting = bench.meeting([HERE] * 5 * BLOCKS)
    del bench.slots[b"17"]
    bench.index.arriving[b"13"] = 1
    bench.fill()
    assert bench.loaded == [[8, 11], [4, 7]]
    assert states_of(meeting) == ["waiting", "loading", "loading", "lost", "lost"]
    bench.fails = True
    bench.copies[0].end(State.FAILED)
    with caplog.at_level(logging.DEBUG):
        bench.fill()
    assert "no link" in caplog.text
    assert states_of(meeting) == ["lost", "loading", "lost", "lost", "lost"]


def test_where_computing_is_quicker_one_piece_is_loaded_to_hear_of_the_link(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worth(monkeypatch, choice="compute", load_s=9.0, tier_first=0)
    meeting = bench.meeting([HERE] * 4 * BLOCKS)
    bench.fill()
    assert bench.loaded == [[12, 15]]
    bench.copies[0].end()
    bench.fill()
    assert (bench.loaded, states_of(meeting)) == ([[12, 15]], ["waiting"] * 3 + ["loaded"])


@pytest.mark.parametrize("known", [{"choice": "compute", "load_s": float("inf")}, {"choice": "meet", "load_s": 9.0}])
def test_where_the_model_is_not_known_or_the_link_is_of_use_all_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> None:
    worth(monkeypatch, tier_first=0, **known)
    bench.know(0.1, None)
    bench.meeting([HERE] * 4 * BLOCKS)
    bench.fill()
    assert bench.loaded == [[12, 15], [8, 11]]


@pytest.mark.parametrize(("block_s", "loaded"), [(0.1, [[8, 11], [4, 7]]), (2.0, [])])
def test_over_a_link_of_which_nothing_is_known_one_piece_is_loaded_before_any_other(
    bench: Bench, block_s: float, loaded: list[list[int]]
) -> None:
    bench.know(None, 0.4)
    meeting = bench.meeting([HERE] * 4 * BLOCKS)
    bench.rates.take_probe(LINK)  # by somebody else
    bench.fill()
    bench.fill()
    assert bench.loaded == [[12, 15]]
    bench.copies[0].end()
    bench.rates.observe_load(LINK, BLOCK_BYTES, block_s)
    bench.fill()
    assert bench.loaded[1:] == loaded
    assert states_of(meeting) == ["waiting", *["loading" if loaded else "waiting"] * 2, "loaded"]


@pytest.mark.parametrize("busy_s", [0.0, 2.0])
def test_what_would_come_behind_the_model_is_not_loaded(bench: Bench, busy_s: float) -> None:
    """The model comes to the end of the first piece after four seconds, and of the last one after sixteen."""
    bench.now_s = 100.0
    bench.feed.free_s = 100.0 + busy_s
    load_s = (16.0 - 0.001 - busy_s) / BLOCKS
    bench.know(load_s, 1.0)
    bench.rates.observe_load(LINK, BLOCK_BYTES, load_s)
    meeting = bench.meeting([HERE] * 4 * BLOCKS)
    assert meeting.next_load is meeting.line.pieces[3]
    meeting._feed.free_s = 100.0 + busy_s + 0.002
    assert meeting.next_load is None
    meeting._feed.free_s = 100.0 + busy_s
    meeting.line.set(meeting.line.pieces[0], PieceState.COMPUTED)
    meeting._front = 1
    assert meeting.next_load is None


def test_a_link_that_nothing_uses_is_heard_of_by_a_piece_that_comes_too_late(bench: Bench) -> None:
    bench.know(10.0, 1.0)
    bench.rates.observe_load(LINK, BLOCK_BYTES, 10.0)
    for now_s, loaded in ((29.0, False), (30.0, True), (31.0, False)):
        bench.now_s = now_s
        meeting = bench.meeting([HERE] * 2 * BLOCKS)
        bench.copies.clear()
        bench.fill()
        assert bench.loaded == ([[4, 7]] if loaded else [])
        assert meeting.line.pieces[1].is_probe == loaded
        meeting.end()


# ---- from the tier ----
@pytest.mark.parametrize(("tier_first", "read"), [(2 * BLOCKS, [3, 2]), (2 * BLOCKS - 1, [3, 2, 1]), (99, [3])])
def test_what_is_read_is_worth_it_or_the_last_piece(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tier_first: int, read: list[int]
) -> None:
    bench.know(1.0, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=tier_first)
    meeting = bench.meeting([BELOW] * 4 * BLOCKS)
    bench.fill()
    assert [int(one.keys[0]) // BLOCKS for one in bench.reads] == read
    assert sum(piece.size for piece in meeting._reading) == len(read) * BLOCKS
    due_s = [meeting.line.pieces[one].due_s for one in read]
    assert due_s == pytest.approx([BLOCKS * (1.0 + number) for number in range(len(read))])


def test_what_is_read_comes_behind_what_was_asked_for_by_others(bench: Bench) -> None:
    """By ``expect``, say: a piece is not late because of them."""
    bench.know(1.0, 1.0, 1.0)
    bench.others_blocks = 100
    meeting = bench.meeting([BELOW] * BLOCKS)
    bench.fill()
    piece = meeting.line.pieces[0]
    assert piece.due_s == pytest.approx(100.0 + BLOCKS)
    assert piece.late_s == pytest.approx(bench.rates.late_s(100 + BLOCKS, TIER))
    bench.now_s = 50.0
    assert bench.next(meeting).piece is piece  # the model waits for none of them
    assert bench.late == []


def test_a_piece_of_which_a_part_lies_in_the_tier_is_read(bench: Bench) -> None:
    bench.know(1.0, 1.0, 1e-3)
    meeting = bench.meeting([HERE] * BLOCKS + [HERE] * (BLOCKS - 1) + [BELOW])
    bench.fill()
    assert states_of(meeting) == ["loading", "reading"]
    assert bench.reads[0].keys == [b"4", b"5", b"6", b"7"]


def test_so_many_pieces_of_a_prompt_are_read_at_a_time_and_then_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.know(1.0, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=0)
    count = bringing.MOST_READING + 2
    meeting = bench.meeting([BELOW] * count * BLOCKS)
    bench.fill()
    assert states_of(meeting) == ["below"] * 2 + ["reading"] * bringing.MOST_READING
    bench.arrive(bench.reads[0])
    bench.fill()
    assert states_of(meeting) == ["below"] + ["reading"] * bringing.MOST_READING + ["loading"]
    assert bench.loaded == [[BLOCKS * (count - 1), BLOCKS * count - 1]]
    meeting.end()
    assert [one.cancelled for one in bench.reads] == [0] + [1] * bringing.MOST_READING
    assert bench.cancelled == bench.copies


@pytest.mark.parametrize("tier_s", [0.5, 8.0])
def test_a_piece_with_a_gap_in_front_of_what_host_memory_has_is_read_too(bench: Bench, tier_s: float) -> None:
    """Each has one block in the tier: what a block is worth there does not depend on where the others stand."""
    bench.know(0.01, 1.0, tier_s)
    meeting = bench.meeting([HERE, HERE, HERE, BELOW] * 5, end_blocks=1)
    wanted = {piece.start for piece in [*meeting._below, *meeting._reading]}
    assert wanted == ({4, 8, 12, 16} if tier_s < 1 else {16})


def test_what_the_tier_has_at_once_is_loaded_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(0.5, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=0)
    bench.read_at_once = True
    bench.meeting([BELOW] * 2 * BLOCKS)
    bench.fill()
    assert bench.loaded == [[0, 3], [4, 7]]


def test_what_the_tier_did_not_bring_is_computed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(1.0, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=0)
    meeting = bench.meeting([BELOW] * BLOCKS)
    bench.fill()
    bench.reads[0].done = True
    bench.fill()
    assert (bench.loaded, states_of(meeting)) == ([], ["lost"])


def test_a_read_is_late_behind_its_time_and_then_it_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.now_s = 100.0
    bench.know(0.25, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=0)
    meeting = bench.meeting([BELOW] * BLOCKS)
    bench.fill()
    assert meeting.line.pieces[0].due_s == pytest.approx(100.0 + BLOCKS * 1.0)
    bench.now_s = meeting.line.pieces[0].late_s
    assert bench.now_s == pytest.approx(100.0 + bench.rates.late_s(BLOCKS, TIER))
    bench.fill()
    assert (bench.late, states_of(meeting)) == ([], ["reading"])
    bench.now_s += 1.0
    seconds = bench.now_s - 100.0
    bench.fill()
    assert (bench.late, states_of(meeting)) == ([(TIER, BLOCKS * BLOCK_BYTES, seconds)], ["lost"])
    assert (bench.reads[0].cancelled, meeting._reading) == (1, {})


def test_of_a_tier_that_is_not_known_one_piece_is_read_to_its_end(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    meeting = bench.meeting([BELOW] * 3 * BLOCKS, end_blocks=4)
    bench.fill()
    assert states_of(meeting) == ["below", "below", "reading"]
    assert bench.rates.stats()["tier_probes"] == 1
    for _ in range(3):
        assert bench.next(meeting).piece is not None
    assert states_of(meeting) == ["computed"] * 3
    assert (bench.reads[0].cancelled, meeting._reading) == (0, {})
    assert meeting.num_computed_blocks == 3 * BLOCKS
    assert meeting.lost_blocks == set()


def test_what_the_model_comes_to_is_not_read_any_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(1.0, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=0)
    meeting = bench.meeting([BELOW] * 2 * BLOCKS)
    bench.fill()
    step = bench.next(meeting)
    assert step == Step(meeting.line.pieces[0], ())
    assert [one.cancelled for one in bench.reads] == [0, 1]
    assert states_of(meeting) == ["computed", "reading"]
    assert sum(piece.size for piece in meeting._reading) == BLOCKS


READ_S = BLOCKS * 1.0 + BLOCKS * 0.125  # of a piece out of the tier and over the link, in the next tests


def reading(bench: Bench, compute_s: float, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """At 100.0, its only piece is read from the tier. In seconds a block: link 0.125, tier 1."""
    bench.now_s = 100.0
    bench.know(0.125, compute_s, 1.0)
    worth(monkeypatch, choice="load", load_s=9.0, tier_first=0)
    meeting = bench.meeting([BELOW] * BLOCKS)
    wait_as_long_as_computing(bench, meeting)
    bench.fill()
    return meeting


@pytest.mark.parametrize("waited_s", [0.0, 1.5])
def test_the_model_waits_for_a_read_that_comes_before_it_could_be_computed(
    bench: Bench, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = reading(bench, READ_S / BLOCKS, monkeypatch)
    bench.now_s += waited_s
    late_s = bench.rates.late_s(BLOCKS, TIER) - waited_s
    assert bench.next(meeting) == Step(reading=bench.reads[0], left_s=pytest.approx(late_s))  # type: ignore[arg-type]
    bench.arrive(bench.reads[0])
    assert bench.next(meeting) == Step(None, (bench.copies[0],))  # type: ignore[arg-type]
    assert bench.late == []


@pytest.mark.parametrize("why", ["it is quicker", "busy link", "unknown model", "no trust", "no trust in the link"])
def test_the_model_does_not_wait_for_a_read(bench: Bench, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = why == "it is quicker"
    meeting = reading(bench, READ_S / BLOCKS - 0.001 if quick else READ_S / BLOCKS, monkeypatch)
    if why == "busy link":
        bench.feed.free_s = 100.0 + BLOCKS * 1.0 + 0.001
    elif why == "unknown model":
        unknown = dataclasses.replace(bench.rates.snapshot(), base_s=None)
        monkeypatch.setattr(bench.rates, "snapshot", lambda: unknown)
    elif not quick:
        for _ in range(2):
            bench.rates.observe_failed(LINK if "link" in why else TIER)
    assert bench.next(meeting) == Step(meeting.line.pieces[0], ())
    assert bench.reads[0].cancelled == 1


@pytest.mark.parametrize("others", [0, BLOCKS])
@pytest.mark.parametrize("waits", [True, False])
def test_the_model_waits_for_a_piece_whose_turn_comes_soon(
    bench: Bench, waits: bool, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six pieces, of which four are read, and the second one is wanted too."""
    compute_s = ((5 * BLOCKS + others) * 1.0 + BLOCKS * 0.125) / BLOCKS
    bench.know(0.125, compute_s + (0.001 if waits else -0.001), 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=BLOCKS)
    meeting = bench.meeting([BELOW] * 6 * BLOCKS)
    wait_as_long_as_computing(bench, meeting)
    bench.fill()
    assert len(bench.reads) == 4
    if others:
        bench.meeting([BELOW] * others, first_key=99)
        bench.fill()
    first, second = meeting.line.pieces[:2]
    assert bench.next(meeting) == Step(first, ())  # that one is not wanted
    found = bench.next(meeting)
    expected = Step(reading=bench.reads[0], left_s=found.left_s) if waits else Step(second, ())  # type: ignore[arg-type]
    assert found == expected
    if waits:
        assert found.left_s == pytest.approx(bench.rates.late_s(BLOCKS, TIER))


def test_the_model_waits_for_a_read_until_that_is_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = reading(bench, 10.0, monkeypatch)
    (piece,) = meeting.line.pieces
    bench.now_s = piece.late_s
    assert bench.next(meeting) == Step(reading=bench.reads[0], left_s=0.0)  # type: ignore[arg-type]
    seconds = bench.now_s - 100.0
    me: Any = bench.reads[0]
    meeting.read_late(me)
    assert (bench.late, states_of(meeting)) == ([(TIER, BLOCKS * BLOCK_BYTES, seconds)], ["lost"])
    assert bench.next(meeting) == Step(piece, ())
    meeting.read_late(me)  # it is not read any more
    assert len(bench.late) == 1


def two_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch, *, fill: bool = True) -> Meeting:
    """From the back, of all that it has."""
    bench.know(0.125, 10.0, 1.0)
    worth(monkeypatch, choice="load", load_s=9.0, tier_first=0)
    meeting = bench.meeting([BELOW] * 2 * BLOCKS)
    if fill:
        bench.fill()
    return meeting


def test_what_the_tier_does_first_may_make_another_one_as_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = two_reads(bench, monkeypatch)
    second, first = meeting._reading  # from the back
    late_s, more_s = second.late_s, bench.rates.late_s(BLOCKS, TIER)
    bench.now_s = first.begin_s = second.begin_s + 1.0
    bench.arrive(bench.reads[1])
    bench.now_s = late_s + 0.5
    me: Any = bench.reads[0]
    meeting.read_late(me)
    assert (bench.late, second.late_s, states_of(meeting)) == ([], late_s + more_s, ["waiting", "reading"])
    bench.now_s = late_s + more_s + 0.5
    meeting.look()
    assert (len(bench.late), states_of(meeting)) == (1, ["waiting", "lost"])


def test_until_when_the_tier_is_busy_counts_what_is_not_wanted_any_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = two_reads(bench, monkeypatch, fill=False)
    assert meeting._asked_until_s == 0.0
    bench.fill()
    second, first = meeting._reading
    assert (second.due_s, first.due_s) == (pytest.approx(4.0), pytest.approx(8.0))
    meeting._leave(first, PieceState.COMPUTED)
    assert meeting._asked_until_s == first.due_s


def test_what_the_tier_does_in_order_gives_the_others_no_more_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = two_reads(bench, monkeypatch)
    second, first = meeting._reading
    first.begin_s = second.begin_s + 1.0
    late_s = first.late_s
    bench.arrive(bench.reads[0])
    meeting.look()
    assert (first.late_s, states_of(meeting)) == (late_s, ["reading", "waiting"])


def test_a_read_that_has_come_at_its_last_moment_is_not_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = reading(bench, 10.0, monkeypatch)
    bench.arrive(bench.reads[0])
    me: Any = bench.reads[0]
    meeting.read_late(me)
    assert (bench.late, bench.next(meeting).loads) == ([], (bench.copies[0],))


def test_what_is_being_read_for_others_is_awaited_as_what_is_read_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the front, which is not worth being read; what of it is only a part on its way is not."""
    bench.know(0.125, 10.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=3 * BLOCKS)
    bench.others = {b"%d" % number for number in range(BLOCKS + 1)}
    meeting = bench.meeting([BELOW] * 4 * BLOCKS)
    bench.fill()
    assert states_of(meeting) == ["reading", "below", "below", "reading"]
    assert [int(one.keys[0]) // BLOCKS for one in bench.reads] == [3, 0]
    first = meeting.line.pieces[0]
    assert first.due_s == pytest.approx(bench.reads[1].blocks_until * 1.0)
    assert bench.next(meeting).reading is bench.reads[1]  # type: ignore[comparison-overlap]
    bench.others |= {b"%d" % number for number in range(2 * BLOCKS)}
    bench.fill()
    assert states_of(meeting)[1] == "below"  # what was asked for later it has seen too late
    bench.now_s = first.late_s + 0.001
    assert bench.next(meeting) == Step(first, ())
    assert bench.reads[1].cancelled == 1


def test_a_piece_is_awaited_if_all_of_it_is_being_read_whatever_is_around_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reads itself is not asked for again."""
    bench.know(0.125, 10.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=3 * BLOCKS)
    bench.others = {b"%d" % number for number in range(4 * BLOCKS) if number not in (BLOCKS - 1, 2 * BLOCKS)}
    meeting = bench.meeting([BELOW] * 4 * BLOCKS)
    bench.fill()
    assert states_of(meeting) == ["below", "reading", "below", "reading"]
    assert [int(one.keys[0]) // BLOCKS for one in bench.reads] == [3, 1]


def test_what_others_have_brought_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(1e-6, 1.0, 1.0)
    worth(monkeypatch, choice="meet", load_s=9.0, tier_first=99)
    meeting = bench.meeting([BELOW] * 3 * BLOCKS)
    bench.slots.update({b"%d" % number: 0 for number in range(2 * BLOCKS)})
    last = meeting.line.pieces[2]
    assert bench.next(meeting) == Step(last, (bench.copies[0],))  # type: ignore[arg-type]
    assert (bench.loaded, states_of(meeting)) == ([[0, 7]], ["loading", "computed"])


# ---- from the front ----
def ready(bench: Bench, *states: str, awaited: bool = False) -> Meeting:
    """A meeting whose pieces are where it is said; those that are loading have a copy each, from the front."""
    meeting = bench.meeting([HERE] * len(states) * BLOCKS)
    for piece, state in zip(meeting.line.pieces, states, strict=True):
        if state == "loading":
            assert meeting._load(bench, piece)  # type: ignore[arg-type]
            piece.awaited = awaited
        else:
            meeting.line.set(piece, PieceState(state))
    return meeting


def test_a_step_names_the_loads_before_its_piece(bench: Bench) -> None:
    bench.know(1.0, 2.0)
    bench.rates.set_load(LINK, 1e30)
    meeting = ready(bench, "loaded", "loading", "loading", "lost", "loading")
    pieces = meeting.line.pieces.copy()
    step = bench.next(meeting)
    first, second, last = bench.copies
    assert (step.piece, step.loads, step.leaving) == (pieces[3], (first, second), None)
    assert [piece.awaited for piece in pieces] == [False, True, True, False, False]
    assert (meeting._front, meeting.lost_blocks) == (1, {12, 13, 14, 15})
    assert (meeting.begun, meeting.num_computed_blocks) == (True, 4)
    first.end()
    second.end()
    step = bench.next(meeting)
    assert (step.piece, step.loads) == (None, (last,))
    assert meeting._front == 4
    assert [piece.awaited for piece in pieces] == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ("nothing", True),
        ("as long as computing", True),
        ("longer than computing", False),
        ("late", False),
        ("as late as it may be", True),
        ("not submitted", False),
        ("nothing known of computing", False),
        ("no trust in the link", False),
    ],
)
def test_the_model_waits_for_a_load_that_is_there_before_it_could_compute_it(
    bench: Bench, change: str, waits: bool
) -> None:
    bench.know(0.5, None if change == "nothing known of computing" else 1.0)
    meeting = ready(bench, "loading")
    wait_as_long_as_computing(bench, meeting)
    [piece] = meeting.line.pieces
    piece.due_s, piece.late_s = 3.0, 10.0
    if change == "nothing known of computing":
        piece.due_s = -1.0
    if change == "as long as computing":
        piece.due_s = 4.0
    if change == "longer than computing":
        piece.due_s = 4.001
    if change == "late":
        bench.now_s = 10.001
    if change == "as late as it may be":
        bench.now_s = 10.0
    if change == "not submitted":
        bench.copies[0].num_unsubmitted = 1
    if change == "no trust in the link":
        bench.rates.observe_failed(LINK)
    step = bench.next(meeting)
    assert (step.loads == (bench.copies[0],), piece.awaited) == (waits, waits)
    assert (step.leaving is bench.copies[0]) == (not waits)
    assert bench.cancelled == bench.looked == ([] if waits else bench.copies)
    assert bench.late == ([(LINK, BLOCKS * BLOCK_BYTES, 10.001)] if change == "late" else [])
    assert piece.state is (PieceState.LOADING if waits else PieceState.CANCELLED)
    if waits:  # and so it does from then on
        bench.copies[0].num_unsubmitted, bench.now_s = 1, 99.0
        assert bench.next(meeting) == Step(None, (bench.copies[0],))  # type: ignore[arg-type]
    else:  # until it is over
        assert bench.next(meeting) == Step(leaving=bench.copies[0])  # type: ignore[arg-type]
        bench.copies[0].end(State.CANCELLED)
        assert bench.next(meeting) == Step(piece, ())


def test_a_load_is_late_by_its_own_time_and_not_by_that_of_those_before(bench: Bench) -> None:
    bench.know(0.5, 40.0)
    bench.feed.free_s = 30.0
    meeting = bench.meeting([HERE] * BLOCKS)
    assert meeting.load_next(bench, whole=False)  # type: ignore[arg-type]
    [piece] = meeting.line.pieces
    factor = bench.rates.snapshot().link_late
    assert (piece.due_s, piece.late_s) == (30.0 + 2.0, pytest.approx(factor * 32.0 + LATE_S))
    bench.now_s = piece.late_s + 1.0
    assert bench.next(meeting).leaving is bench.copies[0]  # type: ignore[comparison-overlap]
    assert bench.late == [(LINK, BLOCKS * BLOCK_BYTES, bench.now_s - 30.0)]


def test_a_read_is_late_with_all_that_is_read_before_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.others_blocks = 12
    meeting = reading(bench, 40.0, monkeypatch)
    [piece] = meeting.line.pieces
    bench.now_s = piece.late_s + 1.0
    seconds = bench.now_s - 100.0
    bench.fill()
    assert bench.late == [(TIER, (BLOCKS + 12) * BLOCK_BYTES, seconds)]


def test_a_load_of_several_pieces_that_ends_when_it_is_given_up_is_computed_one_by_one(bench: Bench) -> None:
    bench.know(1e-9, 1.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS)
    whole = meeting.line.pieces.copy()
    assert bench.next(meeting) == Step(None, (bench.copies[0],))  # type: ignore[arg-type]
    assert (bench.loaded, states_of(meeting)) == ([[0, 11]], ["loading"])
    meeting.line.pieces[0].awaited = False
    bench.now_s = 99.0
    bench.copies[0].ends_when_cancelled = True
    assert bench.next(meeting) == Step(whole[0], ())
    assert states_of(meeting) == ["computed", "lost", "lost"]


@pytest.mark.parametrize("quicker", [True, False])
@pytest.mark.parametrize("trusted", [True, False])
def test_whether_all_that_is_here_is_loaded_is_asked_with_what_is_beside_and_behind_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, quicker: bool, trusted: bool
) -> None:
    bench.know(1.0, 1.0, 0.25)
    worth(monkeypatch, choice="load", load_s=9.0, tier_first=0)
    bench.now_s = 5.0
    if not trusted:
        bench.rates.observe_failed(TIER)
    meeting = bench.meeting([HERE] * 3 * BLOCKS + [BELOW] * 2 * BLOCKS + [HERE] * BLOCKS, end_blocks=3)
    before, here, *_, last = meeting.line.pieces
    meeting.line.set(before, PieceState.COMPUTED)
    meeting.line.set(last, PieceState.LOST)
    bench.others_blocks = 5
    meeting._read_piece(meeting._below.pop(), bench)  # type: ignore[arg-type]
    bench.feed.free_s = 7.0
    asked: list[Any] = []
    meeting._waits.for_rest = lambda *given, **options: asked.append((given, options)) or quicker  # type: ignore
    step = bench.next(meeting)
    tier = {"tier_blocks": 2 * BLOCKS, "behind_blocks": BLOCKS, "tier_wait_s": 1.25}
    none = {"tier_blocks": 0, "behind_blocks": 3 * BLOCKS, "tier_wait_s": 0.0}
    waits = {"link_wait_s": 2.0, "others_s": 0.0}
    [((_, *blocks), figures), *_] = asked
    assert blocks == [BLOCKS, 2 * BLOCKS, 3 * BLOCKS]
    assert figures == pytest.approx({**(tier if trusted else none), **waits})
    assert [(copy.positions[0], copy.positions[-1], copy.urgent) for copy in bench.copies] == (
        [(4, 11, None)] if quicker else []
    )
    if not quicker:
        assert step.piece is here


def test_what_the_model_awaits_together_is_loaded_side_by_side(bench: Bench) -> None:
    """Or a small load would not begin before a long one has ended, and no pass over both could."""
    bench.know(0.5, 2.0, 0.25)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    step = bench.next(meeting)
    assert (step.reading, step.loads) == (bench.reads[0], ())
    bench.arrive(bench.reads[0])
    bench.now_s = 1.0
    bench.fill()
    assert [(copy.positions, copy.urgent) for copy in bench.copies] == [([0, 1, 2, 3], None), ([4, 5, 6, 7], True)]
    [long, small] = meeting.moving
    assert (long.begin_s, long.due_s) == (0.0, pytest.approx(2.0))
    assert (small.begin_s, small.due_s) == (1.0, pytest.approx(4.0))  # it ends behind the other one all the same
    assert bench.next(meeting).loads == tuple(bench.copies)  # type: ignore[comparison-overlap]


def test_what_is_asked_of_each_piece_knows_of_the_longest_load_before_it(bench: Bench) -> None:
    """The first one is there last."""
    bench.know(0.5, 2.0)
    meeting = bench.meeting([HERE] * 4 * BLOCKS, end_blocks=BLOCKS)
    meeting._waits.is_loaded_sooner = lambda *_: False  # type: ignore[method-assign]
    bench.fill()
    first, second, third, _ = meeting.line.pieces
    loads = dict(zip((first, second), bench.copies, strict=True))
    for piece in meeting.moving:
        meeting.line.set(piece, PieceState.WAITING)
    meeting.moving = loads  # type: ignore[assignment]
    for piece, due_s in ((first, 7.0), (second, 3.0)):
        meeting.line.set(piece, PieceState.LOADING)
        piece.begin_s, piece.due_s, piece.late_s = 0.0, due_s, 99.0
    bench.now_s = 1.0
    asked: list[Any] = []
    meeting._waits.for_one = lambda rates, *given: asked.append(given) or True  # type: ignore
    meeting._waits.for_rest = lambda rates, *given, **figures: asked.append(figures["others_s"])  # type: ignore
    step = bench.next(meeting)
    assert asked == [(0, 4, 0.0, 6.0, 0.0), (4, 8, 0.0, 2.0, 6.0), 6.0]
    assert (step.piece, step.loads) == (third, tuple(bench.copies))


def test_what_is_loaded_once_the_model_goes_on_stands_behind_others_again(bench: Bench) -> None:
    """It was awaited beside them, and came; what comes next from the back is not awaited."""
    bench.know(0.5, 2.0, 0.25)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert bench.next(meeting).reading is bench.reads[0]
    assert meeting._is_beside
    meeting.read_late(bench.reads[0])  # type: ignore[arg-type]
    meeting._leave(meeting.line.pieces[1], PieceState.LOST)
    bench.next(meeting)
    assert not meeting._is_beside


def test_of_what_lies_below_only_what_is_behind_the_rest_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(1.0, 1.0, 0.25)
    worth(monkeypatch, choice="load", load_s=9.0, tier_first=0)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * 3 * BLOCKS + [HERE] * BLOCKS, end_blocks=3)
    here, brought, *_, last = meeting.line.pieces
    meeting.line.set(last, PieceState.LOST)
    bench.slots.update({b"%d" % number: 0 for number in range(BLOCKS, 2 * BLOCKS)})  # by somebody else
    asked: list[Any] = []
    meeting._waits.for_rest = lambda rates, *given, **figures: asked.append((given, figures["tier_blocks"]))  # type: ignore
    bench.next(meeting)
    assert asked == [((0, BLOCKS, 2 * BLOCKS), 2 * BLOCKS)]
    assert (here.state, brought.state) == (PieceState.COMPUTED, PieceState.WAITING)


@pytest.mark.parametrize(("before", "since", "wait_s"), [(0, 40, 0.0), (40, 0, 20.0), (8, 40, 4.0)])
def test_what_others_have_asked_the_tier_for_since_is_not_waited_for(
    bench: Bench, before: int, since: int, wait_s: float
) -> None:
    bench.know(0.05, 1.0, 0.5)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * BLOCKS, end_blocks=1)
    bench.others_blocks = before
    meeting.read_next(bench, lambda: None)  # type: ignore[arg-type]
    bench.others_blocks += since
    asked: list[float] = []
    meeting._waits.for_rest = lambda rates, *given, **figures: asked.append(figures["tier_wait_s"])  # type: ignore
    bench.next(meeting)
    assert asked == [pytest.approx(wait_s)]


def test_the_rest_is_loaded_beside_what_is_awaited_with_it(bench: Bench) -> None:
    bench.know(0.5, 2.0)
    meeting = bench.meeting([HERE] * 4 * BLOCKS, end_blocks=BLOCKS)
    meeting._waits.is_loaded_sooner = lambda *_: False  # type: ignore[method-assign]
    bench.fill()
    for piece in meeting.moving:
        meeting.line.set(piece, PieceState.WAITING)
    first, second = meeting.line.pieces[:2]
    meeting.moving = dict(zip((first, second), bench.copies, strict=True))  # type: ignore[arg-type]
    for piece in (first, second):
        meeting.line.set(piece, PieceState.LOADING)
        piece.expect(BLOCKS, bench.rates, LINK)
    step = bench.next(meeting)
    assert (bench.copies[-1].positions, bench.copies[-1].urgent) == (list(range(8, 16)), True)
    assert step == Step(None, tuple(bench.copies))  # type: ignore[arg-type]
    assert not meeting._is_beside


# ---- all that is left ----
def test_what_is_left_comes_as_one_as_soon_as_nothing_of_it_is_worth_computing_meanwhile(bench: Bench) -> None:
    bench.know(1.5, 2.1)  # of 24 seconds 16.8 of computing are worth it, of the last 12 not even 8.4
    meeting = bench.meeting([HERE] * 4 * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert bench.loaded == [[12, 15], [8, 11]]
    bench.now_s = 12.0
    bench.copies[0].end()
    bench.fill()
    assert (bench.loaded[2:], bench.copies[-1].urgent) == ([[0, 7]], None)
    assert states_of(meeting) == ["loading", "loading", "loaded"]
    bench.copies[2].end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["lost", "lost", "loading", "loaded"]


def test_what_is_left_behind_what_the_model_computes_comes_as_one(bench: Bench) -> None:
    bench.know(1.5, 2.1)
    meeting = bench.meeting([HERE] * 5 * BLOCKS, end_blocks=BLOCKS)
    meeting._waits.for_rest = lambda *_, **__: False  # type: ignore[method-assign]
    bench.fill()
    assert bench.next(meeting).piece is meeting.line.pieces[0]
    bench.now_s = 12.0
    bench.copies[0].end()
    bench.fill()
    assert bench.loaded == [[16, 19], [12, 15], [4, 11]]
    assert states_of(meeting) == ["computed", "loading", "loading", "loaded"]


@pytest.mark.parametrize(
    ("earlier", "begun", "what", "whole"),
    [
        (False, False, "below", True),
        (False, True, "below", False),
        (True, False, "below", False),
        (True, True, "computed", True),
        (True, False, "loading", False),
        (False, False, "loading", False),
    ],
)
def test_it_comes_piece_by_piece_where_the_model_may_come_to_another_prompt_first(
    bench: Bench, earlier: bool, begun: bool, what: str, whole: bool
) -> None:
    """What that asks for next would stand behind all of it."""
    bench.know(1.0, 4.0)
    mine = None if earlier else bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    other = bench.meeting([HERE if what == "loading" else BELOW] * BLOCKS, first_key=100)
    mine = mine or bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    other.begun = begun
    if what == "loading":
        other.load_next(bench, whole=False)  # type: ignore[arg-type]
    elif what == "computed":
        other.line.set(other.line.pieces[0], PieceState.COMPUTED)
    bench.fill()
    loaded = [one for one in bench.loaded if one[0] < 100]
    assert loaded == ([[0, 11]] if whole else [[8, 11], [4, 7]][: 1 if what == "loading" else 2])


def rest_under_way(bench: Bench) -> tuple[Meeting, Copy]:
    bench.know(1.0, 4.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert bench.loaded == [[0, 11]]
    return meeting, bench.copies[0]


def test_the_model_waits_for_all_that_is_left_also_where_the_link_was_slow_meanwhile(bench: Bench) -> None:
    meeting, copy = rest_under_way(bench)
    bench.rates.observe_load(LINK, BLOCK_BYTES, 2.0)
    assert not bench.rates.snapshot().link_waits
    assert bench.next(meeting).loads == (copy,)  # type: ignore[comparison-overlap]


def test_what_of_it_is_late_comes_piece_by_piece_behind_what_is_computed(bench: Bench) -> None:
    meeting, copy = rest_under_way(bench)
    copy.ends_when_cancelled = True
    bench.now_s = 200.0
    step = bench.next(meeting)
    assert step.piece is meeting.line.pieces[0] and step.piece.size == BLOCKS
    assert states_of(meeting) == ["computed", "waiting", "waiting"]
    bench.know(1.0, 4.0)
    bench.fill()
    assert bench.loaded[1:] == [[8, 11], [4, 7]]
    assert meeting.lost_blocks == set()


def test_what_of_it_is_not_submitted_is_computed_and_asked_for_once_more(bench: Bench) -> None:
    """By what the model waits for; if that is not submitted either, all is computed."""
    meeting, copy = rest_under_way(bench)
    copy.ends_when_cancelled, copy.num_unsubmitted = True, 1
    onload = bench.onload

    def behind_others(*given: Any, **named: Any) -> Any:
        transfer = onload(*given, **named)
        transfer._movement.ends_when_cancelled, transfer._movement.num_unsubmitted = True, 1
        return transfer

    bench.onload = behind_others  # type: ignore[method-assign]
    assert bench.next(meeting).piece is meeting.line.pieces[0]
    assert states_of(meeting) == ["computed", "lost", "lost"]


def test_of_what_cannot_begin_as_one_the_last_piece_is_computed(bench: Bench) -> None:
    bench.know(1.0, 4.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    bench.fails = True
    assert not meeting.load_next(bench, whole=True)  # type: ignore[arg-type]
    bench.fails = False
    assert states_of(meeting) == ["waiting", "waiting", "lost"]
    bench.fill()
    assert bench.loaded == [[4, 7], [0, 3]]


def test_a_failure_of_the_device_loses_all_of_it(bench: Bench) -> None:
    meeting, copy = rest_under_way(bench)
    copy.end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["lost"] * 3


@pytest.mark.parametrize("other", ["below", "reading", "lost"])
@pytest.mark.parametrize("at", [0, 2])
def test_it_comes_piece_by_piece_where_the_model_has_something_to_compute(bench: Bench, other: str, at: int) -> None:
    bench.know(1.0, 4.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    assert meeting._waits.is_loaded_sooner(bench.rates.snapshot(), 0, 3 * BLOCKS, 0.0)
    meeting.line.set(meeting.line.pieces[at], PieceState(other))
    bench.fill()
    loaded = [[0, 3], [4, 7], [8, 11]]
    del loaded[at]
    assert bench.loaded == loaded[::-1]


@pytest.mark.parametrize(
    ("gone", "loaded", "states"),
    [
        (2, [[8, 11], [4, 7]], ["waiting", "loading", "loading"]),
        (9, [[4, 7], [0, 3]], ["loading", "loading", "lost"]),
    ],
)
def test_it_comes_piece_by_piece_where_a_part_of_it_is_gone(
    bench: Bench, gone: int, loaded: list[list[int]], states: list[str]
) -> None:
    bench.know(1.0, 4.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    del bench.slots[b"%d" % gone]
    bench.fill()
    assert bench.loaded == loaded
    assert states_of(meeting) == states


def test_what_was_to_be_computed_does_not_come_as_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    worth(monkeypatch, choice="compute", load_s=9.0, tier_first=0)
    bench.know(1.0, 4.0)
    bench.meeting([HERE] * 3 * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert bench.loaded == [[8, 11]]


# ---- again ----
def test_behind_a_load_that_failed_all_from_there_on_is_computed_again(bench: Bench) -> None:
    bench.know(1.0, 1.0)
    meeting = ready(bench, "lost", "computed", "loading", "loading", "computed", "loading", awaited=True)
    for copy, state in zip(bench.copies, (State.DONE, State.FAILED, State.DONE), strict=True):
        copy.end(state)
    meeting._front = 6
    meeting.compute_again()
    assert states_of(meeting) == ["lost", "computed", "loaded", "lost", "lost", "loaded"]
    assert [piece.awaited for piece in meeting.line.pieces] == [False, False, True, False, False, True]
    assert meeting._front == 3


def test_where_no_load_of_the_prefix_failed_all_is_computed_again(bench: Bench) -> None:
    meeting = ready(bench, "computed", "lost", "computed")
    meeting._front = 3
    meeting.compute_again()
    assert (states_of(meeting), meeting._front) == (["lost"] * 3, 0)


@pytest.mark.parametrize("error", [ClosedError, ForkedError])
def test_a_load_that_ends_behind_its_manager_is_nobodys(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    asked = []

    def change(books: Any, function: Any) -> None:
        asked.append(books)
        raise error("gone")

    monkeypatch.setattr(bringing, "change", change)
    me: Any = bench
    bringing._look(lambda: me)
    bringing._look(lambda: None)
    assert asked == [bench]


def test_the_end_drops_what_is_on_its_way(bench: Bench) -> None:
    meeting = ready(bench, "loading", "loading")
    meeting.end()
    assert bench.cancelled == bench.copies
    bench.copies[0].end()
    bench.fill()
    assert states_of(meeting) == ["loading", "loading"]  # nobody looks at it any more
