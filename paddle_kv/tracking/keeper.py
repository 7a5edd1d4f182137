"""How state changes in the main thread, and the thread of the library that does what nobody waits for.

Python runs signal handlers in the main thread only, between any two of its instructions, and what they raise leaves
whatever runs there half done. So the main thread changes state with the handlers held back: C code of the library puts
others in their place, that only note what comes, and calls them behind the change. Where that cannot be, and for what
may take long, it hands the change to the keeper, a thread, and waits: an exception of a handler then ends the waiting,
never the change. Other threads see no signals and change state themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

END_S = 5.0  # what the last job may take at exit
ROOM = 200  # calls inside each other that a section may need
LOOK_S = 0.001  # how often a callback that waits looks beside the jobs

log = logging.getLogger("paddle_kv")


class Waiter:
    """What one blocked thread sleeps on; released once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def sleep(self, timeout_s: float | None) -> bool:
        """Whether it was released within the time."""
        if timeout_s is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))


class Deadline:
    """The end of a time-out, on the clock that cannot be set."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_s = None if timeout_s is None else time.monotonic() + float(timeout_s)  # NumPy's lose digits

    def left_s(self) -> float | None:
        """Seconds until then, 0 once it is over; None: there is no end."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    @property
    def over(self) -> bool:
        return self._end_s is not None and time.monotonic() >= self._end_s


class Host(Protocol):
    """How host threads run, wait and meet: the keeper, or the simulator's stand-in for it."""

    def section(self, function: Callable[[], Any]) -> Any:
        """The function's result. Whatever signal handlers raise meanwhile, the function runs to its end; it waits for
        nothing."""

    def call(self, function: Callable[[], Any]) -> Any:
        """As :meth:`section`, of a function that may take long: an exception of a handler ends the wait for it."""

    def soon(self, function: Callable[[], object]) -> None:
        """As :meth:`section`, but the main thread does not wait for it. Calls of one thread keep their order."""

    def post(self, function: Callable[[], object]) -> None:
        """Runs it later, in a thread of the library. May be called by a finalizer in the middle of anything."""

    def tell(self, callback: Callable[[], object]) -> None:
        """:meth:`post` for what users want called."""

    @property
    def put(self) -> Callable[[Callable[[], object]], object]:
        """:meth:`soon` in C, whichever thread it is: no exception of a signal handler comes in between. It is done when
        the keeper is woken."""

    @property
    def wake(self) -> Callable[[Any], object]:
        """Wakes the keeper, in C; the argument is called, and has to do nothing."""

    def park(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Blocks the caller until the waiter is released (True) or the time is over (False)."""

    def pause(self) -> None:
        """A point at which other threads may come first."""


class Callbacks:
    """What users want called: one after the other, and none inside another one that waits."""

    def __init__(self, post: Callable[[Callable[[], object]], object]) -> None:
        self._post = post
        self._waiting: deque[Callable[[], object]] = deque()
        self._calling = False

    def add(self, callback: Callable[[], object]) -> None:
        self._waiting.append(callback)
        self._post(self._call_next)

    def _call_next(self) -> None:
        if self._calling or not self._waiting:
            return  # whoever is calling posts it again
        self._calling = True
        try:
            self._waiting.popleft()()
        finally:
            self._calling = False
            if self._waiting:
                self._post(self._call_next)


class _Job:
    """A function on its way to the keeper. Its result may be dropped: what owns something gives it back by itself."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function: Callable[[], Any] | None = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.over = Waiter()

    def __call__(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result = function()
        except BaseException as error:  # noqa: BLE001  it is the caller's
            self._error = error
        del function
        self.over.release()

    def take(self) -> Any:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or the traceback would hold itself
        result, self._result = self._result, None
        return result


class Keeper:
    """See the module. The thread starts with the first job and ends with the process; a forked child has its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._main = threading.main_thread().ident
        self.at_end: list[Callable[[], object]] = []  # what ends other threads of the library
        self._choosing = threading.Lock()
        self._callbacks = Callbacks(self._put)
        self.reporter: int | None = None  # a thread of the library that may do itself what it posts
        self._soon: deque[Callable[[], object]] = deque()
        self._doing_soon = threading.Lock()  # of whoever does those: they keep their order
        self._is_behind_soon = False  # the main thread does them

    def section(self, function: Callable[[], Any]) -> Any:
        if self._ended or not self._is_main() or self._is_behind_soon:
            return function()
        if _is_near_the_limit():
            return self.call(function)
        if self._soon or self._doing_soon.locked():
            result = _with_signals_held(functools.partial(self._behind_soon, function))
        else:
            result = _with_signals_held(function)
        return self.call(function) if result is NotImplemented else result

    def _behind_soon(self, function: Callable[[], Any]) -> Any:
        """Behind what this thread gave away before; NotImplemented where the keeper is doing it."""
        if not self._doing_soon.acquire(blocking=False):
            return NotImplemented
        self._is_behind_soon = True  # they are sections themselves
        try:
            self._do_soon()
        finally:
            self._is_behind_soon = False
            self._doing_soon.release()
        return function()

    def _do_soon(self) -> None:
        while self._soon:
            self._do(self._soon.popleft())

    def _is_main(self) -> bool:
        return threading.get_ident() == self._main

    def call(self, function: Callable[[], Any]) -> Any:
        if self._ended or not self._is_main() or self._is_behind_soon:
            return function()
        job = _Job(function)
        self._put(job)
        self.park(job.over, None)
        return job.take()

    def soon(self, function: Callable[[], object]) -> None:
        if self._ended or not self._is_main():
            function()
        else:
            self._soon.append(function)
            self._put(nothing)

    def post(self, function: Callable[[], object]) -> None:
        if threading.get_ident() == self.reporter:
            self._do(function)
        else:
            self._put(function)

    def tell(self, callback: Callable[[], object]) -> None:
        self._callbacks.add(callback)

    @property
    def put(self) -> Callable[[Callable[[], object]], object]:
        return self._soon.append

    @property
    def wake(self) -> Callable[[Any], object]:
        if self._thread is None:
            self._start()
        return self._jobs.put

    def park(self, waiter: Waiter, timeout_s: float | None) -> bool:
        if threading.current_thread() is not self._thread:
            return waiter.sleep(timeout_s)
        # A callback waits: nobody else would do what it waits for. Another thread may release it without a job.
        deadline = Deadline(timeout_s)
        while not waiter.sleep(0.0):
            if deadline.over:
                return False
            with contextlib.suppress(queue.Empty):
                self._run(self._jobs.get(timeout=LOOK_S))
        return True

    def pause(self) -> None:
        pass

    def _put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)  # C code: nothing can come in between, not even a finalizer that puts another one
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        # Not under a lock: an exception of a signal handler could leave that locked. One of several takes over.
        threading.Thread(target=self._serve, name="paddle_kv-keeper", daemon=True).start()

    def _serve(self) -> None:
        with self._choosing:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        while not self._ended:
            self._run(self._jobs.get())

    def end(self) -> None:
        """At exit, behind everything else: a thread that comes out of C while the interpreter goes may end the process.
        From then on functions run where they are called."""
        self._ended = True
        if self._thread is not None:
            self._jobs.put(nothing)
            self._thread.join(END_S)
        for end in self.at_end:
            end()

    def _run(self, job: Callable[[], object]) -> None:
        with self._doing_soon:  # before one is taken: :meth:`section` looks the other way round
            self._do_soon()
        self._do(job)

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:  # a _Job keeps its own; this is one that nobody waits for
            log.exception("an error in the thread of paddle_kv")

    def after_fork_in_child(self) -> None:
        self.__init__()  # type: ignore[misc]
        _release_in_child()


def nothing() -> None:
    """A job that only comes behind others."""


def _is_near_the_limit() -> bool:
    """Whether the stack leaves no room: a section must not end half way by a RecursionError."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - ROOM))
    except ValueError:
        return False
    return True


def _cannot_hold(function: Callable[[], Any]) -> Any:
    return NotImplemented


_with_signals_held: Callable[[Callable[[], Any]], Any] = _cannot_hold
_release_in_child: Callable[[], object] = nothing


def hold_signals_with(functions: dict[str, Callable[..., Any]]) -> None:
    """The library's functions for it: ``custom_ops/ops/common/held_signals.cc``."""
    global _with_signals_held, _release_in_child
    _with_signals_held = functions.get("with_signals_held", _cannot_hold)
    _release_in_child = functions.get("release_in_child", nothing)


keeper = Keeper()
atexit.register(keeper.end)  # before all that need it: those run before
os.register_at_fork(after_in_child=keeper.after_fork_in_child)
