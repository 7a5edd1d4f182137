"""No memory may go away while a copy runs, not even when the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol

from .resources import release_abandoned

EXIT_TIMEOUT_S = 30.0


class Closable(Protocol):
    """A scheduler."""

    def end(self, timeout_s: float | None, *, at_exit: bool = False) -> None: ...


schedulers: weakref.WeakSet[Closable] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """What is submitted arrives, what is not is dropped. Threads that go on submitting are refused from here on, or
    they would be in the middle of a call when the interpreter goes."""
    for scheduler in list(schedulers):
        with contextlib.suppress(Exception):  # nobody is left to be told
            scheduler.end(EXIT_TIMEOUT_S, at_exit=True)
    release_abandoned()
