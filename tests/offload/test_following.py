"""All that is left of a prefix as one load, while the tier reads it: by itself, as in ``test_meeting.py``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload import bringing, feed
from paddle_kv.offload.feeding import Meeting
from paddle_kv.offload.pieces import PieceState
from paddle_kv.offload.rates import LATE_S, LINK, TIER
from paddle_kv.offload.waits import Step
from paddle_kv.schedule.movement import State
from tests.offload.meeting_rig import BELOW, BLOCK_BYTES, BLOCKS, HERE, Bench, Copy, Read, states_of, worth


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    made.reads_layerwise = True
    yield made


def positions(read: Read) -> list[int]:
    return [int(key) for key in read.keys]


def followed(bench: Bench, *, host_pieces: int = 1, tier_pieces: int = 2) -> tuple[Meeting, Copy, Read]:
    """A pass over one piece takes 16 s, and the tier needs 4 for each."""
    bench.know(0.1, 4.0, 0.99)
    states = [HERE] * host_pieces * BLOCKS + [BELOW] * tier_pieces * BLOCKS
    meeting = bench.meeting(states, end_blocks=BLOCKS)
    bench.fill()
    assert states_of(meeting) == ["loading"]
    assert bench.loaded == [[0, len(states) - 1]]
    [read] = bench.reads
    assert positions(read) == list(range(host_pieces * BLOCKS, len(states)))
    return meeting, bench.copies[0], read


@pytest.mark.parametrize(("host_pieces", "tier_pieces"), [(0, 1), (1, 2), (0, 4), (3, 1)])
def test_what_the_tier_reads_within_the_pass_behind_it_comes_as_one(
    bench: Bench, host_pieces: int, tier_pieces: int
) -> None:
    meeting, copy, _ = followed(bench, host_pieces=host_pieces, tier_pieces=tier_pieces)
    assert copy.behind == ["event 0"]
    assert len(copy.callbacks) == 1 and meeting.under_way == [copy]
    assert (meeting.line.num_below, meeting.line.num_to_compute, meeting.line.num_reading) == (0, 0, 0)
    bench.fill()
    assert len(bench.reads) == len(bench.copies) == 1
    copy.end()
    bench.fill()
    assert states_of(meeting) == ["loaded"]


def test_the_last_pieces_are_read_first_as_long_as_the_tier_takes_longer_than_the_pass(bench: Bench) -> None:
    bench.know(0.1, 4.0, 0.99)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * 6 * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert [positions(one)[0] for one in bench.reads] == [24, 4]  # behind the next one 15.84 s were left
    assert len(bench.reads[-1].keys) == 5 * BLOCKS
    assert bench.loaded == [[0, 27]]
    assert states_of(meeting) == ["loading"]
    assert meeting._reading == {}


@pytest.mark.parametrize(("tier_s", "reads"), [(1.999, [[0, 11]]), (2.001, [[8, 11], [0, 7]])])
def test_just_within_the_pass(bench: Bench, tier_s: float, reads: list[list[int]]) -> None:
    """What were left behind the next piece."""
    bench.know(0.1, 8.0, tier_s)
    meeting = bench.meeting([BELOW] * 3 * BLOCKS, end_blocks=2)
    bench.fill()
    assert [[positions(one)[0], positions(one)[-1]] for one in bench.reads] == reads
    assert states_of(meeting) == ["loading"]


def test_the_last_read_is_followed_whatever_it_takes(bench: Bench) -> None:
    bench.know(0.1, 4.0, 3.0)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * BLOCKS, end_blocks=1)
    bench.fill()
    assert (states_of(meeting), bench.loaded) == (["loading"], [[0, 7]])


@pytest.mark.parametrize(("link_s", "as_one"), [(0.74, True), (2.0, False)])
def test_over_a_slow_link_the_last_piece_is_followed_by_itself(bench: Bench, link_s: float, as_one: bool) -> None:
    """It does not count among those on the link before it is there."""
    bench.know(link_s, 4.0, 3.0)
    meeting = bench.meeting([HERE] * 3 * BLOCKS + [BELOW] * BLOCKS, end_blocks=1)
    bench.fill()
    if as_one:
        assert bench.loaded == [[0, 15]]
        return
    assert bench.loaded == [[12, 15], [8, 11], [4, 7]]
    assert states_of(meeting) == ["waiting", "loading", "loading", "loading"]
    bench.copies[0].unread = set()
    bench.copies[1].end()
    bench.fill()
    assert states_of(meeting) == ["waiting", "loading", "loaded", "loading"]
    bench.copies[0].failed = True
    bench.copies[0].end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["loading", "loading", "loaded", "lost"]


@pytest.mark.parametrize("other", ["lost", "computed"])
def test_where_something_else_is_left_the_last_piece_is_followed_by_itself(bench: Bench, other: str) -> None:
    bench.know(0.1, 4.0, 1.0)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * 2 * BLOCKS, end_blocks=BLOCKS)
    meeting.line.set(meeting.line.pieces[1], PieceState(other))
    bench.fill()
    assert bench.loaded == [[8, 11], [0, 3]]


def to_compute(bench: Bench) -> None:
    """Another prompt that the model has begun, and some of which is lost."""
    other = bench.meeting([BELOW] * BLOCKS, first_key=100)
    other.begun = True
    other.line.set(other.line.pieces[0], PieceState.LOST)


def test_beside_another_prompt_the_last_piece_is_followed_by_itself(bench: Bench) -> None:
    bench.know(0.1, 4.0, 1.0)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * 2 * BLOCKS, end_blocks=BLOCKS)
    to_compute(bench)
    bench.fill()
    assert states_of(meeting) == ["loading", "loading", "reading"]
    assert [positions(one)[0] for one in bench.reads] == [8, 4]


def test_prompts_behind_one_to_which_nothing_is_to_be_brought_any_more_follow_too(bench: Bench) -> None:
    followed(bench)
    other = bench.meeting([HERE] * BLOCKS + [BELOW] * 2 * BLOCKS, first_key=100, end_blocks=BLOCKS)
    bench.fill()
    assert (states_of(other), bench.loaded) == (["loading"], [[0, 11], [100, 111]])


@pytest.mark.parametrize("begun", [False, True])
def test_while_the_model_computes_others_it_cannot_compute_what_the_tier_brings(bench: Bench, begun: bool) -> None:
    """Two passes of 16 s come first, in which the tier reads all; else the model would compute the four blocks itself,
    in 16 s, where the tier brings them in 24."""
    bench.know(0.1, 4.0, 2.0)
    first, second = (bench.meeting([BELOW] * BLOCKS, first_key=key, end_blocks=BLOCKS) for key in (0, 10))
    bench.fill()
    third = bench.meeting([BELOW] * BLOCKS, first_key=20, end_blocks=1)
    third.begun = begun
    bench.fill()
    assert states_of(first) == states_of(second) == ["loading"]
    assert states_of(third) == ["reading" if begun else "loading"]


def test_when_a_prompt_is_computed_that_needs_nothing_more(bench: Bench) -> None:
    """Behind the last layer of what comes to it, or when the model has gone through its end."""
    meeting, copy, _ = followed(bench)
    bench.now_s = 1.0
    due_s = meeting.line.pieces[0].due_s
    assert meeting.over_s(0.0) == pytest.approx(16.0)
    assert meeting.over_s(5.0) == pytest.approx(21.0)
    meeting.line.pieces[0].due_s = 31.0
    assert meeting.over_s(5.0) == pytest.approx(30.0 + 16.0 / 4)
    meeting.line.pieces[0].due_s = due_s
    copy.end()
    bench.fill()
    assert meeting.over_s(2.0) == pytest.approx(18.0)


def prompt(left: int, *, begun: bool = False, takes_s: float = 8.0, moving: int = 0) -> Any:
    """With so many blocks that are not on their way."""
    line = SimpleNamespace(num_to_compute=left)
    return SimpleNamespace(line=line, begun=begun, moving=dict.fromkeys(range(moving)), over_s=lambda at: at + takes_s)


@pytest.mark.parametrize(
    ("before", "begun", "turn_s"),
    [([], False, 0.0), ([8.0, 3.0], False, 11.0), ([8.0, 3.0], True, 0.0), (None, False, None), (None, True, None)],
)
def test_when_the_model_comes_to_a_prompt(before: Any, begun: bool, turn_s: float | None) -> None:
    others = before and [prompt(0, takes_s=takes_s) for takes_s in before]
    assert feed._turn_s(prompt(3, begun=begun), others) == turn_s


def test_those_that_the_model_has_begun_come_first(bench: Bench) -> None:
    """Then the others in order of their beginning, up to the first one to which something is to be brought."""
    bench.know(0.1, 4.0, 2.0)
    found: list[tuple[int, float | None]] = []
    meetings = [bench.meeting([HERE], first_key=key) for key in range(4)]
    for number, (meeting, left) in enumerate(zip(meetings, (0, 3, 0, 0), strict=True)):
        me: Any = meeting
        me.begun = number == 2
        me.line = SimpleNamespace(num_to_compute=left)
        me.look = lambda: None
        me.over_s = lambda begin_s: begin_s + 5.0
        me.read_next = lambda books, turn_s, number=number: found.append((number, turn_s()))
    bench.feed.free_s = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meeting, "next_load", None)
        bench.fill()
    assert found == [(2, 0.0), (0, 5.0), (1, 10.0), (3, None)]


@pytest.mark.parametrize(
    ("before", "behind", "alone"),
    [
        ([], [prompt(2)], True),
        ([prompt(0)], [], True),
        ([prompt(1)], [], False),
        ([prompt(0, moving=1)], [], False),
        ([], [prompt(0, moving=1)], False),
        ([], [prompt(1, begun=True)], False),
        ([], [prompt(0, begun=True)], True),
    ],
)
def test_who_is_alone(before: list[Any], behind: list[Any], alone: bool) -> None:
    asked = prompt(3, moving=2)
    assert feed._is_alone(asked, [*before, asked, *behind]) is alone


def test_of_a_piece_in_both_only_what_lies_in_the_tier_counts(bench: Bench) -> None:
    bench.know(0.1, 4.0, 3.0)
    meeting = bench.meeting([HERE] * (BLOCKS + 3) + [BELOW] * (BLOCKS + 1), end_blocks=1)
    assert [piece.tier_blocks for piece in meeting.line.pieces] == [0, 1, 4]
    assert meeting.line.num_below == 5
    bench.fill()
    assert bench.loaded == [[0, 11]]


@pytest.mark.parametrize(("others", "follows"), [(3, True), (6, False)])
def test_behind_what_the_tier_does_for_others_it_is_not_followed(bench: Bench, others: int, follows: bool) -> None:
    bench.know(0.1, 4.0, 2.0)
    bench.others_blocks = others
    meeting = bench.meeting([BELOW] * BLOCKS, end_blocks=1)
    bench.fill()
    assert states_of(meeting) == ["loading" if follows else "reading"]


def test_a_tier_that_is_slower_than_the_model_is_followed_where_a_pass_hides_that(bench: Bench) -> None:
    bench.know(0.1, 4.0, 5.0)
    for end_blocks, state in ((1, "reading"), (4, "loading")):
        meeting = bench.meeting([BELOW] * BLOCKS, first_key=100 * end_blocks, end_blocks=end_blocks)
        meeting._below = list(meeting.line.pieces)
        bench.fill()
        assert states_of(meeting) == [state]
        meeting.end()
        bench.reads.clear()


@pytest.mark.parametrize("why", ["whole objects", "no trust", "no trust in the link", "to compute", "no room"])
def test_what_comes_piece_by_piece(bench: Bench, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.know(0.1, 4.0, 1.0)
    if why == "to compute":
        worth(monkeypatch, choice="compute", load_s=9.0, tier_first=0)
    meeting = bench.meeting([HERE] * BLOCKS + [BELOW] * 2 * BLOCKS, end_blocks=BLOCKS)
    if why == "whole objects":
        bench.reads_layerwise = False
    elif why.startswith("no trust"):
        bench.rates.observe_load(LINK if "link" in why else TIER, BLOCK_BYTES, 30.0)
    elif why == "no room":
        bench.fails = True
    bench.fill()
    bench.fails = False
    assert "reading" in states_of(meeting)
    assert not meeting._followed
    assert [len(copy.positions) for copy in bench.copies if copy.positions[0] < 100] in ([4], [])


def test_it_is_tried_once(bench: Bench) -> None:
    bench.know(0.1, 4.0, 1.0)
    meeting = bench.meeting([BELOW] * 4 * BLOCKS, end_blocks=BLOCKS)
    bench.fails = True
    bench.fill()
    bench.fails = False
    bench.arrive(bench.reads[0])
    bench.fill()
    assert states_of(meeting) == ["reading"] * 3 + ["loading"]


def test_when_it_should_be_there(bench: Bench) -> None:
    bench.now_s = 100.0
    bench.others_blocks = 2
    meeting, _, _ = followed(bench)
    [whole] = meeting.line.pieces
    assert (whole.begin_s, whole.num_blocks) == (100.0, 10)
    assert whole.due_s == pytest.approx(100.0 + 10 * 0.99)
    assert bench.feed.free_s == pytest.approx(100.0 + 12 * 0.1)
    assert whole.late_s == pytest.approx(100.0 + 1.5 * 10 * 0.99 + 1.5 * 12 * 0.1 + 2 * LATE_S)
    [(at_s, _)] = bench.alarms
    assert whole.late_s < at_s <= whole.late_s + 0.01


def test_a_link_that_takes_longer_than_the_tier_says_when(bench: Bench) -> None:
    bench.know(1.0, 4.0, 1.1)
    meeting = bench.meeting([HERE] * 2 * BLOCKS + [BELOW] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    [whole] = meeting.line.pieces
    assert whole.due_s == pytest.approx(12.0)


def test_the_pass_begins_when_it_need_not_wait_for_the_tier(bench: Bench) -> None:
    """A quarter of the time that the tier should take before that."""
    bench.know(0.1, 4.0, 3.0)
    meeting = bench.meeting([BELOW] * BLOCKS, end_blocks=1)
    bench.fill()
    [copy], [read], [piece] = bench.copies, bench.reads, meeting.line.pieces
    step = bench.next(meeting)
    assert (step.reading, step.loads, step.piece) == (read, (), None)
    assert step.left_s == pytest.approx(12.0 - 4.0 - 3.0)
    assert not piece.awaited
    bench.now_s = 4.9
    assert bench.next(meeting).left_s == pytest.approx(0.1)
    bench.now_s = 5.1
    assert bench.next(meeting) == Step(None, (copy,))  # type: ignore[arg-type]
    assert piece.awaited


@pytest.mark.parametrize("why", ["read", "failed", "late"])
def test_it_waits_no_longer(bench: Bench, why: str) -> None:
    bench.know(0.1, 4.0, 3.0)
    meeting = bench.meeting([BELOW] * BLOCKS, end_blocks=1)
    bench.fill()
    [copy], [piece] = bench.copies, meeting.line.pieces
    if why == "read":
        copy.unread = set()
    elif why == "failed":
        copy.failed = True
    else:
        piece.late_s = 1.0
        assert bench.next(meeting).left_s == 1.0
        bench.now_s = 2.0
        copy.ends_when_cancelled = True
    assert bench.next(meeting).reading is None


def test_a_pass_over_a_piece_behind_it_begins_as_early_as_that_takes(bench: Bench) -> None:
    bench.know(0.1, 4.0, 3.0)
    meeting = bench.meeting([BELOW] * BLOCKS + [HERE] * BLOCKS, end_blocks=1)
    meeting.line.set(meeting.line.pieces[1], PieceState.LOST)
    bench.fill()
    assert bench.next(meeting).piece is meeting.line.pieces[1]  # 16 s
    assert states_of(meeting) == ["loading", "computed"]


def test_the_model_waits_for_it_although_it_is_not_submitted(bench: Bench) -> None:
    meeting, copy, _ = followed(bench)
    assert bench.next(meeting) == Step(None, (copy,))  # type: ignore[arg-type]
    assert meeting.line.pieces[0].awaited


def test_the_model_computes_what_comes_later_than_that(bench: Bench) -> None:
    """What is read for it is cancelled with its load."""
    meeting, copy, read = followed(bench)
    copy.ends_when_cancelled = True
    bench.rates.set_prefill(0.45 / 16)
    meeting._waits.for_rest = lambda *_, **__: True  # type: ignore[method-assign]
    step = bench.next(meeting)
    assert bench.cancelled == [copy]
    assert step.piece is meeting.line.pieces[1] and step.loads == (bench.copies[1],)  # type: ignore[comparison-overlap]
    assert states_of(meeting) == ["loading", "computed", "below"]
    assert read.cancelled


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_late_is_given_up_and_blamed_on_the_tier(bench: Bench, begun: bool) -> None:
    meeting, copy, read = followed(bench)
    if begun:
        bench.next(meeting)
    [whole] = meeting.line.pieces
    bench.now_s = whole.late_s
    bench.fill()
    assert (bench.failures, bench.late, read.cancelled) == ([], [], 0)
    bench.now_s = whole.late_s + 0.001
    bench.fill()
    bench.fill()
    assert len(bench.failures) == 1 and read.cancelled
    assert bench.late == [(TIER, 8 * BLOCK_BYTES, pytest.approx(bench.now_s))]
    copy.end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["loading", "below", "below"]  # nobody asks a tier that rests
    assert meeting._followed == {}
    meeting.compute_again()
    assert meeting._front == 0 and not any(piece.awaited for piece in meeting.line.pieces)
    step = bench.next(meeting)
    assert step.piece is meeting.line.pieces[1] and step.loads == (bench.copies[1],)  # type: ignore[comparison-overlap]


def test_late_over_the_link_is_blamed_on_the_link(bench: Bench) -> None:
    meeting, copy, _ = followed(bench)
    copy.unread, copy.num_unsubmitted = set(), 0
    copy.ends_when_cancelled = True
    bench.now_s = meeting.line.pieces[0].late_s + 1.0
    bench.next(meeting)
    assert [one[0] for one in bench.late] == [LINK]


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_tier_has_lost_is_computed(bench: Bench, begun: bool) -> None:
    meeting, copy, read = followed(bench)
    if begun:
        bench.next(meeting)
    bench.slots.update({key: 0 for key in read.keys[:BLOCKS]})
    copy.failed = True
    copy.end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["loading", "reading", "reading"]  # as far as it has come it is there at once


def test_what_was_computed_with_what_did_not_come_is_computed_again(bench: Bench) -> None:
    """What is before that is not."""
    bench.know(0.1, 4.0, 0.99)
    meeting = bench.meeting([BELOW] * 6 * BLOCKS, end_blocks=BLOCKS)
    meeting.line.set(meeting.line.pieces[0], PieceState.COMPUTED)
    bench.fill()
    assert states_of(meeting) == ["computed", "loading"]
    assert bench.next(meeting).loads == (bench.copies[0],)  # type: ignore[comparison-overlap]
    assert meeting.line.pieces[1].awaited
    bench.copies[0].failed = True
    bench.copies[0].end(State.FAILED)
    bench.fill()
    meeting.compute_again()
    assert (states_of(meeting)[0], meeting._front) == ("computed", 1)
    meeting.compute_again()  # of nothing it is known that it is wrong: all
    assert (states_of(meeting)[0], meeting._front) == ("lost", 0)


def test_behind_what_was_given_up_all_comes_piece_by_piece(bench: Bench) -> None:
    meeting, copy, _ = followed(bench)
    copy.failed = True
    copy.end(State.FAILED)
    bench.read_at_once = True
    bench.fill()
    assert bench.loaded[1:] == [[4, 7], [8, 11]]
    assert not meeting._followed


def test_the_end_drops_what_is_read_for_it(bench: Bench) -> None:
    meeting, copy, read = followed(bench)
    meeting.end()
    assert bench.cancelled == [copy]
    assert read.cancelled == 1


def test_a_look_when_it_is_late(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may come by: the model waits for a layer."""
    meeting, _, _ = followed(bench)
    bench.next(meeting)
    [(at_s, look)] = bench.alarms
    calls: list[Any] = []
    monkeypatch.setattr(bringing, "change", lambda books, function: calls.append(function()))
    bench.now_s = at_s
    look()
    assert (len(calls), len(bench.failures)) == (2, 1)


def test_a_part_of_host_memory_at_the_end_is_loaded_behind_a_failure(bench: Bench) -> None:
    bench.know(0.1, 4.0, 1.0)
    meeting = bench.meeting([BELOW] * BLOCKS + [HERE] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    assert bench.loaded == [[0, 7]]
    bench.copies[0].failed = True
    bench.copies[0].end(State.FAILED)
    bench.fill()
    assert states_of(meeting) == ["reading", "loading"]


def test_what_the_link_does_before_counts(bench: Bench) -> None:
    bench.know(1.0, 4.0, 0.5)
    bench.meeting([HERE] * BLOCKS, first_key=100, end_blocks=BLOCKS)
    bench.fill()
    assert bench.feed.free_s == pytest.approx(4.0)
    meeting = bench.meeting([BELOW] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    [piece] = meeting.line.pieces
    assert states_of(meeting) == ["loading"]
    assert piece.due_s == pytest.approx(8.0)
    assert piece.late_s == pytest.approx(1.5 * 2.0 + 1.5 * 8.0 + 2 * LATE_S)
    assert bench.feed.free_s == pytest.approx(8.0)


@pytest.mark.parametrize("link_s", [0.1, 1.4])
def test_whether_the_model_waits_is_asked_with_the_first_layer_that_comes(bench: Bench, link_s: float) -> None:
    bench.know(link_s, 4.0, 1.0)
    bench.others_blocks = 2
    meeting = bench.meeting([BELOW] * BLOCKS, end_blocks=BLOCKS)
    bench.fill()
    asked: list[tuple[float, ...]] = []
    meeting._waits.for_one = lambda *given: bool(asked.append(given[3:]) or True)  # type: ignore[method-assign,func-returns-value]
    bench.rates.observe_load(TIER, BLOCK_BYTES, 1.2)
    tier_s = bench.rates.snapshot().tier_s
    bench.next(meeting)
    due_s = meeting.line.pieces[0].due_s
    assert asked[0] == pytest.approx((max(0.0, due_s - BLOCKS * max(link_s, tier_s)), due_s, 0.0))


def test_the_model_waits_also_where_the_tier_was_slow_meanwhile(bench: Bench) -> None:
    meeting, copy, _ = followed(bench)
    bench.rates.observe_load(TIER, 1000 * BLOCK_BYTES, 2500.0)
    assert not bench.rates.snapshot().tier_waits
    assert bench.next(meeting).loads == (copy,)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("link_s", "tier_s"), [(0.01, 1.0), (1.0, 0.01)])
@pytest.mark.parametrize(("compute_s", "follows"), [(2.6, True), (2.4, False)])
def test_the_last_piece_is_followed_behind_what_is_read_before_it(
    bench: Bench, link_s: float, tier_s: float, compute_s: float, follows: bool
) -> None:
    """By tier or link, eight blocks of its own, and then four: in 12 s and a layer of a pass."""
    bench.know(link_s, compute_s, tier_s)
    meeting = bench.meeting([BELOW] * 3 * BLOCKS, end_blocks=1)
    to_compute(bench)
    bench.fill()
    assert states_of(meeting) == ["loading" if follows else "reading", "reading", "reading"]


def test_what_has_failed_is_blamed_on_nobody_else_while_some_of_it_still_runs(bench: Bench) -> None:
    meeting, copy, _ = followed(bench)
    bench.now_s = meeting.line.pieces[0].late_s + 1.0
    step = bench.next(meeting)
    assert step.leaving is copy  # type: ignore[comparison-overlap]
    assert [one[0] for one in bench.late] == [TIER]
