"""A function in the main thread behind which handlers of signals are called, not in its midst."""

from __future__ import annotations

import _thread
import collections
import ctypes
import functools
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv.ops import _library
from tests.schedule.rig import WAIT_S

held: Callable[[Callable[[], Any]], Any] = _library.signals["with_signals_held"]
ONE, OTHER = signal.SIGUSR1, signal.SIGUSR2
libc = ctypes.PyDLL(None)
raise_in_c = functools.partial(getattr(libc, "raise"), ONE)  # Python does not look for it at once


class Stopped(Exception):
    pass


class Rig:
    """Handlers of two signals that note what they are called with, and raise if they are told to."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.frames: list[Any] = []
        self.raises: set[int] = set()

    def handle(self, number: int, frame: Any) -> None:
        self.came.append(number)
        self.frames.append(frame)
        if number in self.raises:
            raise Stopped(number)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    before = {number: signal.signal(number, made.handle) for number in (ONE, OTHER)}
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def told(number: int) -> bytes:
    """What the system has been told of the signal."""
    action = ctypes.create_string_buffer(256)
    assert libc.sigaction(number, None, action) == 0
    return action.raw[:16] + action.raw[136:140]  # the handler, the signals that there are of the mask, flags


def test_a_handler_is_called_once_behind_the_function(rig: Rig) -> None:
    def function() -> str:
        signal.raise_signal(ONE)
        signal.raise_signal(ONE)
        assert rig.came == []
        return "done"

    assert held(function) == "done"
    assert rig.came == [ONE]
    assert rig.frames[0].f_code.co_name == "test_a_handler_is_called_once_behind_the_function"
    assert held(lambda: "again") == "again" and rig.came == [ONE]


def test_what_a_handler_raises_comes_to_the_caller_when_all_is_done(rig: Rig) -> None:
    done = []

    def function() -> None:
        signal.raise_signal(ONE)
        for number in range(1000):
            done.append(number)

    rig.raises = {ONE}
    with pytest.raises(Stopped):
        held(function)
    assert len(done) == 1000
    assert signal.getsignal(ONE) == rig.handle


def test_a_failure_of_the_function_is_kept_as_the_context(rig: Rig) -> None:
    def function() -> None:
        signal.raise_signal(ONE)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        held(function)
    assert rig.came == [ONE]
    rig.raises = {ONE}
    with pytest.raises(Stopped) as caught:
        held(function)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_of_several_each_is_called(rig: Rig) -> None:
    def function() -> None:
        signal.raise_signal(OTHER)
        signal.raise_signal(ONE)

    held(function)
    assert rig.came == [ONE, OTHER]
    rig.came, rig.raises = [], {ONE}
    with pytest.raises(Stopped):
        held(function)
    assert rig.came == [ONE, OTHER]


def test_a_signal_that_another_thread_makes_up(rig: Rig) -> None:
    def function() -> list[int]:
        thread = threading.Thread(target=_thread.interrupt_main, args=(ONE,))
        thread.start()
        thread.join(WAIT_S)
        return rig.came.copy()

    assert held(function) == []
    assert rig.came == [ONE]


def test_a_signal_that_came_before_comes_before(rig: Rig) -> None:
    """In C from the one to the other: nowhere else does Python look."""
    done: list[int] = []
    calls = [raise_in_c, functools.partial(held, functools.partial(done.append, 1))]
    rig.raises = {ONE}
    with pytest.raises(Stopped):
        collections.deque(map(operator.call, calls))
    assert done == [] and rig.came == [ONE]
    assert signal.getsignal(ONE) == rig.handle and signal.getsignal(OTHER) == rig.handle
    assert held(lambda: "then") == "then"


def test_one_inside_another_holds_no_more(rig: Rig) -> None:
    def inner() -> list[int]:
        signal.raise_signal(ONE)
        return rig.came.copy()

    assert held(lambda: (held(inner), rig.came.copy())) == ([], [])
    assert rig.came == [ONE]


def test_a_handler_may_call_one(rig: Rig) -> None:
    found = []
    signal.signal(ONE, lambda *_: found.append(held(lambda: "inside")))
    assert held(lambda: signal.raise_signal(ONE)) is None
    assert found == ["inside"]


def test_a_handler_that_is_called_while_they_are_exchanged_is_refused(rig: Rig) -> None:
    found = []
    signal.signal(ONE, lambda *_: found.append(held(lambda: "inside")))
    calls = [raise_in_c, functools.partial(held, lambda: "outside")]
    assert list(map(operator.call, calls)) == [0, "outside"]
    assert found == [NotImplemented]


def test_what_the_function_sets_stays(rig: Rig) -> None:
    own = Rig()
    held(lambda: signal.signal(ONE, own.handle))
    assert signal.getsignal(ONE) == own.handle


def test_what_the_system_was_told_stays(rig: Rig) -> None:
    signal.siginterrupt(ONE, False)
    before = [told(number) for number in range(1, 32)]
    during = held(lambda: told(ONE))
    assert during == before[ONE - 1] != told(OTHER)
    assert [told(number) for number in range(1, 32)] == before


def test_a_signal_that_c_code_has_taken_is_left_to_it(rig: Rig) -> None:
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    pythons = libc.signal(ONE, 1)  # ignored, and Python does not know
    try:
        before = told(ONE)
        assert held(lambda: "not called") is NotImplemented
        assert told(ONE) == before
        assert signal.getsignal(ONE) == rig.handle and signal.getsignal(OTHER) == rig.handle
    finally:
        libc.signal(ONE, pythons)
    assert held(lambda: "called") == "called"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_another_thread_forks_has_its_handlers(rig: Rig) -> None:
    codes = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(ONE) == rig.handle and held(lambda: 5) == 5 else 1)
        codes.append(os.waitpid(child, 0)[1])

    def function() -> None:
        signal.raise_signal(ONE)
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(WAIT_S)

    held(function)
    assert codes == [0] and rig.came == [ONE]


def test_other_threads_are_refused() -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            held(lambda: None)
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    assert "main thread" in str(found[0])
