"""The C function that submits a transfer that comes alone: in one step, or nothing of it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.backend import transfer_queue
from paddle_kv.ops import _library
from tests.backend.test_queue_calls import Transfer, numbers

SUBMIT_ALONE = _library.queue_functions()["submit_alone"]


def id_bytes(*ids: int) -> bytearray:
    return bytearray(array("q", ids).tobytes())


class Queue:
    """In place of the library, and the group of the transfer. ``asked``: what was recorded, and all of what was
    submitted, each with what the group and the reports were at that time."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(sections=5, _inside=None, alone=None)
        self.reports: dict[int, Any] = {7: "another one"}
        self.reserve: list[Any] = ["events"]
        self.asked: list[Any] = []
        self.capturing_result = self.record_result = self.submit_result = 0
        one = ctypes.c_int64
        self._submit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Transfer))(self._note_submit)
        self._capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, one)(self._note_capturing)
        self._record = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, one, one)(self._note_record)

    @property
    def moved(self) -> list[Any]:
        """But for the question whether the stream is captured."""
        return [one for one in self.asked if one[0] != "capturing"]

    def _note(self, *what: Any) -> None:
        self.asked.append((*what, self.group.alone, dict(self.reports)))

    def _note_capturing(self, *given: int) -> int:
        self._note("capturing", given)
        return self.capturing_result

    def _note_record(self, *given: int) -> int:
        self._note("record", given)
        return self.record_result

    def _note_submit(self, pointer: Any) -> int:
        given = pointer.contents
        fields = {name: getattr(given, name) for name, _ in given._fields_}
        counts = {"device_ids": 2, "host_ids": 2, "wait_events": 1, "waits_per_group": 3, "record_events": 3}
        self._note("submit", {**fields, **{name: numbers(fields[name], count) for name, count in counts.items()}})
        return self.submit_result

    def arguments(self) -> list[Any]:
        functions = [ctypes.cast(one, ctypes.c_void_p).value for one in (self._submit, self._capturing, self._record)]
        events = array("q", [11, 12, 13, 14, 15])
        plan = [1, 0, 2, id_bytes(3, 4), id_bytes(6, 5), 6, 2, events, 21, 22, 23, 24]
        return [*functions, *plan, self.reports, 25, "report", self.group, 5, "the transfer", self.reserve]


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_it_is_known_of_when_it_is_submitted_behind_the_compute_stream(queue: Queue) -> None:
    assert SUBMIT_ALONE(*queue.arguments()) is True
    known = ("the transfer", {7: "another one", 25: "report"})
    submitted = {
        "plan": 1,
        "direction": 0,
        "engine": 2,
        "device_ids": [3, 4],
        "host_ids": [6, 5],
        "block_count": 2,
        "first_layer": 0,
        "end_layer": 6,
        "layers_per_event": 2,
        "wait_events": [11],
        "waits_per_group": [1, 0, 0],
        "start_event": 12,
        "record_events": [13, 14, 15],
        "stream": 21,
        "token": 22,
        "watch": 25,
    }
    asked = ("capturing", (23, 24), None, {7: "another one"})
    assert queue.asked == [asked, ("record", (23, 11, 24), *known), ("submit", submitted, *known)]
    assert (queue.group.alone, queue.reports) == known and queue.reserve == []


CHANGES: dict[str, Callable[[SimpleNamespace], None]] = {
    "a section has begun": lambda group: setattr(group, "sections", 6),
    "the group is part of another one": lambda group: setattr(group, "sections", -1),
    "a section runs": lambda group: setattr(group, "_inside", 140_000),
    "another one is alone": lambda group: setattr(group, "alone", "another transfer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_happens_if_the_group_is_not_as_it_was(queue: Queue, change: str) -> None:
    CHANGES[change](queue.group)
    before = vars(queue.group).copy()
    assert SUBMIT_ALONE(*queue.arguments()) is False
    assert queue.asked == [] and vars(queue.group) == before and queue.reports == {7: "another one"}
    assert queue.reserve == ["events"]


@pytest.mark.parametrize("call", ["record", "submit"])
def test_nobody_knows_of_one_that_could_not_be_submitted(queue: Queue, call: str) -> None:
    setattr(queue, f"{call}_result", -1)
    assert SUBMIT_ALONE(*queue.arguments()) is False
    assert [name for name, *_ in queue.asked] == ["capturing", "record", "submit"][: 2 + (call == "submit")]
    assert queue.group.alone is None and queue.reports == {7: "another one"}


@pytest.mark.parametrize("result", [1, -1])
def test_a_stream_that_is_captured_is_only_asked_whether_it_is(queue: Queue, result: int) -> None:
    queue.capturing_result = result
    assert SUBMIT_ALONE(*queue.arguments()) is False
    assert [name for name, *_ in queue.asked] == ["capturing"] and queue.group.alone is None


class Refusing:
    """A group that cannot be told."""

    sections, _inside = 5, None

    @property
    def alone(self) -> None:
        return None


def test_a_group_that_cannot_be_told_is_an_error(queue: Queue) -> None:
    given = queue.arguments()
    given[18] = Refusing()
    with pytest.raises(AttributeError):
        SUBMIT_ALONE(*given)
    assert queue.moved == [] and queue.reports == {7: "another one"}


@pytest.mark.parametrize(
    ("at", "wrong", "words"),
    [
        (3, "plan", "int"),
        (6, [3, 4], "bytes-like|buffer"),
        (6, bytearray(15), "bytes of int64"),
        (7, id_bytes(6), "as many"),
        (8, 0, "of each group"),
        (9, 0, "of each group"),
        (9, 1, "of each group"),
        (10, [11, 12], "of each group"),
        (10, array("q", [11, 12, 13, 14]), "of each group"),
        (10, 11, "a list, a tuple or an array of int64"),
        (10, [11, 12, None], "int"),
        (14, 2**63, "large|big|convert"),
        (15, [], "argument|call|expected"),
        (16, "token", "int"),
        (18, None, "no attribute"),
        (21, None, "no list"),
    ],
)
def test_arguments_that_cannot_be_right_reach_nobody(queue: Queue, at: int, wrong: Any, words: str) -> None:
    given = queue.arguments()
    given[at] = wrong
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError, AttributeError, SystemError), match=words):
        SUBMIT_ALONE(*given)
    with pytest.raises(TypeError, match="22 arguments"):
        SUBMIT_ALONE(*given[:-1])
    assert queue.moved == [] and queue.group.alone is None and queue.reports == {7: "another one"}


def test_what_is_left_of_those_arguments_is_the_librarys(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> None:
    """Its own two functions, and the answer as it is."""
    given = queue.arguments()
    names = [f"paddle_kv_queue_{name}" for name in ("submit", "is_capturing", "record")]
    addresses = dict(zip(names, given[:3], strict=True))
    library = SimpleNamespace(**{name: ctypes.c_void_p(address) for name, address in addresses.items()})
    monkeypatch.setattr(transfer_queue, "_functions", lambda: library)
    transfer_queue._submit_alone.cache_clear()
    try:
        assert transfer_queue.submit_alone(*given[3:]) is True
        assert transfer_queue.submit_alone(*given[3:]) is False
    finally:
        transfer_queue._submit_alone.cache_clear()
    assert [name for name, *_ in queue.asked] == ["capturing", "record", "submit"]
