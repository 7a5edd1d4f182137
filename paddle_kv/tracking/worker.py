"""Threads that are waited for at the end of whoever has them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from .keeper import Waiter


class Worker(threading.Thread):
    """One that is over when its function is. Where a signal handler raises out of ``Thread.join``, Python 3.11 takes
    the thread for one that has ended: the next ``join`` would not wait for what it still does.

    Args:
        target: is called in it.
        name: of the thread.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._over = False
        self._waiters: deque[Waiter] = deque()
        self._process_id = os.getpid()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._over = True
            while self._waiters:
                self._waiters.popleft().release()

    def join(self, timeout: float | None = None) -> None:
        if self._process_id == os.getpid():
            waiter = Waiter()
            self._waiters.append(waiter)
            if not (self._over or waiter.sleep(timeout)):
                return
        super().join(timeout)

    def is_alive(self) -> bool:
        begun = self.ident is not None and self._process_id == os.getpid()
        return super().is_alive() or (begun and not self._over)
