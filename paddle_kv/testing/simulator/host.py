"""The host of a simulation: sections run where they are called, and waiting lets the device and other threads run."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ...tracking.keeper import Callbacks, Living, Waiter
from .chooser import LateChooser
from .device import Device, SimulatedStream
from .threads import HostThreads

CHILD_S = 60  # a forked child that hangs is killed


_hosts: weakref.WeakSet[SimulatedHost] = weakref.WeakSet()


class SimulatedHost:
    """See :class:`~paddle_kv.tracking.keeper.Host`. What the library's thread would do is done before the next section,
    or while the caller waits, or when another simulation begins; with several threads, whenever the chooser says so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._posted: deque[Callable[[], object]] = deque()
        self.dropped: deque[Any] = deque()
        self.behind = False
        self._callbacks = Callbacks(self.post)
        self._depth = 0
        self._ending = False
        for host in list(_hosts):
            host._settle()
        _hosts.add(self)

    def _settle(self) -> None:
        """Does what was left: no section comes that would, of a simulation that is over, and a finalizer that waits for
        one keeps all that it belongs to."""
        if self._device.threads is None:
            with Living("an error in what a simulation has left"):
                self._run_posted()

    def run(
        self,
        functions: Sequence[Callable[[], object]],
        *,
        streams: Sequence[SimulatedStream] = (),
        most_switches: int | None = None,
        lines: bool = False,
    ) -> None:
        """Runs the functions in threads of their own, and the library's thread beside them; see :class:`HostThreads`.
        The first function is what a process does in its main thread. ``streams``: the current one of each thread, which
        a scheduler takes that has none of its own."""
        device = self._device
        self._ending = False
        threads = device.threads = HostThreads([*functions, self._serve], most_switches, lines=lines)
        for one, stream in zip(threads.all, streams, strict=False):
            one.stream = stream
        try:
            threads.start(lambda over: device.run_until(lambda: self._all_over(over), None), device.switch_point)
        finally:
            device.threads = None

    def _all_over(self, over: Callable[[], bool]) -> bool:
        threads = self._device.threads
        assert threads is not None
        self._ending = all(one.over for one in threads.all[:-1])
        return over()

    def _serve(self) -> None:
        """The library's thread."""
        while True:
            self._device.run_until(lambda: bool(self._posted) or self._ending, None)
            if not self._posted:
                return
            self._posted.popleft()()
            self._leave_section()

    def fork(self, in_child: Callable[[], object]) -> int:
        """Forks the process, in which the child has the calling thread alone; what that ended with."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the other threads
            child = os.fork()
        if child == 0:
            self._in_child(in_child)
        self._leave_section()
        return os.waitpid(child, 0)[1]

    def _in_child(self, function: Callable[[], object]) -> NoReturn:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        self._device.threads, self._device.chooser = None, LateChooser()
        try:
            function()
        except BaseException:  # noqa: BLE001  nobody above may see it: that would be the parent's work
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    # ---- what the library asks ----
    def call(self, function: Callable[[], Any]) -> Any:
        threads = self._device.threads
        if threads is not None and threads.current.number == 1 and threads.current.depth == 0:
            self._device.run_until(lambda: not self._posted, None)  # its calls keep their order
        return self.call_here(function)

    def call_here(self, function: Callable[[], Any]) -> Any:
        threads = self._device.threads
        if threads is None:
            self._run_posted()
            self._depth += 1
            try:
                return function()
            finally:
                self._depth -= 1
        me = threads.current
        me.depth += 1
        try:
            return function()
        finally:
            me.depth -= 1
            self._leave_section()

    @property
    def defers(self) -> bool:
        threads = self._device.threads
        return threads is not None and threads.current.number == 1

    @property
    def serves(self) -> bool:
        threads = self._device.threads
        return threads is not None and threads.current is threads.all[-1]

    def soon(self, function: Callable[[], object]) -> None:
        if self.defers:
            self.post(function)
        else:
            self.call(function)

    def post(self, function: Callable[[], object]) -> None:
        self._posted.append(function)

    def tell(self, callback: Callable[[], object]) -> None:
        self._callbacks.add(callback)

    @property
    def put(self) -> Callable[[Callable[[], object]], object]:
        return self._posted.append

    def park(self, waiter: Waiter, timeout_s: float | None) -> bool:
        over = False

        def released() -> bool:
            nonlocal over
            if self._device.threads is None:
                self._run_posted()
            over = over or waiter.sleep(0.0)
            return over

        return self._device.run_until(released, timeout_s)

    def pause(self) -> None:
        threads = self._device.threads
        if threads is not None and threads.section is not threads.current:
            me = threads.current
            threads.check()
            self._device.switch_point()
            self._device.run_until(lambda: threads.section in (None, me), None)
            threads.section = me

    def _leave_section(self) -> None:
        threads = self._device.threads
        if threads is not None and threads.section is threads.current:
            threads.section = None

    def _run_posted(self) -> None:
        while self._posted and not self._depth:
            self._posted.popleft()()
