"""Alarms: each in its time, whatever the others do, and none behind the end."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from paddle_kv.tracking.alarms import Alarms
from tests.schedule.rig import SHORT_S, WAIT_S, threads_since


class Counted:
    """What is given to a thread, and how often it looks."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.looks = 0
        self.put = self._given.put

    def get(self, timeout: float | None) -> Any:
        self.looks += 1
        return self._given.get(timeout=timeout)


def test_each_comes_in_its_time_and_not_before() -> None:
    alarms, told = Alarms("alarms of a test"), queue.SimpleQueue[tuple[str, float]]()
    given: Any = Counted()
    alarms._given = given
    now_s = time.monotonic()
    due_s = {
        "late": now_s + 2 * SHORT_S,
        "first of two": now_s + SHORT_S,
        "second of two": now_s + SHORT_S,
        "past": 0.0,
    }
    for name in due_s:
        alarms.add(due_s[name], lambda name=name: told.put((name, time.monotonic())))
    found = [told.get(timeout=WAIT_S) for _ in due_s]
    assert [name for name, _ in found] == ["past", "first of two", "second of two", "late"]
    assert all(at_s >= due_s[name] for name, at_s in found)
    assert given.looks <= 12  # it sleeps in between
    alarms.close()


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
