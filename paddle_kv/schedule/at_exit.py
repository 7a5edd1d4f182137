"""No memory may go away while a copy runs, not even when the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from typing import Protocol

from ..tracking.group import Grouped, change
from .resources import release_abandoned

EXIT_TIMEOUT_S = 30.0


class Closable(Grouped, Protocol):
    """A scheduler."""

    def drop(self, *, also_submitted: bool) -> None: ...

    def drain(self, timeout_s: float | None = None) -> None: ...

    def close(self, timeout_s: float | None = None) -> None: ...


schedulers: weakref.WeakSet[Closable] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """What is submitted arrives, what is not is dropped."""
    for scheduler in list(schedulers):
        with contextlib.suppress(Exception):  # nobody is left to be told
            change(scheduler, functools.partial(scheduler.drop, also_submitted=False))
            scheduler.drain(EXIT_TIMEOUT_S)
            scheduler.close(EXIT_TIMEOUT_S)
    release_abandoned()
