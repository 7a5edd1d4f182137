"""Tells when the time of a job is over, whatever the storage does meanwhile."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from ..tracking.keeper import Living
from .job import Job


class Deadlines:
    """A thread that sleeps until the next deadline."""

    def __init__(self, late: Callable[[Job], None]) -> None:
        self._late = late
        self._queue: list[tuple[float, int, Job]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Before the first job; again: does nothing."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="paddle_kv-tier-deadlines", daemon=True)
                thread.start()
                self._thread = thread

    def add(self, job: Job) -> None:
        with self._changed:
            # Those that are over are not kept until their time has come.
            if len(self._queue) > 64 and self._queue[len(self._queue) // 2][2].settled:
                self._queue = [entry for entry in self._queue if not entry[2].settled]
                heapq.heapify(self._queue)
            heapq.heappush(self._queue, (job.started_s + job.timeout_s, job.number, job))
            if self._queue[0][2] is job:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            with Living("an error in the deadlines of a tier"):
                self._late(job)

    def _next(self) -> Job | None:
        """Blocks until a job is late; None at the end."""
        with self._changed:
            while not self._closed:
                while self._queue and self._queue[0][2].settled:
                    heapq.heappop(self._queue)
                left_s = self._queue[0][0] - time.monotonic() if self._queue else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._queue)[2]
                self._changed.wait(left_s if left_s is None else min(left_s, threading.TIMEOUT_MAX))
        return None
