"""Alarms: each in its time, whatever the others do, and none behind the end."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from paddle_kv.tracking.alarms import Alarms
from tests.schedule.rig import WAIT_S, threads_since


class Clock:
    """Time passes only while nothing is given to the thread, which begins when all is given."""

    def __init__(self) -> None:
        self.now_s, self.looks = 100.0, 0
        self.all_given = threading.Event()
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put = self._given.put

    def monotonic(self) -> float:
        return self.now_s

    def get(self, timeout: float | None) -> Any:
        assert self.all_given.wait(WAIT_S)
        self.looks += 1
        if timeout is None:
            return self._given.get()
        try:
            return self._given.get_nowait()
        except queue.Empty:
            self.now_s += timeout
            raise


def test_each_comes_in_its_time_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    monkeypatch.setattr("paddle_kv.tracking.alarms.time", clock)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    alarms = Alarms("alarms of a test")
    alarms._given = clock
    for at_s, name in (
        (107.0, "last"),
        (103.0, "first of two"),
        (103.0, "second of two"),
        (103.25, "soon"),
        (99.0, "past"),
    ):
        alarms.add(at_s, lambda name=name: told.put((clock.now_s, name)))
    clock.all_given.set()
    expected = [(100.0, "past"), (103.0, "first of two"), (103.0, "second of two"), (103.25, "soon"), (107.0, "last")]
    assert [told.get(timeout=WAIT_S) for _ in expected] == expected
    alarms.close()
    assert clock.looks <= 5 + 3 + 1  # for each that it is given, for each time that it waits for, for the end


def test_one_thread_from_the_first_alarm_to_the_end() -> None:
    before = set(threading.enumerate())
    alarms = Alarms("alarms of a test")
    assert not threads_since(before)
    rang = threading.Event()
    alarms.add(1e300, rang.set)  # further away than a thread can wait
    alarms.add(time.monotonic() + 1000.0, rang.set)
    [thread] = threads_since(before)
    assert (thread.name, thread.daemon) == ("alarms of a test", True)
    alarms.close()
    assert not thread.is_alive() and not rang.is_set()
    alarms.close()
    Alarms("of which none was asked for").close()
    assert not threads_since(before)


def test_an_alarm_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    alarms, rang = Alarms("alarms of a test"), threading.Event()
    alarms.add(0.0, lambda: 1 // 0)
    alarms.add(0.0, rang.set)
    assert rang.wait(WAIT_S)
    alarms.close()
    assert [record.getMessage() for record in caplog.records] == ["an error in alarms of a test"]


def test_an_alarm_may_end_them_all() -> None:
    alarms, ended = Alarms("alarms of a test"), threading.Event()

    def end() -> None:
        alarms.close()
        ended.set()

    alarms.add(0.0, end)
    assert ended.wait(WAIT_S)
    alarms.close()


def test_a_thread_that_could_not_begin_begins_with_the_next_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    alarms, heard = Alarms("alarms of a test"), queue.SimpleQueue[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            alarms.add(0.0, lambda: heard.put("refused"))
    alarms.add(0.0, lambda: heard.put("taken"))
    assert heard.get(timeout=WAIT_S) == "taken"
    alarms.close()
