"""Handlers of signals that are put off while the main thread changes state, with signals that are sent to itself."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from paddle_kv import HostPool, KVCacheSpec
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import Keeper, keeper
from tests.schedule.rig import SHORT_S, WAIT_S

SPEC = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, dtype="float16")
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMAX)
LIBC = ctypes.CDLL(None, use_errno=True)


class Interrupted(Exception):
    pass


@pytest.fixture
def handled() -> Iterator[list[tuple[int, Any]]]:
    """What handlers of the signals were called with."""
    calls: list[tuple[int, Any]] = []
    before = [signal.signal(number, lambda number, frame: calls.append((number, frame))) for number in SIGNALS]
    yield calls
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def raised(handled: list[Any]) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    for number in SIGNALS:
        signal.signal(number, interrupt)


def undisturbed(function: Callable[[], Any]) -> Any:
    assert keeper.undisturbed is not None
    return keeper.undisturbed(function)


def actions() -> list[bytes]:
    """Function, the first 64 of the mask, and flags of each signal, as the C library has them on x86-64 and AArch64."""
    found = []
    for number in range(1, 65):
        action = ctypes.create_string_buffer(256)
        LIBC.sigaction(number, None, action)
        found.append(action.raw[:16] + action.raw[136:140])
    return found


def in_section(number: int) -> list[Any]:
    signal.raise_signal(number)
    return [threading.current_thread(), signal.getsignal(number)]


def test_what_the_function_returns_or_raises() -> None:
    marker = object()
    assert undisturbed(lambda: marker) is marker
    for error in (ZeroDivisionError, SystemExit, KeyboardInterrupt, ValueError):
        with pytest.raises(error, match="its own"):
            undisturbed(lambda: (_ for _ in ()).throw(error("its own")))  # noqa: B023
    assert sys.getrefcount(marker) == 2


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_runs_once_behind_it_and_sees_a_frame(handled: list[Any], number: int) -> None:
    seen = []

    def section() -> int:
        for _ in range(3):
            signal.raise_signal(number)
            seen.append(list(handled))
        return 4

    before = signal.getsignal(number)
    assert undisturbed(section) == 4
    assert seen == [[]] * 3
    assert [one for one, _ in handled] == [number]
    assert handled[0][1].f_code is undisturbed.__code__  # the caller
    assert signal.getsignal(number) is before
    signal.raise_signal(number)
    assert len(handled) == 2


def test_several_signals_run_all_their_handlers(handled: list[Any]) -> None:
    undisturbed(lambda: [signal.raise_signal(number) for number in reversed(SIGNALS)])
    assert [number for number, _ in handled] == list(SIGNALS)


@pytest.mark.usefixtures("raised")
def test_what_handlers_raise_comes_instead_of_the_result_and_each_has_run() -> None:
    before = [signal.getsignal(number) for number in range(1, 65)]
    with pytest.raises(Interrupted, match=signal.SIGRTMAX.name):
        undisturbed(lambda: [signal.raise_signal(number) for number in SIGNALS])
    with pytest.raises(Interrupted, match="SIGUSR1"):  # also instead of what the function raises

        def section() -> None:
            signal.raise_signal(signal.SIGUSR1)
            raise ZeroDivisionError

        undisturbed(section)
    assert [signal.getsignal(number) for number in range(1, 65)] == before
    assert undisturbed(lambda: 1) == 1


def test_control_c_comes_behind_it() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a function in C
    done = []
    try:
        with pytest.raises(KeyboardInterrupt):
            undisturbed(lambda: done.append(signal.raise_signal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [None]


@pytest.mark.usefixtures("handled")
def test_the_actions_of_the_signals_stay_as_they_are() -> None:
    """Also flags that Python's own function would take away, and a function of another library."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.siginterrupt(signal.SIGUSR1, False)
    number = signal.SIGRTMAX
    foreign = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    LIBC.signal.restype, LIBC.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    of_python = LIBC.signal(number, ctypes.cast(foreign, ctypes.c_void_p))
    try:
        before = actions()
        during = undisturbed(actions)
        assert before == during == actions()
        assert undisturbed(lambda: signal.getsignal(signal.SIGUSR2)) == signal.SIG_IGN
        assert undisturbed(lambda: signal.getsignal(signal.SIGPIPE)) == signal.getsignal(signal.SIGPIPE)
    finally:
        LIBC.signal(number, of_python)


def test_the_descriptor_that_is_told_of_signals_is_told_once(handled: list[Any]) -> None:
    """What asyncio listens to."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writer)
    try:
        undisturbed(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.set_wakeup_fd(before)
    assert os.read(reader, 100) == bytes([signal.SIGUSR1])
    os.close(reader)
    os.close(writer)
    assert len(handled) == 1


def test_one_in_another_one_runs_no_handler_at_its_end(handled: list[Any]) -> None:
    seen = []

    def inner() -> None:
        signal.raise_signal(signal.SIGUSR1)

    def outer() -> None:
        undisturbed(inner)
        seen.append(list(handled))
        signal.raise_signal(signal.SIGUSR2)
        seen.append(list(handled))

    undisturbed(outer)
    assert seen == [[], []]
    assert [number for number, _ in handled] == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_handler_may_change_state_itself(handled: list[Any]) -> None:
    """That of one signal, while those of others are not back yet, or not put off yet."""
    found: list[Any] = []

    def handler(number: int, frame: object) -> None:
        found.append(undisturbed(lambda: in_section(signal.SIGUSR2)))

    signal.signal(signal.SIGUSR1, handler)
    undisturbed(lambda: signal.raise_signal(signal.SIGUSR1))
    assert len(found) == 1 and len(handled) == 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.raise_signal(signal.SIGUSR1)
    undisturbed(lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1}))
    assert len(found) == 2 and len(handled) == 2
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.usefixtures("raised")
def test_a_thread_in_which_no_handler_runs_needs_none_put_off() -> None:
    """The main thread as the module threading knows it need not be the one that Python means."""
    found: list[Any] = []
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=lambda: found.append(undisturbed(lambda: signal.getsignal(signal.SIGUSR1))))
    thread.start()
    thread.join(WAIT_S)
    assert found == [before]


def test_what_another_thread_hears_of_a_section_of_the_main_one(handled: list[Any]) -> None:
    """Sections of the main thread run in it."""
    pool = HostPool(SPEC, 2)
    handler = signal.getsignal(signal.SIGUSR1)
    thread, during = change(pool.domain, lambda: in_section(signal.SIGUSR1))
    assert thread is threading.main_thread() and during is not handler and len(handled) == 1
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(change(pool.domain, lambda: in_section(signal.SIGUSR1))))
    other.start()
    other.join(WAIT_S)
    assert found == [[other, handler]]
    pool.close()


def test_a_pool_alone_needs_no_scheduler_for_it() -> None:
    program = """
import zlib
import paddle_kv
paddle_kv.HostPool
from paddle_kv.tracking.keeper import keeper
print(keeper.undisturbed(lambda: 5))
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "5\n"


def test_without_the_library_the_keeper_does_it() -> None:
    own = Keeper()
    try:
        assert own.undisturbed is None or keeper.undisturbed is not Keeper.undisturbed
        assert own.call_here(lambda: threading.current_thread().name) == "paddle_kv-keeper"
    finally:
        own.end()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_child_of_another_thread_has_its_handlers(handled: list[Any]) -> None:
    """The main thread, which the child lacks, has put them off and waits for the lock."""
    pool = HostPool(SPEC, 2)
    handler, waits, ends = signal.getsignal(signal.SIGUSR1), threading.Event(), []

    def fork() -> None:
        with pool.domain.group.lock:
            held.set()
            assert waits.wait(WAIT_S)
            deadline = time.monotonic() + WAIT_S
            while signal.getsignal(signal.SIGUSR1) is handler:  # the main thread comes to it
                assert time.monotonic() < deadline
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # the parent's: noted, and not told yet
            time.sleep(SHORT_S)
            child = os.fork()
            if child == 0:
                mine = signal.getsignal(signal.SIGUSR1) is handler and not handled
                signal.raise_signal(signal.SIGUSR2)
                os._exit(0 if mine and [number for number, _ in handled] == [signal.SIGUSR2] else 1)
            ends.append(os.waitpid(child, 0)[1])

    held = threading.Event()
    thread = threading.Thread(target=fork)
    thread.start()
    assert held.wait(WAIT_S)
    waits.set()
    change(pool.domain, list)
    thread.join(WAIT_S)
    assert ends == [0]
    assert [number for number, _ in handled] == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler
    pool.close()


def test_a_handler_that_is_set_meanwhile_stays(handled: list[Any]) -> None:
    """In the function; and by the handler of a signal that comes while they are put off one by one."""
    first = signal.getsignal(signal.SIGUSR1)

    def second(number: int, frame: object) -> None:
        handled.append((-number, frame))

    def section() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, second)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    undisturbed(section)
    assert signal.getsignal(signal.SIGUSR1) is second and signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    assert [number for number, _ in handled] == [signal.SIGUSR1]  # it came to the one that was there

    def sets(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR2, second)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    signal.signal(signal.SIGUSR1, first)
    signal.signal(signal.SIGUSR2, first)
    signal.signal(signal.SIGRTMAX, sets)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMAX})
    signal.raise_signal(signal.SIGRTMAX)
    undisturbed(lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGRTMAX}))
    assert signal.getsignal(signal.SIGUSR2) is second and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert keeper.undisturbed is not None and undisturbed(lambda: 5) == 5


def test_a_handler_that_changes_state_takes_nothing_from_the_others(handled: list[Any]) -> None:
    second, last = (signal.getsignal(number) for number in SIGNALS[1:])

    def changes(number: int, frame: object) -> None:
        handled.append((number, frame))
        undisturbed(list)

    signal.signal(signal.SIGUSR1, changes)
    undisturbed(lambda: [signal.raise_signal(number) for number in SIGNALS])
    assert [number for number, _ in handled] == list(SIGNALS)
    before = sys.getrefcount(second), sys.getrefcount(last)
    for _ in range(100):
        undisturbed(lambda: signal.raise_signal(signal.SIGUSR1))
    assert (sys.getrefcount(second), sys.getrefcount(last)) == before
    assert [signal.getsignal(number) for number in SIGNALS] == [changes, second, last]


def test_nothing_is_kept_or_lost_by_thousands_of_calls(handled: list[Any]) -> None:
    handler, marker = signal.getsignal(signal.SIGUSR1), object()

    def section() -> object:
        return marker

    kept = (handler, marker, section, None)
    gc.collect()
    before = list(map(sys.getrefcount, kept))
    for _ in range(3000):
        assert undisturbed(section) is marker
        undisturbed(lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(ZeroDivisionError):
            undisturbed(lambda: 1 / 0)
    assert len(handled) == 3000
    handled.clear()
    after = list(map(sys.getrefcount, kept))
    bounds = (20, 20, 20, 1500)  # of None others take and give back hundreds meanwhile
    assert all(abs(x - y) < z for x, y, z in zip(before, after, bounds, strict=True)), (before, after)


def test_a_signal_that_raises_while_handlers_are_put_back_keeps_none_from_it(handled: list[Any]) -> None:
    """SIGUSR1 is put back before the two others, and comes all the time."""
    others = [signal.getsignal(number) for number in SIGNALS[1:]]
    armed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    signal.signal(signal.SIGUSR1, interrupt)
    program = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    os.kill(int(sys.argv[1]), int(sys.argv[2]))"
    sender = subprocess.Popen([sys.executable, "-c", program, str(os.getpid()), str(int(signal.SIGUSR1))])
    interrupts, end_s = 0, time.monotonic() + WAIT_S
    try:
        # Where the two share a core, each turn of the sender is one interrupt, however many signals it sends.
        while interrupts < 3000 and time.monotonic() < end_s:
            try:
                armed = True
                undisturbed(os.getpid)
                armed = False
            except Interrupted:
                interrupts += 1
            assert [signal.getsignal(number) for number in SIGNALS[1:]] == others
    finally:
        sender.kill()
        sender.wait()
    assert interrupts >= 100
