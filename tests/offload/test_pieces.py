"""What a request in chunks asks of its pieces: right, and in a time that does not grow with the prompt."""

from __future__ import annotations

import itertools
import math
import random
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from paddle_kv.offload import feeding
from paddle_kv.offload import pieces as pieces_module
from paddle_kv.offload.feed import Feed
from paddle_kv.offload.feeding import Meeting
from paddle_kv.offload.found import BlockState
from paddle_kv.offload.pieces import Line, Piece, PieceState, cut
from paddle_kv.offload.rates import TIER, Rates

SIZE = 16
PIECE_BLOCKS = 4
TO_COMPUTE = {PieceState.BELOW, PieceState.WAITING, PieceState.READING, PieceState.LOST}


def agree(line: Line) -> None:
    """With what going through all of them says."""
    pieces, stop = line.pieces, 0
    for piece in pieces:
        assert piece.start == stop
        stop = piece.stop
    assert line.num_to_compute == sum(one.size for one in pieces if one.state in TO_COMPUTE)
    assert line.num_reading == sum(one.size for one in pieces if one.state is PieceState.READING)
    assert line.num_below == sum(one.tier_blocks for one in pieces if one.state is PieceState.BELOW)
    for number, piece in enumerate(pieces):
        run = list(itertools.takewhile(lambda one: one.state is PieceState.WAITING, pieces[number:]))
        assert line.waiting_stop(piece.start) == (run[-1].stop if run else piece.start)
        assert line.at(piece.start) == number
    assert line.at(stop) == len(pieces)


@pytest.mark.parametrize("seed", range(5))
def test_a_line_says_what_going_through_it_says(seed: int) -> None:
    rng = random.Random(seed)
    bounds = sorted(rng.sample(range(1, 100), 12))
    line = Line([Piece(start, stop) for start, stop in itertools.pairwise([0, *bounds])])
    for piece in line.pieces:
        piece.tier_blocks = rng.randint(0, piece.size)
    wholes: list[Piece] = []
    for _ in range(300):
        number = rng.randrange(len(line.pieces))
        stop = line.at(line.waiting_stop(line.pieces[number].start))
        if wholes and rng.random() < 0.1:
            whole = wholes.pop(rng.randrange(len(wholes)))
            whole.awaited = rng.random() < 0.5
            line.part(whole, PieceState.LOST)
            assert {part.awaited for part in whole.parts} == {whole.awaited}
        elif stop > number and rng.random() < 0.3 and not any(one.parts for one in line.pieces[number:stop]):
            wholes.append(line.join(number, stop))
            assert {part.state for part in wholes[-1].parts} == {PieceState.LOADED}
            line.set(wholes[-1], rng.choice([PieceState.LOADING, PieceState.CANCELLED]))
        elif not line.pieces[number].parts and line.pieces[number].size > 1 and rng.random() < 0.05:
            piece = line.pieces[number]
            start, stop, state = piece.start, piece.stop, piece.state
            at, tier_blocks = rng.randrange(start + 1, stop), piece.tier_blocks
            front = line.split(piece, at, rng.randint(0, tier_blocks))
            assert line.pieces[number : number + 2] == [front, piece]
            assert (front.start, front.stop, piece.start, piece.stop) == (start, at, at, stop)
            assert (front.state, piece.state, front.tier_blocks + piece.tier_blocks) == (state, state, tier_blocks)
        elif not line.pieces[number].parts:
            line.set(line.pieces[number], rng.choice([*PieceState, *[PieceState.WAITING] * 5]))
        agree(line)
    assert Line([]).waiting_stop(0) == Line([]).at(0) == 0


class Owner:
    """Nothing moves: pieces are loaded at the will of the test."""

    closed = False

    def __init__(self, num_blocks: int) -> None:
        self.slots = {b"%d" % number: number for number in range(num_blocks)}
        self.index = SimpleNamespace(slots=self.slots, arriving={})
        self.feed = Feed()
        self.loads: list[int] = []
        self.scheduler = SimpleNamespace(
            device_cache=SimpleNamespace(spec=SimpleNamespace(num_layers=4)),
            resources=SimpleNamespace(take_events=lambda count: []),
            backend=None,
        )

    def onload(self, keys: list[bytes], device_ids: list[int], compute: Any, *, urgent: bool | None) -> Any:
        self.loads.append(len(keys))
        raise OSError("no link")


def meeting_of(num_pieces: int, load_s: float, states: Any = None) -> tuple[Meeting, Any]:
    count = num_pieces * PIECE_BLOCKS
    rates = Rates(1000, SIZE)
    rates.set_load("onload", 1000 / load_s)
    rates.set_prefill(1.0 / SIZE)
    books: Any = Owner(count)
    pieces = [Piece(start, start + PIECE_BLOCKS) for start in range(0, count, PIECE_BLOCKS)]
    keys, ids = list(books.slots), list(range(count))
    found = states or [BlockState.PRESENT] * count
    return Meeting(books, keys, ids, found, pieces, rates, None, (count + 1) * SIZE, PIECE_BLOCKS * SIZE), books  # type: ignore[arg-type]


class Operations:
    """Counts the instructions of Python that the modules of the package execute."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Operations:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "paddle_kv" not in frame.f_code.co_filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.count += event == "opcode"
        return self._opcode


def operations(num_pieces: int, states: Any = None) -> int:
    """Of a prompt whose pieces are all computed, since a load of the rest is never quicker."""
    meeting, books = meeting_of(num_pieces, 100.0, states)
    handed_out = []
    with Operations() as operations:
        while (step := meeting.next(books)).piece is not None:
            handed_out.append(step.piece.start)
    assert handed_out == list(range(0, num_pieces * PIECE_BLOCKS, PIECE_BLOCKS))
    assert books.loads == []
    return operations.count


@pytest.mark.parametrize("below", ["nothing", "a half", "all of it, brought by others"])
def test_what_comes_next_costs_the_same_in_long_prompts(below: str) -> None:
    def states(count: int) -> list[BlockState] | None:
        in_tier = {"nothing": 0, "a half": count // 2}.get(below, count)
        return [BlockState.TIER] * in_tier + [BlockState.PRESENT] * (count - in_tier) if in_tier else None

    short, long = (operations(count, states(count * PIECE_BLOCKS)) / count for count in (32, 256))
    assert long < 1.25 * short


def test_what_somebody_has_dropped_is_computed_and_the_rest_is_loaded() -> None:
    meeting, books = meeting_of(8, 1e-6)
    del books.slots[b"%d" % (2 * PIECE_BLOCKS + 1)]
    books.index.arriving[b"%d" % (5 * PIECE_BLOCKS)] = 7  # another one is about to bring it
    pieces = meeting.line.pieces.copy()
    step = meeting.next(books)  # its load fails: there is no link
    assert books.loads == [2 * PIECE_BLOCKS]
    assert step.piece is pieces[0]
    assert [pieces[number].state for number in (1, 2, 3, 5, 6)] == [
        PieceState.LOST,
        PieceState.LOST,
        PieceState.WAITING,
        PieceState.LOST,
        PieceState.WAITING,
    ]
    for number in range(1, 8):
        assert meeting.next(books).piece is pieces[number]
    assert books.loads == [2 * PIECE_BLOCKS] * 3
    assert meeting.next(books).piece is None
    assert meeting.lost_blocks == set(range(8 * PIECE_BLOCKS))


def test_a_piece_is_due_and_late_behind_what_is_before_it_on_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module.time, "monotonic", lambda: 100.0)
    rates: Any = SimpleNamespace(
        load_s=lambda count, source: 0.5 * count, late_s=lambda count, source, wait_s: 4.0 * (0.5 * count + wait_s)
    )
    piece = Piece(0, 4)
    for free_s, begin_s, late_s in ((0.0, 100.0, 106.0), (130.0, 130.0, 226.0)):
        piece.expect(3, rates, "onload", free_s)
        assert (piece.begin_s, piece.num_blocks) == (begin_s, 3)
        assert (piece.due_s, piece.late_s) == (begin_s + 1.5, late_s)


# ---- what is worth reading ----
class Part:
    """A piece, as a meeting looks at it when it asks what is to come from the tier."""

    def __init__(self, state: PieceState, start: int, due_s: float = 0.0, late_s: float = 1e9) -> None:
        self.state, self.start, self.stop, self.size = state, start, start + 4, 4
        self.due_s, self.late_s = due_s, late_s


NOW_S = 100.0
asked: list[tuple[float, float, float]] = []  # when the load begins, is there, and others are


@pytest.fixture(autouse=True)
def at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(feeding, "time", SimpleNamespace(monotonic=lambda: NOW_S))


def worth_reading(
    piece: Part,
    reading: list[Part],
    below: list[Part],
    *,
    tier: bool = True,
    link: bool = True,
    compute_s: float = 10.0,
    others_s: float = 0.0,
    free_s: float = 0.0,
    asked_until_s: float = 0.0,
) -> Any:
    """Each block takes a second from the tier, and a 64th of one over the link, which is free then."""
    snapshot = SimpleNamespace(tier_waits=tier, link_waits=link, tier_s=1.0, link_s=1 / 64)

    def comes_sooner(piece: Part, begin_s: float, there_s: float, others_s: float) -> bool:
        asked.append((begin_s, there_s, others_s))
        return there_s - NOW_S <= compute_s

    meeting: Any = SimpleNamespace(
        _rates=SimpleNamespace(snapshot=lambda: snapshot),
        _reading=dict.fromkeys(reading),
        _below=below,
        _comes_sooner=comes_sooner,
        _asked_until_s=asked_until_s,
    )
    books: Any = SimpleNamespace(feed=SimpleNamespace(free_s=free_s), num_reading_blocks=0)
    return Meeting._worth_reading(meeting, piece, books, others_s)  # type: ignore[arg-type]


def test_what_comes_from_the_tier_is_waited_for_where_both_ways_are_trusted() -> None:
    read = Part(PieceState.READING, 8, due_s=103.0)
    assert worth_reading(read, [read], []) is read
    assert asked.pop() == (103.0, 103.0625, 0.0)
    assert worth_reading(read, [read], [], free_s=105.0) is read  # the link has something to do until then
    assert asked.pop() == (105.0, 105.0625, 0.0)
    assert worth_reading(read, [read], [], free_s=105.0, others_s=105.0) is read  # beside what is awaited all the same
    assert asked.pop() == (103.0, 105.0625, 105.0)
    assert worth_reading(read, [read], [], compute_s=3.0) is None
    assert worth_reading(read, [read], [], asked_until_s=109.0) is read  # they come in order, as far as is known
    overdue = Part(PieceState.READING, 8, due_s=99.0)
    assert worth_reading(overdue, [overdue], []) is overdue
    assert asked.pop() == (100.0, 100.0625, 0.0)
    assert worth_reading(overdue, [overdue], [], asked_until_s=105.0) is overdue  # others came first
    assert asked.pop() == (105.0, 105.0625, 0.0)
    assert worth_reading(overdue, [overdue], [], asked_until_s=110.0) is None
    for trusted in ({"tier": False}, {"link": False}):
        assert worth_reading(read, [read], [], **trusted) is None
    assert worth_reading(read, [], []) is None  # nothing is on its way
    late = Part(PieceState.READING, 8, late_s=99.0)
    assert worth_reading(late, [late], []) is None
    unknown = Part(PieceState.READING, 8, late_s=math.inf)  # it would be waited for without end
    assert worth_reading(unknown, [unknown], []) is None
    assert worth_reading(Part(PieceState.BELOW, 4), [unknown], [Part(PieceState.BELOW, 4)]) is None


def test_of_what_lies_below_what_comes_before_it_counts() -> None:
    read = Part(PieceState.READING, 16)
    first, last = Part(PieceState.BELOW, 4), Part(PieceState.BELOW, 8)
    assert worth_reading(last, [read], [first, last]) is read  # behind four blocks
    assert worth_reading(first, [read], [first, last]) is read  # behind eight
    assert worth_reading(first, [read], [first, last], compute_s=7.9) is None
    assert worth_reading(last, [read], [first, last], compute_s=7.9) is read
    assert worth_reading(first, [read], [last]) is None  # it is no longer to be read
    assert worth_reading(Part(PieceState.LOST, 8), [read], [first, last]) is None


def test_only_what_was_waited_for_is_late_if_its_time_is_over_still() -> None:
    log: list[Any] = []
    parts = [Part(PieceState.READING, start, late_s=late_s) for start, late_s in ((0, 100.0), (4, 1.0), (8, 100.5))]
    waited, other = SimpleNamespace(), SimpleNamespace()
    meeting: Any = SimpleNamespace(
        _reading=dict(zip(parts, (waited, other, waited), strict=True)),
        _look_at_reading=lambda: log.append("look"),  # books what has come, which may give others more time
        _tell_late=lambda piece, source: log.append((piece, source)),
        _leave=lambda piece, state: log.append((piece, state)),
    )
    Meeting.read_late(meeting, waited)  # type: ignore[arg-type]
    assert log == ["look", (parts[0], TIER), (parts[0], PieceState.LOST)]


@pytest.mark.parametrize(
    ("known", "num_blocks", "expected"),
    [
        ("nothing", 7, [(0, 3), (3, 6), (6, 7)]),
        ("nothing", 6, [(0, 3), (3, 5), (5, 6)]),
        ("nothing", 3, [(0, 2), (2, 3)]),
        ("nothing", 1, [(0, 1)]),
        ("saves", 7, [(0, 3), (3, 6), (6, 7)]),
        ("saves", 6, [(0, 3), (3, 6)]),
        ("saves", 3, [(0, 2), (2, 3)]),
        ("saves", 2, [(0, 1), (1, 2)]),
        ("saves", 1, [(0, 1)]),
        ("trusted", 6, [(0, 3), (3, 6)]),
        ("trusted", 3, [(0, 3)]),
        ("trusted", 0, []),
        ("nothing", 0, []),
    ],
)
def test_a_prefix_is_cut_so_that_something_is_heard_of_the_link(
    known: str, num_blocks: int, expected: list[tuple[int, int]]
) -> None:
    rates = Rates(1000, 16, lambda: 0.0)
    if known == "saves":
        rates.observe_save(1000, 0.001)
    elif known == "trusted":
        rates.set_load("onload", 1e6)
    assert [(piece.start, piece.stop) for piece in cut([BlockState.PRESENT] * num_blocks, 3, rates)] == expected


@pytest.mark.parametrize(
    ("load_s", "num_blocks", "last_blocks"),
    [(0.1, 8, 4), (0.1, 7, 3), (1.5, 8, 3), (1.9, 9, 3), (2.1, 9, 2), (9.0, 9, 1), (1.5, 1, 1)],
)
def test_and_the_part_by_itself_comes_while_the_model_computes_the_other(
    load_s: float, num_blocks: int, last_blocks: int
) -> None:
    """A block takes a second to be computed."""
    rates = Rates(1000, 16, lambda: 0.0)
    rates.observe_save(1000, load_s)
    rates.set_prefill(1 / 16)
    assert cut([BlockState.PRESENT] * num_blocks, 16, rates)[-1].size == last_blocks


H, T = BlockState.PRESENT, BlockState.TIER


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([H] * 4 + [T] * 4, [(0, 3), (3, 4), (4, 6), (6, 8)]),
        ([H] * 5 + [T], [(0, 3), (3, 5), (5, 6)]),
        ([H, T, H, T], [(0, 1), (1, 3), (3, 4)]),  # behind a block that waits it waits as well
        ([H] * 3 + [T] * 2, [(0, 3), (3, 5)]),
        ([T] * 4 + [H], [(0, 3), (3, 5)]),
        ([H] * 4, [(0, 3), (3, 4)]),
    ],
)
def test_blocks_in_host_memory_do_not_wait_for_the_tier_in_one_piece(
    states: list[BlockState], expected: list[tuple[int, int]]
) -> None:
    rates = Rates(1000, 16, lambda: 0.0)
    rates.set_load("onload", 1e6)
    rates.set_prefill(1e-3)
    assert [(piece.start, piece.stop) for piece in cut(states, 3, rates)] == expected


def test_how_soon_is_asked_of_the_blocks_in_host_memory_where_they_are() -> None:
    rates = Rates(1000, 16, lambda: 0.0)
    rates.set_load("onload", 1e5)  # 10 ms a block
    rates.set_prefill(1e-4, 5.2e-6)
    asked = [(piece.start, piece.stop) for piece in cut([H] * 33 + [T] * 3, 4, rates)]
    assert asked[-2:] == [(32, 33), (33, 36)]  # to compute it there takes 45 ms, and the first one 2
    assert [(piece.start, piece.stop) for piece in cut([H] + [T] * 3, 4, rates)] == [(0, 4)]


@pytest.mark.parametrize("why", ["the link is little quicker", "the link is not trusted", "the model is not known"])
def test_they_are_one_piece_where_they_may_be_computed_together(why: str) -> None:
    rates = Rates(1000, 16, lambda: 0.0)
    if why == "the link is not trusted":
        rates.observe_save(1000, 1e-3)
    else:
        rates.set_load("onload", 1e6 / 4 if why == "the link is little quicker" else 1e6)
    if why != "the model is not known":
        rates.set_prefill(1e-3)
    assert [(piece.start, piece.stop) for piece in cut([H] * 4 + [T] * 5, 3, rates)] == [(0, 3), (3, 6), (6, 9)]
