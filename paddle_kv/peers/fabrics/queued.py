"""A sink with a thread that takes one write after the other: what engines with blocking calls need."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod

from ...errors import PeerError
from ...timeouts import check_timeout
from ...tracking.keeper import log
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        threads.add(self)

    @abstractmethod
    def move(self, write: Write, first: int, end: int) -> None:
        """These pieces of it are there when it returns; at least by the deadline. Whatever it raises has failed, and
        nothing of it is read any more."""

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
        while (write := self._writes.get()) is not None:
            _end(write, self._broken or self._moved(write))
        while not self._writes.empty():  # nothing comes behind the end
            left = self._writes.get()
            if left is not None:
                _end(left, self._broken)
        try:
            self.disconnect()
        except Exception:  # noqa: BLE001
            log.exception("an error at the end of a sink")

    def _moved(self, write: Write) -> str:
        """Why not."""
        if not write.wanted():
            return "it was cancelled"
        try:
            for first, end in calls(write.sizes):
                if write.deadline.over:
                    raise PeerError("it was not there in time")
                self.move(write, first, end)
        except Exception as error:  # noqa: BLE001  engines have many; the thread lives
            why = f"{type(error).__name__}: {error}"
            self._break(why)
            return why
        return ""


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
    try:
        write.ended(why)
    except Exception:  # noqa: BLE001
        log.exception("an error behind a write to a peer")
