"""Senders stop writing, and threads of channels end, before the interpreter goes."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol

EXIT_TIMEOUT_S = 5.0


class Closable(Protocol):
    """A sender, a receiver, or the thread of a channel."""

    def close(self, timeout_s: float | None = None) -> None: ...


endpoints: weakref.WeakSet[Closable] = weakref.WeakSet()
threads: weakref.WeakSet[Closable] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Channels last: the endpoints still say by them that they are through."""
    for one in [*endpoints, *threads]:
        with contextlib.suppress(Exception):  # nobody is left to be told
            one.close(EXIT_TIMEOUT_S)
