"""Host threads of a simulation: real ones, of which one runs at a time. Which one is a choice like any other.

A thread can be left at each entering of a section, wherever it waits, at each call into the backend, and, if asked for,
at each line of the scheduler.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ...tracking.group import registry
from ...tracking.keeper import nothing
from .chooser import Transition

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_AT_EACH_LINE = tuple(
    os.path.join(_PACKAGE, room) + os.sep for room in ("tracking", "schedule", "memory", "offload", "integrations")
)
_PRIMITIVES = "keeper.py"  # what this module itself asks


class Abandoned(BaseException):
    """Another thread has failed: this one ends."""


class HostThread:
    """One of them. ``ready`` says whether it can go on; one that has a time-out can when nothing else can run."""

    def __init__(self, number: int, function: Callable[[], object]) -> None:
        self.number = number
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = _always
        self.timed = False
        self.over = False
        self.error: BaseException | None = None
        self.depth = 0  # calls of the host that it is in
        self.turns = 0
        self.stream: Any = None  # the current one of this thread
        self._function = function

    @property
    def transition(self) -> Transition:
        return Transition(("thread", self.number, self.turns), frozenset(), frozenset())

    def run(self, trace: Any) -> None:
        self.baton.acquire()
        sys.settrace(trace)
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  told by the one who waits for all
            self.error = error
        finally:
            sys.settrace(None)
            self.over = True


class HostThreads:
    """Runs functions, each in a thread of its own. The caller waits and is none of them.

    Args:
        most_switches: how often a thread may be left that could go on; None: no bound.
        lines: whether a thread can be left at each line of the scheduler, too.
    """

    def __init__(self, functions: Sequence[Callable[[], object]], most_switches: int | None, *, lines: bool) -> None:
        self.all = [HostThread(number, function) for number, function in enumerate(functions, start=1)]
        self.current = self._caller = HostThread(0, nothing)
        self.section: HostThread | None = None  # who is in one
        self._left = most_switches
        self._trace = self._on_call if lines else None
        self._switch_here: Callable[[], None] = nothing
        self._process_id = os.getpid()
        self.abandoned = False

    def start(self, wait: Callable[[Callable[[], bool]], object], switch_here: Callable[[], None]) -> None:
        """Until all are over; raises what the first one raised."""
        self._switch_here = switch_here
        started = [threading.Thread(target=self._run, args=[one], daemon=True) for one in self.all]
        for thread in started:
            thread.start()
        try:
            wait(lambda: all(one.over for one in self.all) or any(one.error for one in self.all))
        finally:
            self.abandoned = True
            for one, thread in zip(self.all, started, strict=True):
                if not one.over:
                    self._switch_to(one)
                thread.join()
        for one in self.all:
            if one.error is not None and not isinstance(one.error, Abandoned):
                raise one.error

    def _run(self, one: HostThread) -> None:
        one.run(self._trace)
        if self.section is one:
            self.section = None
        self.current = self._caller
        self._caller.baton.release()

    def others(self, *, must: bool) -> list[HostThread]:
        """Those that can go on instead of the one that runs. ``must``: it cannot go on itself."""
        if self.abandoned or (not must and self._left == 0) or self._process_id != os.getpid():
            return []  # a forked child has one thread
        return [one for one in self.all if one is not self.current and not one.over and one.ready()]

    def late(self) -> list[HostThread]:
        """Those whose time is over, since nothing else can happen."""
        return [one for one in self.all if one is not self.current and one.timed and not (one.over or self.abandoned)]

    def switch(self, other: HostThread, *, must: bool) -> None:
        """Comes back when somebody switches to the caller."""
        if not must and self._left is not None and self.current is not self._caller:
            self._left -= 1
        other.turns += 1
        self._switch_to(other)
        self.check()

    def check(self) -> None:
        """Raises in a thread that is to end: who held a lock may have been left behind."""
        if self.abandoned and self.current is not self._caller:
            raise Abandoned

    def _switch_to(self, other: HostThread) -> None:
        here, self.current = self.current, other
        other.baton.release()
        here.baton.acquire()

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_AT_EACH_LINE) or file.endswith(_PRIMITIVES) or _in_finalizer(frame):
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self.section is not self.current and not registry._is_owned():  # type: ignore[attr-defined]
            self._switch_here()
        return self._on_line


def _in_finalizer(frame: FrameType | None) -> bool:
    """One may come in the middle of a choice."""
    for _ in range(6):
        if frame is None or frame.f_code.co_name == "__del__":
            return frame is not None
        frame = frame.f_back
    return False


def _always() -> bool:
    return True
