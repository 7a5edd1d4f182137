"""Code of others in threads of the library: whatever it raises is logged, and what comes behind it is done."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuEvent, CpuStream
from paddle_kv.offload import below
from paddle_kv.peers.connection import Loop
from paddle_kv.peers.fabrics.protocol import Write
from paddle_kv.peers.fabrics.queued import QueuedSink
from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.deadlines import Deadlines
from paddle_kv.tiers.protocol import ended
from paddle_kv.tracking.alarms import Alarms
from paddle_kv.tracking.group import MemoryGroup, change, note
from paddle_kv.tracking.keeper import Deadline, Keeper, Living
from tests.schedule.rig import WAIT_S, Rig

# What the code of others may raise that is no Exception: `sys.exit`, a task that was cancelled, a stray interrupt.
KINDS = [SystemExit, asyncio.CancelledError, KeyboardInterrupt]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def broken(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Any]]:
    """Raises it; is logged by the end of the test as often as it was called."""
    calls: list[None] = []

    def fail(*given: object) -> Any:
        calls.append(None)
        raise request.param("of others")

    yield fail
    told = [type(record.exc_info[1]) for record in caplog.get_records("call") if record.exc_info]
    assert told == [request.param] * len(calls) and calls


class Member:
    def __init__(self) -> None:
        self.group = MemoryGroup(self)


class Silent(Keeper):
    """Does nothing of what is posted."""

    def post(self, function: Callable[[], object]) -> None:
        pass


def in_a_thread(function: Callable[[], object]) -> None:
    over: list[bool] = []
    thread = threading.Thread(target=lambda: (function(), over.append(True)))
    thread.start()
    thread.join(WAIT_S)
    assert over


def test_a_done_callback(rig: Rig, broken: Callable[..., Any]) -> None:
    heard, scheduler = threading.Event(), LayerwiseScheduler(rig.cache, rig.pool)
    save = scheduler.offload([1], [1])
    save.add_done_callback(broken)
    save.add_done_callback(lambda _: heard.set())
    assert heard.wait(WAIT_S)
    scheduler.offload([2], [2]).wait(WAIT_S)
    scheduler.close(WAIT_S)


def test_a_job_of_nobody_beside_one_that_waits(broken: Callable[..., Any]) -> None:
    keeper, done = Keeper(), threading.Event()
    keeper.post(broken)
    keeper.post(done.set)
    assert done.wait(WAIT_S)
    keeper.end()


def test_what_was_noted(broken: Callable[..., Any]) -> None:
    done: list[str] = []
    member = Member()
    member.group.host = Silent()
    note(member, broken)
    note(member, lambda: done.append("noted"))
    in_a_thread(lambda: change(member, lambda: done.append("section")))
    assert done == ["noted", "section"]


def test_an_alarm(broken: Callable[..., Any]) -> None:
    alarms, rang = Alarms("alarms of a test"), threading.Event()
    alarms.add(0.0, broken)
    alarms.add(0.0, rang.set)
    assert rang.wait(WAIT_S)
    alarms.close()


def test_the_deadline_of_a_job(broken: Callable[..., Any]) -> None:
    late = threading.Event()
    times = Deadlines(lambda job: broken() if job.number == 0 else late.set())
    times.start()
    for number in range(2):
        job: Any = SimpleNamespace(number=number, started_s=time.monotonic(), timeout_s=0.01 * number, settled=False)
        times.add(job)
    assert late.wait(WAIT_S)
    times.close()


def test_the_observer_of_a_job(broken: Callable[..., Any]) -> None:
    job = Job([b"k"], [0], observer=SimpleNamespace(layers_arrived=broken, settled=broken, over=broken))

    def run() -> None:
        job.begin("load", 1, 1.0)
        job.stage_arrived(0, range(1))
        job.end([(0, Outcome.DONE)])
        job.settle()
        job.let_go()

    in_a_thread(run)
    assert job.over and job.told


def test_the_end_of_an_object(broken: Callable[..., Any]) -> None:
    heard: list[Outcome] = []
    items: Any = [SimpleNamespace(ended=broken), SimpleNamespace(ended=heard.append)]
    in_a_thread(lambda: ended([(item, Outcome.DONE) for item in items]))
    assert heard == [Outcome.DONE]


def test_a_stream_of_the_cpu_backend(broken: Callable[..., Any]) -> None:
    stream, done = CpuStream(), threading.Event()
    stream.submit(broken)
    stream.submit(done.set)
    assert done.wait(WAIT_S)
    stream.close()


def test_a_report_behind_an_event_of_the_cpu_backend(broken: Callable[..., Any]) -> None:
    event, heard = CpuEvent(), []
    event.watch(broken)
    event.watch(lambda: heard.append(1))
    in_a_thread(event.set)
    assert heard == [1]


def test_a_channel_between_peers(broken: Callable[..., Any]) -> None:
    loop, behind, heard = Loop("test"), threading.Event(), threading.Event()
    reading, writing = os.pipe()

    def ready() -> None:
        heard.set() if os.read(reading, 1) == b"2" else broken()

    loop.post(broken)
    loop.post(lambda: loop.later(0.0, broken))
    loop.post(lambda: loop.watch(reading, selectors.EVENT_READ, ready))
    loop.post(behind.set)
    assert behind.wait(WAIT_S)
    os.write(writing, b"12")
    assert heard.wait(WAIT_S)
    loop.close(WAIT_S)
    os.close(reading)
    os.close(writing)


def test_a_write_to_a_peer(broken: Callable[..., Any]) -> None:
    class Sink(QueuedSink):
        def move(self, write: Write, first: int, end: int) -> None:
            if 2 in write.sizes:  # they may come together
                raise SystemExit("of the engine")

        disconnect = broken

    sink, told = Sink("test"), threading.Event()
    reasons: list[str] = []

    def write(size: int, end: Callable[[str], object]) -> None:
        one = np.array([size])
        sink.write(Write(one, one, one, Deadline(WAIT_S), end))

    write(1, broken)
    write(2, lambda why: (reasons.append(why), told.set()))
    assert told.wait(WAIT_S)
    sink.close(WAIT_S)
    assert [why.split(":")[0] for why in reasons] == ["SystemExit"]


def test_a_task_of_the_tier_below(broken: Callable[..., Any]) -> None:
    done = threading.Event()
    tasks: Any = iter([broken, done.set, None])
    in_a_thread(lambda: below._serve(SimpleNamespace(get=lambda: next(tasks))))  # type: ignore[arg-type]
    assert done.is_set()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_signal_handler_raises_in_the_main_thread_goes_on(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(kind), Living("an error of a test"):
        raise kind
    assert caplog.records == []
    with Living("an error of a test"):
        raise ZeroDivisionError
    assert [record.getMessage() for record in caplog.records] == ["an error of a test"]
