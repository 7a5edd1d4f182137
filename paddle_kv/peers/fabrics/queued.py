"""A sink with a thread that takes one write after the other, and what waits together: for engines whose calls block."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod

import numpy as np

from ...errors import PeerError
from ...timeouts import check_timeout
from ...tracking.keeper import Deadline, Living
from ...tracking.worker import Worker
from ..at_exit import threads
from .protocol import Addresses, Write

MOST_PIECES = 1024  # of one call of an engine
MOST_BYTES = 16 << 20  # the same: a deadline is looked at between calls


class QueuedSink(ABC):
    """See :class:`~paddle_kv.peers.fabrics.protocol.Sink`."""

    def __init__(self, name: str) -> None:
        self._writes: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._broken = ""
        self._lock = threading.Lock()  # a write is behind the end, or ended
        self._process_id = os.getpid()
        self._thread = Worker(self._run, name)
        self._thread.start()
        threads.add(self)

    @abstractmethod
    def move(self, write: Write, first: int, end: int) -> None:
        """These pieces of it are there when it returns, soon after its deadline at the latest. Whatever it raises has
        failed, and nothing of it is read any more."""

    @abstractmethod
    def disconnect(self) -> None:
        """At the end of the thread."""

    def write(self, write: Write) -> None:
        with self._lock:
            if not self._broken:
                self._writes.put(write)
                return
        _end(write, self._broken)

    def close(self, timeout_s: float | None = None) -> None:
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        self._break("the sink is closed")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"a write has not ended after timeout_s = {timeout_s}")

    def _break(self, why: str) -> None:
        with self._lock:
            if not self._broken:
                self._broken = why
                self._writes.put(None)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            writes, goes_on = self._next()
            wanted = [write for write in writes if not self._broken and write.wanted()]
            why = self._moved(wanted) if wanted else ""
            for write in writes:
                _end(write, why if write in wanted else self._broken or "it was cancelled")
        with Living("an error at the end of a sink"):
            self.disconnect()

    def _next(self) -> tuple[list[Write], bool]:
        """What waits, as much as one call of the engine takes; and whether there may be more."""
        found: list[Write] = []
        num_pieces = num_bytes = 0
        while not found or (num_pieces < MOST_PIECES and num_bytes < MOST_BYTES and not self._writes.empty()):
            write = self._writes.get()
            if write is None:
                return found, False  # nothing comes behind it
            found.append(write)
            num_pieces += len(write.sizes)
            num_bytes += int(write.sizes.sum())
        return found, True

    def _moved(self, writes: list[Write]) -> str:
        """Why not."""
        deadline = min((write.deadline for write in writes), key=_left_s)
        together = Write(
            np.concatenate([write.sources for write in writes]),
            np.concatenate([write.targets for write in writes]),
            np.concatenate([write.sizes for write in writes]),
            deadline,
            _nobody,
        )
        try:
            for first, end in calls(together.sizes):
                if deadline.over:
                    raise PeerError("it was not there in time")
                self.move(together, first, end)
        except BaseException as error:  # noqa: BLE001  engines have many; the thread lives
            why = f"{type(error).__name__}: {error}"
            self._break(why)
            return why
        return ""


def _left_s(deadline: Deadline) -> float:
    left_s = deadline.left_s()
    return float("inf") if left_s is None else left_s


def _nobody(why: str) -> None:
    pass


def calls(sizes: Addresses) -> list[tuple[int, int]]:
    """Ranges of pieces for one call each."""
    found, first, size_bytes = [], 0, 0
    for end, size in enumerate(sizes.tolist()):
        if end > first and (end - first == MOST_PIECES or size_bytes + size > MOST_BYTES):
            found.append((first, end))
            first, size_bytes = end, 0
        size_bytes += size
    return [*found, (first, len(sizes))] if len(sizes) else []


def _end(write: Write, why: str) -> None:
    with Living("an error behind a write to a peer"):
        write.ended(why)
