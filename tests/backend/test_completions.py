"""The thread that hears which events were passed. The library's side is replaced by an eventfd and a list of tokens;
with a GPU: tests/gpu/test_scheduler_on_gpu.py."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from paddle_kv.backend import completions, transfer_queue
from paddle_kv.tracking.keeper import END_S, keeper
from tests.schedule.rig import WAIT_S


class Library:
    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.opened = 0
        self.watched: list[tuple[int, int, list[int]]] = []
        self.tokens: list[int] = []

    def open(self) -> int:
        self.opened += 1
        return self.descriptor

    def watch(self, device_id: int, token: int, events: Sequence[int]) -> None:
        self.watched.append((device_id, token, list(events)))

    def take(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        taken, self.tokens = self.tokens, []
        return taken

    def report(self, *tokens: int) -> None:
        self.tokens = [*self.tokens, *tokens]
        os.eventfd_write(self.descriptor, 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(transfer_queue, "completions_fd", made.open)
    monkeypatch.setattr(transfer_queue, "watch", made.watch)
    monkeypatch.setattr(transfer_queue, "take_completions", made.take)
    monkeypatch.setattr(completions, "_thread", None)
    monkeypatch.setattr(completions, "_reports", {})
    monkeypatch.setattr(keeper, "at_end", [])
    yield made
    for end in keeper.at_end:
        end()
    os.close(made.descriptor)


def test_each_report_comes_once_for_its_own_token_from_one_thread(library: Library) -> None:
    heard: queue.Queue[tuple[str, threading.Thread]] = queue.Queue()
    for name in ("first", "second", "third"):
        completions.watch(7, [len(name), 2], lambda name=name: heard.put((name, threading.current_thread())))
    first, second, third = (token for _, token, _ in library.watched)
    assert library.watched == [(7, first, [5, 2]), (7, second, [6, 2]), (7, third, [5, 2])]
    assert len({first, second, third}) == 3
    assert library.opened == 1
    library.report(third, first)
    told = [heard.get(timeout=WAIT_S) for _ in range(2)]
    library.report(second)
    told.append(heard.get(timeout=WAIT_S))
    assert [name for name, _ in told] == ["third", "first", "second"]
    [thread] = {thread for _, thread in told}
    assert thread.daemon
    assert thread.name == "paddle_kv-completions"
    assert completions._reports == {}


def test_what_is_to_be_done_behind_reports_is_done_once_for_those_that_came_together(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    done: queue.Queue[tuple[str, int]] = queue.Queue()
    reported: list[int] = []

    class Behind:
        def __init__(self, name: str) -> None:
            self.name = name

        def report(self, number: int) -> Behind:
            reported.append(number)
            return self

        def now(self) -> None:
            done.put((self.name, len(reported)))
            if self.name == "one":
                raise OSError("lost")

        def soon(self) -> None:
            raise AssertionError("this thread has nothing else to do")

    one, two = Behind("one"), Behind("two")
    for number, behind in enumerate((one, two, one, one)):
        completions.watch(0, [number], functools.partial(behind.report, number))
    first, second, third, last = (token for _, token, _ in library.watched)
    library.report(first, second, third)
    assert [done.get(timeout=WAIT_S) for _ in range(2)] == [("one", 3), ("two", 3)]
    library.report(last)
    assert done.get(timeout=WAIT_S) == ("one", 4)
    assert done.empty()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info][:1] == [OSError]

    last = Behind("last")
    alive = weakref.ref(last)
    completions.watch(0, [9], functools.partial(last.report, 9))
    del last, behind
    library.report(library.watched[-1][1])
    assert done.get(timeout=WAIT_S) == ("last", 5)
    give_up_s = time.monotonic() + WAIT_S
    while alive() is not None:  # until the thread waits again: it keeps nothing then
        assert time.monotonic() < give_up_s
        time.sleep(1e-3)


def test_it_is_there_before_anybody_is_told_that_the_events_have_passed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library may report before the call that asks for it has returned."""
    heard: queue.Queue[str] = queue.Queue()

    def watch(device_id: int, token: int, events: Sequence[int]) -> None:
        library.report(token)
        assert heard.get(timeout=WAIT_S) == "passed"

    monkeypatch.setattr(transfer_queue, "watch", watch)
    completions.watch(0, [1], lambda: heard.put("passed"))


def test_what_the_library_does_not_watch_is_forgotten(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device_id: int, token: int, events: Sequence[int]) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(transfer_queue, "watch", refuse)
    with pytest.raises(MemoryError, match="no more"):
        completions.watch(0, [1], lambda: None)
    assert completions._reports == {}


def hearing(library: Library, monkeypatch: pytest.MonkeyPatch, *, is_told: bool) -> list[tuple[int, float | None]]:
    """What the library is asked. As it does: see ``queue_functions.h``."""
    asked: list[tuple[int, float | None]] = []

    def hear(token: int, timeout_s: float | None, told: Callable[[], object], reports: Any, report: Any) -> bool:
        asked.append((token, timeout_s))
        if is_told:
            reports[token] = report
            try:
                told()
            except BaseException:
                library.report(token)
                raise
            reports.pop(token, None)
        return is_told

    monkeypatch.setattr(transfer_queue, "hear", hear)
    return asked


def test_who_hears_of_a_token_is_told_in_place_of_the_thread(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = hearing(library, monkeypatch, is_told=True), []
    token = completions.watch(7, [5], pytest.fail)
    assert token == library.watched[0][1]
    completions.hear(token, 1.5, lambda: told.append(threading.current_thread()), pytest.fail)
    assert told == [threading.current_thread()] and asked == [(token, 1.5)]
    assert completions._reports == {}  # of what it keeps nothing


def test_who_is_not_told_leaves_it_to_the_thread(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing(library, monkeypatch, is_told=False)
    heard: queue.Queue[str] = queue.Queue()
    token = completions.watch(7, [5], lambda: heard.put("reported"))
    completions.hear(token, None, pytest.fail, pytest.fail)
    library.report(token)
    assert heard.get(timeout=WAIT_S) == "reported"


def test_who_is_interrupted_leaves_it_to_the_thread(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    hearing(library, monkeypatch, is_told=True)
    heard: queue.Queue[str] = queue.Queue()

    def told() -> None:
        raise KeyboardInterrupt

    token = completions.watch(7, [5], pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        completions.hear(token, None, told, lambda: heard.put("the other one"))
    assert heard.get(timeout=WAIT_S) == "the other one"
    assert completions._reports == {}


def test_who_was_told_and_held_up_may_have_done_it_all_the_same(library: Library) -> None:
    """The library reports what it has told already."""
    heard: queue.Queue[str] = queue.Queue()
    first = completions.watch(7, [5], pytest.fail)
    second = completions.watch(7, [6], lambda: heard.put("second"))
    del completions._reports[first]
    library.report(first, second)
    assert heard.get(timeout=WAIT_S) == "second"


def test_at_exit_the_thread_ends_while_nothing_is_reported(library: Library) -> None:
    completions.watch(0, [1], lambda: None)
    thread = completions._thread
    assert thread is not None
    [end] = keeper.at_end
    keeper.at_end = []
    end()
    assert not thread.is_alive()


def test_an_exit_does_not_wait_for_a_report_that_hangs_and_no_other_one_comes(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, waited, heard = threading.Event(), [], []
    began: queue.Queue[None] = queue.Queue()

    def hang() -> None:
        began.put(None)
        hangs.wait(WAIT_S)

    completions.watch(0, [1], hang)
    completions.watch(0, [2], lambda: heard.append(2))
    (_, first, _), (_, second, _) = library.watched
    library.report(first)
    began.get(timeout=WAIT_S)
    library.report(second)
    thread = completions._thread
    assert thread is not None
    join = thread.join
    monkeypatch.setattr(thread, "join", waited.append)
    [end] = keeper.at_end
    keeper.at_end = []
    end()
    assert waited == [END_S]
    hangs.set()
    join(WAIT_S)
    assert not thread.is_alive()
    assert heard == []


def test_a_thread_that_could_not_begin_begins_with_the_next_call(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            completions.watch(0, [1], lambda: None)
    assert (library.watched, completions._reports, keeper.at_end) == ([], {}, [])
    assert len(os.listdir("/proc/self/fd")) == before
    heard = threading.Event()
    library.report(completions.watch(0, [1], lambda: heard.set()))
    assert heard.wait(WAIT_S)


@pytest.mark.parametrize("kind", [MemoryError, SystemExit, KeyboardInterrupt])
def test_a_report_that_raises_stops_no_other(
    library: Library, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    class Behind:
        def now(self) -> None:
            raise kind

    def broken() -> None:
        raise kind

    heard: queue.Queue[str] = queue.Queue()
    tokens = [
        completions.watch(0, [1], report)
        for report in (broken, Behind, lambda: heard.put("same time"), lambda: heard.put("later"))  # type: ignore[list-item]
    ]
    library.report(*tokens[:3])
    assert heard.get(timeout=WAIT_S) == "same time"
    library.report(tokens[3])
    assert heard.get(timeout=WAIT_S) == "later"
    told = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert told == [kind, kind]


def test_a_place_for_a_report(library: Library) -> None:
    """Whoever puts one there has the library watch for the token."""
    reports, token = completions.place()
    others, other = completions.place()
    assert reports is others is completions._reports and token != other and library.opened == 1
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()
    reports[token] = functools.partial(heard.put, 5)
    library.report(token)
    assert heard.get(timeout=WAIT_S) == 5
    assert reports == {}
