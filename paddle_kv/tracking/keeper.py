"""Where the library's own work runs, so that no signal handler leaves it half done, and the thread that does the rest.

Python runs signal handlers in the main thread only, between any two of its instructions, and what they raise leaves
whatever runs there half done. A short change of state runs where it is called; in the main thread handlers are put off
until its end. What may take long the main thread hands to a thread of the library, the keeper, and waits: an exception
of a handler then ends the waiting, never the work, and what the main thread calls next comes behind it. Other threads
see no signals and do both themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

END_S = 5.0  # what the last job may take at exit
LOOK_S = 0.001  # how often a callback that waits looks beside the jobs

log = logging.getLogger("paddle_kv")


class Living:
    """What is raised in it is logged and ends there: the thread of the library lives, and does what is left. Also
    ``SystemExit`` and the cancellation of a task: of the caller's code they may come here. In the main thread those are
    a signal handler's, and go on."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is None or (_in_main_thread() and not isinstance(error, Exception)):
            return False
        log.error(self._message, exc_info=error)
        return True


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


NO_END = Deadline(None)


class Host(Protocol):
    """How host threads run, wait and meet: the keeper, or the simulator's stand-in for it.

    Attributes:
        dropped: what finalizers leave to the next section, see :class:`.group.Guard`.
        behind: the main thread may have left something to the thread of the library, and wait for it no more.
    """

    dropped: deque[Any]
    behind: bool

    def call(self, function: Callable[[], Any]) -> Any:
        """The function's result. Whatever is raised into the caller meanwhile, the function runs to its end."""

    def call_here(self, function: Callable[[], Any]) -> Any:
        """:meth:`call` in the calling thread: for what waits for nothing. Nothing is raised into it meanwhile."""

    @property
    def defers(self) -> bool:
        """Whether the calling thread, the main one, leaves to another one what need not be done at once."""

    @property
    def serves(self) -> bool:
        """Whether the calling thread is that of the library: while it waits, others' functions have to run."""

    def soon(self, function: Callable[[], object]) -> None:
        """As :meth:`call`, but the main thread does not wait for it. Calls of one thread keep their order."""

    def post(self, function: Callable[[], object]) -> None:
        """Runs it later, in a thread of the library. May be called by a finalizer in the middle of anything."""

    def tell(self, callback: Callable[[], object]) -> None:
        """:meth:`post` for what users want called."""

    @property
    def put(self) -> Callable[[Callable[[], object]], object]:
        """:meth:`post` in C: no exception of a signal handler comes in between."""

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

    # Runs a function and puts off the handlers that come meanwhile. Of the compiled library, whose Paddle the tracker
    # does not know; without it the thread does everything.
    undisturbed: Callable[[Callable[[], Any]], Any] | None = None

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.behind = False
        self.dropped: deque[Any] = deque()
        self.at_end: list[Callable[[], object]] = []  # what ends other threads of the library
        self._choosing = threading.Lock()
        self._callbacks = Callbacks(self._put)

    def call(self, function: Callable[[], Any]) -> Any:
        if not self.defers:
            return function()
        job = _Job(function)
        self.behind = True
        self._put(job)
        self.park(job.over, None)
        self.behind = False
        return job.take()

    def call_here(self, function: Callable[[], Any]) -> Any:
        if threading.get_ident() != _main_thread:
            return function()
        if self.behind:
            self.call(nothing)
        return self.call(function) if self.undisturbed is None else self.undisturbed(function)

    @property
    def defers(self) -> bool:
        return _in_main_thread() and not self._ended

    @property
    def serves(self) -> bool:
        return threading.current_thread() is self._thread

    def soon(self, function: Callable[[], object]) -> None:
        if self.defers:
            self._put(function)
        else:
            function()

    def post(self, function: Callable[[], object]) -> None:
        self._put(function)

    def tell(self, callback: Callable[[], object]) -> None:
        self._callbacks.add(callback)

    @property
    def put(self) -> Callable[[Callable[[], object]], object]:
        if self._thread is None:
            self._start()
        return self._jobs.put

    def park(self, waiter: Waiter, timeout_s: float | None) -> bool:
        if not self.serves:
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
        with Living("an error in the thread of paddle_kv"):  # a _Job keeps its own; of this one nobody waits for any
            job()

    def after_fork_in_child(self) -> None:
        global _main_thread
        _main_thread = threading.get_ident()
        self.__init__()  # type: ignore[misc]


_main_thread = threading.main_thread().ident  # asked for by each section


def _in_main_thread() -> bool:
    return threading.get_ident() == _main_thread


def nothing() -> None:
    """A job that only comes behind others."""


keeper = Keeper()
atexit.register(keeper.end)  # before all that need it: those run before
os.register_at_fork(after_in_child=keeper.after_fork_in_child)
