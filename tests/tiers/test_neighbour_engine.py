"""Whom the engine asks for what, and what it does with the answers: the test plays the lenders."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from paddle_kv.testing.tiers.rig import WAIT_S
from paddle_kv.tiers import Outcome, at_exit
from paddle_kv.tiers.neighbours import NeighbourEngine
from paddle_kv.tiers.neighbours import engine as engine_module
from paddle_kv.tiers.neighbours.messages import MOST_NAMES
from paddle_kv.tiers.neighbours.neighbour import Answer
from paddle_kv.tracking.keeper import Deadline
from tests.peers.conftest import until

SIZE_BYTES = 100


class PlayedMemory:
    """Copies wait until it is opened."""

    num_blocks, object_bytes = 20, SIZE_BYTES

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.copied: list[tuple[int, int]] = []

    def copy(self, block_id: int, offset: int, _: Sequence[memoryview]) -> None:
        self.copied.append((block_id, offset))
        assert self.opened.wait(WAIT_S / 4)


@dataclass(eq=False)
class PlayedNeighbour:
    names: set[bytes]
    path: str = "/nobody"
    memory: PlayedMemory | None = field(default_factory=PlayedMemory)
    asked: bool = True
    told: bool = True
    num_reading: int = 0
    busy: list[Any] = field(default_factory=list)
    removed: int = 0
    errors: int = 0
    refused: int = 0
    questions: list[tuple[list[Any], float, Callable[[Answer | None], object]]] = field(default_factory=list)
    num_done: int = 0

    def ask(self, items: list[Any], timeout_s: float, answered: Callable[[Answer | None], object]) -> None:
        self.questions.append((items, timeout_s, answered))

    def close(self) -> None:
        pass

    def _done(self) -> None:
        self.num_done += 1


@dataclass(eq=False)
class Item:
    """One that is read in two stages."""

    name: bytes
    size_bytes: int = SIZE_BYTES
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    wanted: bool = True
    enough: int | None = None  # the stage behind which nothing more is wanted
    num_stages: int = 2
    aligned: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)

    def stage_bytes(self, stage: int) -> int:
        return self.size_bytes // 2

    def buffers(self, stage: int) -> tuple[int, list[memoryview]] | None:
        return (stage * self.size_bytes // 2, []) if self.wanted else None

    def arrived(self, stage: int) -> bool:
        self.stages.append(stage)
        return stage != self.enough

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Played:
    """An engine between the test and these lenders."""

    def __init__(self, *lenders: PlayedNeighbour) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="paddle_kv-")
        self.engine = NeighbourEngine([os.path.join(self.folder.name, "nobody")])
        self.own = self.engine._neighbours
        self.lenders = list(lenders)
        self.engine._neighbours = self.lenders  # type: ignore[assignment]

    def wait(self) -> None:
        """Until its channel has done what it was given."""
        done = threading.Event()
        self.engine._loop.post(done.set)
        assert done.wait(WAIT_S)

    def read(self, *items: Item) -> None:
        self.engine.read(items)
        self.wait()

    def answer(self, lender: PlayedNeighbour, blocks: Sequence[int] | None) -> None:
        """Of its first question that has none: as the message says it."""
        items, _, answered = lender.questions.pop(0)
        answer = None
        if blocks is not None:
            pairs = list(zip(items, blocks, strict=True))
            absent, busy = ([item for item, block in pairs if block == wrong] for wrong in (-1, -2))
            found = [(item, block) for item, block in pairs if block >= 0]
            answer = Answer(lender.memory, found, absent, busy, lender._done)  # type: ignore[arg-type]
        self.engine._loop.post(lambda: answered(answer))
        self.wait()


@contextmanager
def played(*lenders: PlayedNeighbour) -> Iterator[Played]:
    made = Played(*lenders)
    yield made
    for one in lenders:
        if one.memory is not None:
            one.memory.opened.set()
    made.engine.close(WAIT_S)
    for own in made.own:
        own.close()
    made.folder.cleanup()


def items(*names: bytes) -> list[Item]:
    return [Item(name) for name in names]


def asked(lender: PlayedNeighbour) -> list[list[bytes]]:
    return [[item.name for item in some] for some, _, _ in lender.questions]


def test_the_first_one_that_has_it_is_asked() -> None:
    one, two = PlayedNeighbour({b"a"}), PlayedNeighbour({b"a", b"b"})
    with played(one, two) as engine:
        wanted = items(b"b", b"a", b"c")
        engine.read(*wanted)
        assert (asked(one), asked(two)) == ([[b"a"]], [[b"b"]])
        assert [item.outcomes for item in wanted] == [[], [], [Outcome.MISSING]]
        assert engine.engine.exists([b"a", b"c", b"b"]) == [True, False, True]


@pytest.mark.parametrize("why", ["silent", "size"])
def test_what_only_others_could_have_has_failed(why: str) -> None:
    one, two = PlayedNeighbour({b"a"}), PlayedNeighbour({b"b"})
    if why == "silent":
        one.asked = False
    else:
        one.memory.object_bytes = 99  # type: ignore[union-attr]
    with played(one, two) as engine:
        wanted = items(b"a", b"b", b"c")
        engine.read(*wanted)
        assert (asked(one), asked(two)) == ([], [[b"b"]])
        assert [item.outcomes for item in wanted] == [[Outcome.FAILED], [], [Outcome.MISSING]]
        assert engine.engine.exists([b"a", b"b"]) == [why == "size", True]
        assert engine.engine.stats()["resting_roots"] == (why == "silent")


def test_nobody_who_is_there_has_anything() -> None:
    with played(PlayedNeighbour({b"a"}, asked=False, memory=None)) as engine:
        assert engine.engine.exists([b"a", b"b"]) == [False, False]
        assert engine.engine.stats()["objects"] == 0


@pytest.mark.parametrize(
    ("size_bytes", "count", "batches"),
    [(8 << 20, 5, [2, 2, 1]), (17 << 20, 2, [1, 1]), (SIZE_BYTES, MOST_NAMES + 1, [MOST_NAMES, 1])],
)
def test_sixteen_megabytes_are_asked_for_together(size_bytes: int, count: int, batches: list[int]) -> None:
    names = [b"%d" % number for number in range(count)]
    lender = PlayedNeighbour(set(names))
    lender.memory.object_bytes = size_bytes  # type: ignore[union-attr]
    with played(lender) as engine:
        engine.read(*(Item(name, size_bytes) for name in names))
        assert list(map(len, asked(lender))) == batches
        assert [name for some in asked(lender) for name in some] == names


@pytest.mark.parametrize(
    ("timeouts_s", "expected"), [([None], 60.0), ([1.0, 5.0, 2.0], 5.0), ([5.0, None], 60.0), ([99.0], 60.0)]
)
def test_a_question_is_as_long_as_its_longest_object(timeouts_s: list[float | None], expected: float) -> None:
    lender = PlayedNeighbour({b"a"})
    with played(lender) as engine:
        engine.read(*(Item(b"a", deadline=Deadline(one)) for one in timeouts_s))
        [(_, timeout_s, _)] = lender.questions
        assert expected - 1.0 < timeout_s <= expected
        assert timeout_s == expected or expected != 60.0


def test_what_is_late_is_not_asked_for() -> None:
    lender = PlayedNeighbour({b"a"})
    with played(lender) as engine:
        late = Item(b"a", deadline=Deadline(0.0))
        engine.read(late)
        assert (late.outcomes, asked(lender)) == ([Outcome.LATE], [])


def test_stages_come_one_behind_the_other() -> None:
    lender = PlayedNeighbour({b"a", b"b", b"c", b"d"})
    with played(lender) as engine:
        wanted = items(b"a", b"b", b"c", b"d")
        wanted[1].wanted = False
        wanted[2].enough = 0
        engine.read(*wanted)
        engine.answer(lender, [3, 4, 5, 6])
        until(lambda: lender.num_reading == 0)
        done, dropped = [Outcome.DONE], [Outcome.DROPPED]
        assert [item.outcomes for item in wanted] == [done, dropped, done, done]
        assert [item.stages for item in wanted] == [[0, 1], [], [0], [0, 1]]
        assert lender.memory is not None
        assert lender.memory.copied == [(3, 0), (5, 0), (6, 0), (3, 50), (6, 50)]
        assert lender.num_done == 1


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_what_raises_is_logged_and_ends_what_was_copied_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def broken(stage: int) -> Any:
        raise kind("of an item")

    lender = PlayedNeighbour({b"a", b"b", b"c"})
    monkeypatch.setattr(engine_module, "PART_BYTES", SIZE_BYTES)  # two objects
    with played(lender) as engine:
        wanted = items(b"a", b"b", b"c")
        monkeypatch.setattr(wanted[1], "buffers", broken)
        engine.read(*wanted)
        engine.answer(lender, [3, 4, 5])
        until(lambda: lender.num_reading == 0)
        assert [item.outcomes for item in wanted] == [[Outcome.FAILED], [Outcome.FAILED], [Outcome.DONE]]
        [record] = caplog.records
        assert "while blocks came from a neighbour" in record.getMessage()
        assert record.exc_info


def test_what_one_has_lost_is_asked_of_the_next_one() -> None:
    one, two = PlayedNeighbour({b"a", b"b"}), PlayedNeighbour({b"b"})
    with played(one, two) as engine:
        wanted = items(b"a", b"b")
        engine.read(*wanted)
        one.names.clear()
        engine.answer(one, [-1, -1])
        assert [item.outcomes for item in wanted] == [[Outcome.MISSING], []]
        assert asked(two) == [[b"b"]]
        assert (one.num_done, one.num_reading) == (1, 0)  # nothing of it is read


def test_what_one_does_not_answer_is_asked_of_the_next_one() -> None:
    one, two = PlayedNeighbour({b"a", b"b"}), PlayedNeighbour({b"b"})
    with played(one, two) as engine:
        wanted = items(b"a", b"b")
        engine.read(*wanted)
        one.asked = False
        one.names.clear()
        engine.answer(one, None)
        assert [item.outcomes for item in wanted] == [[Outcome.FAILED], []]
        assert asked(two) == [[b"b"]]


def test_what_was_too_much_is_asked_for_again_behind_what_is_read() -> None:
    lender = PlayedNeighbour({b"a", b"b", b"c", b"d"})
    with played(lender) as engine:
        assert lender.memory is not None
        lender.memory.opened.clear()
        wanted = items(b"a", b"b", b"c", b"d")
        for some in (wanted[:2], wanted[2:3], wanted[3:]):
            engine.read(*some)
        engine.answer(lender, [1, -2])
        engine.answer(lender, [2])
        engine.answer(lender, [-2])
        assert lender.num_reading == 2
        assert [item.name for item in lender.busy] == [b"b", b"d"]
        assert lender.questions == []
        lender.memory.opened.set()
        until(lambda: lender.num_reading == 0)
        assert asked(lender) == [[b"b", b"d"]]
        assert lender.busy == []
        engine.answer(lender, [-2, -2])  # and others read so much by now
        assert lender.busy == []
        assert [item.outcomes for item in wanted] == [
            [Outcome.DONE],
            [Outcome.DROPPED],
            [Outcome.DONE],
            [Outcome.DROPPED],
        ]
        assert lender.num_done == 4  # each answer once


def test_a_closed_engine_drops_each_object_once() -> None:
    lender = PlayedNeighbour({b"a", b"b"})
    with played(lender) as engine:
        busy, late, later = items(b"a", b"b", b"a")
        engine.read(late)
        lender.busy = [busy]
        engine.engine.close(WAIT_S)
        engine.engine.close(WAIT_S)
        lender.questions[0][2](None)  # as of a lender that is hung up on
        engine.engine.read([later])
        assert [item.outcomes for item in (busy, late, later)] == [[Outcome.DROPPED]] * 3
        assert not engine.engine._loop._thread.is_alive()
        assert not any(thread.is_alive() for thread in engine.engine._threads)


def test_a_wrong_time_closes_nothing() -> None:
    lender = PlayedNeighbour({b"a"})
    with played(lender) as engine:
        with pytest.raises(TypeError, match="timeout_s"):
            engine.engine.close("soon")  # type: ignore[arg-type]
        engine.read(*items(b"a"))
        assert asked(lender) == [[b"a"]]


def test_an_engine_is_closed_behind_its_block() -> None:
    with NeighbourEngine(["nobody"]) as engine:
        assert len(engine._threads) == 2
        assert engine in at_exit.engines  # closes it where nobody does
    assert not engine._loop._thread.is_alive()
    with NeighbourEngine(["nobody"], threads=engine_module.MOST_THREADS) as engine:
        assert len(engine._threads) == 64


def test_who_is_missing_is_named() -> None:
    lenders = [PlayedNeighbour(set(), path="/here"), PlayedNeighbour(set(), path="/there", told=False)]
    with played(*lenders) as engine:
        with pytest.raises(TimeoutError, match=r"nobody lends at \['/there'\]"):
            engine.engine.wait_connected(0.0)
        lenders[1].told = True
        engine.engine.wait_connected(0.0)


def test_a_number_is_that_of_all_lenders_together() -> None:
    lenders = [
        PlayedNeighbour({b"a", b"b"}, removed=2, errors=3, refused=5),
        PlayedNeighbour({b"c"}, removed=20, errors=30, refused=50),
        PlayedNeighbour(set(), memory=None, asked=False, removed=200, errors=300, refused=500),
    ]
    with played(*lenders) as engine:
        assert engine.engine.stats() == {
            "objects": 3,
            "used_bytes": 3 * SIZE_BYTES,
            "capacity_bytes": 40 * SIZE_BYTES,
            "evicted": 222,
            "errors": 333,
            "resting_roots": 1,
            "refused_messages": 555,
        }
