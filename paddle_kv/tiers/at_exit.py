"""Engines are closed before the interpreter goes: no thread of theirs may be in the middle of a call then."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol

EXIT_TIMEOUT_S = 5.0


class Closable(Protocol):
    """An engine."""

    def close(self, timeout_s: float | None = None) -> None: ...


engines: weakref.WeakSet[Closable] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """What is being stored is completed, what is queued is dropped."""
    for engine in list(engines):
        with contextlib.suppress(Exception):  # nobody is left to be told
            engine.close(EXIT_TIMEOUT_S)
