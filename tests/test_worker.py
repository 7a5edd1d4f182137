"""Threads that are waited for at the end, also again where a signal handler has raised."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paddle_kv.tracking.worker import Worker

WAIT_S = 30.0
SHORT_S = 0.05


@contextmanager
def raising_soon(error: Exception) -> Iterator[None]:
    """A handler raises it in the main thread."""

    def handler(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, SHORT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
def test_a_wait_that_was_interrupted_says_nothing_of_the_thread(timeout_s: float | None) -> None:
    end = threading.Event()
    worker = Worker(lambda: end.wait(WAIT_S), "worker")
    assert not worker.is_alive()
    worker.start()
    with pytest.raises(InterruptedError), raising_soon(InterruptedError()):
        worker.join(timeout_s)
    assert worker.is_alive()
    worker.join(SHORT_S)
    assert worker.is_alive()
    threading.Timer(SHORT_S, end.set).start()
    worker.join(timeout_s)
    assert end.is_set()
    assert not worker.is_alive()
    worker.join()


def test_a_function_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    worker = Worker(lambda: 1 / 0, "worker")
    worker.start()
    worker.join(WAIT_S)
    assert not worker.is_alive()
    assert raised[0].exc_type is ZeroDivisionError


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    end = threading.Event()
    worker = Worker(lambda: end.wait(WAIT_S), "worker")
    worker.start()
    child = os.fork()
    if child == 0:
        worker.join()
        os._exit(worker.is_alive())
    assert os.waitpid(child, 0)[1] == 0
    end.set()
    worker.join(WAIT_S)


class EndsLate(Worker):
    """Its function is over a while before the thread is."""

    def __init__(self, target: Any) -> None:
        super().__init__(target, "late")
        self.through, self.end = threading.Event(), threading.Event()

    def run(self) -> None:
        super().run()
        self.through.set()
        self.end.wait(WAIT_S)


def test_a_thread_is_waited_for_to_its_very_end() -> None:
    worker = EndsLate(lambda: None)
    worker.start()
    assert worker.through.wait(WAIT_S)
    assert worker.is_alive()
    threading.Timer(SHORT_S, worker.end.set).start()
    worker.join(WAIT_S)
    assert worker not in threading.enumerate()
    assert not worker.is_alive()


def test_the_interpreter_is_asked_for_its_end_only_when_the_function_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might say that a thread is over which is not."""
    joined: list[Any] = []
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(timeout))
    monkeypatch.setattr(threading.Thread, "is_alive", lambda self: False)
    end = threading.Event()
    worker = Worker(lambda: end.wait(WAIT_S), "worker")
    worker.start()
    worker.join(SHORT_S)
    assert worker.is_alive() and joined == []
    end.set()
    worker.join(WAIT_S)
    assert not worker.is_alive() and joined == [WAIT_S]


def test_it_has_its_name_and_holds_no_interpreter_up() -> None:
    worker = Worker(lambda: None, "worker")
    assert worker.name == "worker" and worker.daemon
