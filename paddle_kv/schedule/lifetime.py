"""From the making of a scheduler to the end of what it holds on its device."""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Self

from ..backend.protocol import Backend
from ..checks import check_process
from ..errors import ClosedError, ReentryError
from ..memory import DeviceCache, HostPool
from ..timeouts import check_timeout
from ..tracking.group import MemoryGroup, change, wait_until
from ..tracking.keeper import Deadline
from . import settling, submission
from .at_exit import EXIT_TIMEOUT_S, schedulers
from .finished import Finished
from .movement import Movement
from .resources import DeviceResources, abandoned, release_abandoned
from .uses import Use, is_held_here, notify


class Lifetime:
    """Opens, closes, and refuses what comes in between; :class:`.LayerwiseScheduler` is the rest."""

    def __init__(self, device_cache: DeviceCache, host_pool: HostPool, backend: Backend) -> None:
        self.device_cache = device_cache
        self.host_pool = host_pool
        self.backend = backend
        self._process_id = os.getpid()
        self._in_flight: dict[Movement, None] = {}
        self._finished = Finished()
        self._closed = self._released = self._ending = False
        self._closers: weakref.WeakSet[Use] | None = None  # None: nobody has tried to
        self._users: weakref.WeakSet[Use] = weakref.WeakSet()
        self.on_close: list[Callable[[], object]] = []  # in sections, when its transfers were cancelled

    @property
    def group(self) -> MemoryGroup:
        """The lock under which all of this changes."""
        return self.host_pool.domain.group

    def _open(self) -> None:
        release_abandoned()
        given_back = functools.partial(notify, self.host_pool.domain)
        self.resources = DeviceResources(self.backend, self.device_cache, self.host_pool, given_back)
        self.origin_event = self.resources.origin_event
        self._origin_s = time.perf_counter()  # before: no copy may seem to end in the future
        try:
            self.backend.record(self.origin_event, self.resources.streams["onload"])
            self.backend.wait(self.origin_event, None)
        except BaseException:
            self.resources.release()
            raise
        self._abandon = weakref.finalize(self, abandoned.append, self.resources)
        self._abandon.atexit = False
        schedulers.add(self)

    def check_open(self) -> None:
        """Raises ForkedError or ClosedError unless calls are taken."""
        if self._process_id != os.getpid():
            check_process(self._process_id, "scheduler")
        if self._closed or self._closers or self._ending:
            raise ClosedError("the scheduler is closed")
        if self.host_pool.closed:
            raise ClosedError("the host pool is closed")

    def drain(self, timeout_s: float | None = None) -> None:
        """Blocks until all transfers of this scheduler are over, failed ones too (their errors stay with them).

        Raises:
            TimeoutError: not after ``timeout_s``, for example because a layer was never marked as written.
        """
        check_timeout(timeout_s)
        change(self, self._look_at_all)
        if not wait_until(self, self._is_idle, timeout_s):
            left = self.in_flight()
            if left:
                raise TimeoutError(
                    f"{len(left)} transfers were not over after timeout_s = {timeout_s}; the first: {left[0]!r}"
                )

    def in_flight(self) -> list[Any]:
        """The transfers that are not over."""
        raise NotImplementedError

    def _look_at_all(self) -> None:
        for movement in list(self._in_flight):
            settling.look(movement)

    def _is_idle(self) -> bool:
        return not self._in_flight

    def _is_unused(self) -> bool:
        return not self._users and self.resources.num_events <= 1  # the own one

    def close(self, timeout_s: float | None = None) -> None:
        """Drops what the device has not been given, waits for the rest, and gives streams and events back, once.

        The pools stay: they are the user's to close.

        Raises:
            TimeoutError: a transfer was not over after ``timeout_s``; the scheduler stays open then.
            ReentryError: a signal handler, or a finalizer, has called it while the same thread was about to wait for,
                or to mark, a layer of this scheduler, or in :meth:`record_event`: that call uses what would be given
                back, and goes on only behind the handler. The scheduler stays open then.
        """
        self.end(timeout_s)

    def end(self, timeout_s: float | None, *, at_exit: bool = False) -> None:
        """:meth:`close`; at exit what is submitted arrives, and nothing is taken from then on."""
        if self._process_id != os.getpid():
            return
        check_timeout(timeout_s)
        if not self._closed and is_held_here(self):
            raise ReentryError(
                "close was called in the middle of a call of the same thread, by a signal handler or a finalizer; that "
                "call uses what close would give back: leave that call first"
            )
        closer = Use(self.group)  # or threads that go on submitting would keep it open
        try:
            if not self._closed:
                deadline = Deadline(timeout_s)
                change(self, functools.partial(self._begin_close, closer, at_exit))
                self.drain(timeout_s)
                change(self, functools.partial(self.resources.guard_events, self.host_pool.domain))
                if not wait_until(self, self._is_unused, deadline.left_s()):
                    raise TimeoutError(f"other threads were still about to wait after timeout_s = {timeout_s}")
                self.group.host.call(self._finish_close)
            wait_until(self, lambda: self._released, None)  # another thread may be at it
        finally:
            if self._closers is not None:
                self._closers.discard(closer)

    def _begin_close(self, closer: Use, at_exit: bool) -> None:
        if self._closers is None:
            self._closers = weakref.WeakSet()
        self._closers.add(closer)
        self._ending |= at_exit
        for movement in list(self._in_flight):
            settling.progress(submission.cancel(movement, also_submitted=not at_exit))
        for function in self.on_close:
            function()

    def _finish_close(self) -> None:
        """By one hand-over: an exception of a signal handler between its two halves would leave it closed for ever."""
        if change(self, self._end_close):
            self._release()

    def _end_close(self) -> bool:
        was_open, self._closed = not self._closed, True
        return was_open

    def _release(self) -> None:
        try:
            self._abandon.detach()
            self._finished.close()
            self.resources.release(functools.partial(change, self))
            release_abandoned()
        finally:
            self._released = True
            self.group.notify()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(EXIT_TIMEOUT_S)
