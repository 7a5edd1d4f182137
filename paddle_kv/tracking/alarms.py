"""Calls functions when their time has come, in a thread that sleeps until then."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable

from .keeper import Living


class Alarms:
    """Starts its thread with the first alarm. :meth:`add` may be called in a section: it takes no lock of ours."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._given: queue.SimpleQueue[tuple[float, int, Callable[[], object]] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, at_s: float, function: Callable[[], object]) -> None:
        """``at_s`` on the monotonic clock. In sections of one group only."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # may fail: then nothing was taken
            self._thread = thread
        self._given.put((at_s, next(self._numbers), function))

    def close(self) -> None:
        """What is still to come is dropped."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stop(self) -> None:
        """As :meth:`close`, and waits for nobody."""
        self._given.put(None)

    def _run(self) -> None:
        waiting: list[tuple[float, int, Callable[[], object]]] = []
        while True:
            left_s = min(max(0.0, waiting[0][0] - time.monotonic()), threading.TIMEOUT_MAX) if waiting else None
            with contextlib.suppress(queue.Empty):
                found = self._given.get(timeout=left_s)
                if found is None:
                    return
                heapq.heappush(waiting, found)
            while waiting and waiting[0][0] <= time.monotonic():
                with Living(f"an error in {self._name}"):
                    heapq.heappop(waiting)[2]()
