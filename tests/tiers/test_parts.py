"""What a tier is made of, each part by itself: counts, what rests after errors, and the end of each job's time."""

from __future__ import annotations

import errno
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv.tiers import deadlines, health
from paddle_kv.tiers.counters import LATENCY_BOUNDS_S, Counters
from paddle_kv.tiers.deadlines import Deadlines
from paddle_kv.tiers.health import FIRST_REST_S, LONGEST_REST_S, MOST_IN_A_ROW, OF_ONE_OBJECT, Health
from paddle_kv.tiers.protocol import Outcome
from tests.schedule.rig import SHORT_S, WAIT_S, threads_since


# ---- counts ----
def test_what_is_counted() -> None:
    counters = Counters()
    expected: dict[str, Any] = {
        **{f"{kind}_{outcome.value}": 0 for kind in ("store", "load") for outcome in Outcome},
        "store_bytes": 0,
        "load_bytes": 0,
        "store_seconds": 0.0,
        "load_seconds": 0.0,
        "store_latency": [0] * (len(LATENCY_BOUNDS_S) + 1),
        "load_latency": [0] * (len(LATENCY_BOUNDS_S) + 1),
    }
    assert counters.as_dict() == expected
    each = [outcome for number, outcome in enumerate(Outcome) for _ in range(number + 1)]
    counters.ended("load", each[:5], 10)
    counters.ended("load", each[5:], 10)
    counters.ended("load", [], 10)
    counters.ended("store", [Outcome.DONE], 7)
    counters.job("load", LATENCY_BOUNDS_S[2])  # at most so long
    counters.job("load", 1e6)
    counters.job("store", 0.0)
    found = counters.as_dict()
    expected |= {f"load_{outcome.value}": number + 1 for number, outcome in enumerate(Outcome)}
    expected |= {"store_done": 1, "store_bytes": 7, "load_bytes": 10 * expected["load_done"]}
    expected["load_seconds"] = LATENCY_BOUNDS_S[2] + 1e6
    expected["load_latency"][2] = expected["load_latency"][-1] = expected["store_latency"][0] = 1
    assert found == expected
    found["load_latency"][0] = 99  # a copy
    assert counters.as_dict() == expected
    assert list(LATENCY_BOUNDS_S) == sorted(LATENCY_BOUNDS_S)


# ---- rest ----
class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(health, "time", made)
    return made


def test_a_rest_is_asked_for_by_a_fault_alone(clock: Clock) -> None:
    clock.now_s = 0.5  # a machine that has just started
    one = Health("x")
    assert not one.resting
    one.failed(OSError(errno.ENOSPC, "full"))
    assert one.resting
    clock.now_s += FIRST_REST_S
    assert not one.resting
    one.failed(OSError(errno.EIO, "a sector"))  # of storage that has not worked since
    clock.now_s += FIRST_REST_S
    assert one.resting


def test_it_rests_longer_each_time_and_says_so_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    one, rests = Health("reading from here"), []
    assert (one.resting, one.errors) == (False, 0)
    rest_s = FIRST_REST_S
    while len(rests) < 9:
        one.failed(OSError(errno.ENOSPC, "full"))
        one.failed(OSError(errno.ENOSPC, "full"))  # was under way: the same fault
        one.worked()  # was under way, too
        clock.now_s += rest_s * 0.999
        assert one.resting
        clock.now_s += rest_s * 0.001
        assert not one.resting
        rests.append(rest_s)
        rest_s = min(2 * rest_s, LONGEST_REST_S)
    assert rests[-1] == rests[-2] == LONGEST_REST_S and one.errors == 18
    one.worked()
    one.worked()
    assert [record.getMessage() for record in caplog.records] == [
        f"reading from here failed ([Errno {errno.ENOSPC}] full); it is left alone for {FIRST_REST_S:g} s, longer each "
        "time it fails again, and serving goes on without it",
        "reading from here works again",
    ]
    one.failed(ValueError())
    clock.now_s += FIRST_REST_S  # from the beginning
    assert not one.resting


@pytest.mark.parametrize("number", sorted(OF_ONE_OBJECT))
def test_one_object_is_not_the_device(clock: Clock, number: int) -> None:
    one = Health("x")
    for _ in range(2):
        for _ in range(MOST_IN_A_ROW - 1):
            one.failed(OSError(number, "a sector"))
            assert not one.resting
        one.worked()  # in a row alone they count
    for count in range(MOST_IN_A_ROW):
        assert not one.resting, count
        one.failed(OSError(number, "a sector"))
    assert one.resting and one.errors == 3 * MOST_IN_A_ROW - 2
    clock.now_s += FIRST_REST_S
    one.failed(OSError(number, "a sector"))  # it had not worked since
    clock.now_s += FIRST_REST_S
    assert one.resting


# ---- deadlines ----
class Waited:
    """Stands for a job."""

    numbers = iter(range(1 << 30))

    def __init__(self, timeout_s: float, *, settled: bool = False) -> None:
        self.started_s, self.timeout_s, self.settled = time.monotonic(), timeout_s, settled
        self.number = next(self.numbers)


def test_each_job_is_late_at_its_time_unless_it_is_over() -> None:
    late: queue.SimpleQueue[Any] = queue.SimpleQueue()
    times = Deadlines(lambda job: late.put((job, time.monotonic())))
    times.start()
    jobs: Any = [Waited(timeout_s) for timeout_s in (1e300, 3 * SHORT_S, SHORT_S, 2 * SHORT_S, SHORT_S)]
    with times._changed:  # all at once
        for job in jobs:
            job.started_s = jobs[0].started_s
            times.add(job)
        jobs[3].settled = True
    found = [late.get(timeout=WAIT_S) for _ in range(3)]
    assert [job for job, _ in found] == [jobs[2], jobs[4], jobs[1]]
    assert all(at_s >= job.started_s + job.timeout_s for job, at_s in found)
    times.close()
    assert late.empty()


def test_one_thread_that_ends_with_it(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    called = threading.Event()

    def fail(job: Any) -> None:
        called.set() if job.timeout_s == 0.0 else 1 // 0

    times = Deadlines(fail)
    Deadlines(fail).close()  # which never began
    assert not threads_since(before)
    for _ in range(2):
        times.start()
    [thread] = threads_since(before)
    assert (thread.name, thread.daemon) == ("paddle_kv-tier-deadlines", True)
    for timeout_s in (-1.0, 0.0):
        times.add(Waited(timeout_s))  # type: ignore[arg-type]
    assert called.wait(WAIT_S)
    times.add(Waited(1000.0))  # type: ignore[arg-type]
    times.close()
    assert not thread.is_alive()
    assert [record.getMessage() for record in caplog.records] == ["an error in the deadlines of a tier"]


def test_its_own_thread_may_end_it() -> None:
    ended = threading.Event()
    times = Deadlines(lambda job: (times.close(), ended.set()))  # type: ignore[func-returns-value]
    times.start()
    times.add(Waited(0.0))  # type: ignore[arg-type]
    assert ended.wait(WAIT_S)
    times.close()


@pytest.mark.parametrize(("count", "settled", "left"), [(64, 64, 65), (65, 65, 1), (65, 32, 66), (65, 33, 33)])
def test_what_is_over_is_not_kept_for_its_time(count: int, settled: int, left: int) -> None:
    """Where the one in the middle is over, most may be."""
    times = Deadlines(lambda job: None)
    jobs: Any = [Waited(1000.0 + number) for number in range(count)]
    for job in jobs:
        times.add(job)
    for job in jobs[:settled]:
        job.settled = True
    times.add(Waited(5.0))  # type: ignore[arg-type]
    assert len(times._queue) == left
    assert times._queue[0][2].timeout_s == 5.0
    assert sorted(times._queue)[-1][2] is (jobs[-1] if settled < count or left == 65 else times._queue[0][2])


def test_it_looks_no_more_often_than_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that comes behind the next one wakes nobody."""
    times = Deadlines(lambda job: None)
    notified: list[None] = []
    monkeypatch.setattr(times._changed, "notify", lambda: notified.append(None))
    for timeout_s, woken in ((5.0, 1), (6.0, 1), (4.0, 2), (4.5, 2)):
        times.add(Waited(timeout_s))  # type: ignore[arg-type]
        assert len(notified) == woken


def test_the_clock_of_the_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very end the time is over."""
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: 7.0))
    times = Deadlines(lambda job: None)
    job: Any = SimpleNamespace(started_s=5.0, timeout_s=2.0, number=1, settled=False)
    times.add(job)
    assert times._next() is job and not times._queue
