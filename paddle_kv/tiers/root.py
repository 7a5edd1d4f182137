"""One root of the engine "files": a folder, and the threads that read and write in it."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections import deque
from typing import Any

from ..tracking.keeper import Deadline, log
from .folder import Folder
from .health import Health
from .object_file import open_file, read_range, takes_direct_io, write_file
from .protocol import Outcome, Read, Write

MOST_OPEN_FILES = 256  # of a root, between the stages of reads
RATE_WEIGHT = 0.1  # of the latest write in the measured rate
FIRST_RATE = 1e9  # bytes/s, until one is measured


class _Reading:
    """A read between its stages."""

    __slots__ = ("descriptor", "item", "path", "stage")

    def __init__(self, item: Read, path: str) -> None:
        self.item = item
        self.path = path
        self.stage = 0
        self.descriptor = -1


class Root:
    """Reads come before writes. Every item is ended, whatever happens."""

    def __init__(self, folder: Folder, num_threads: int) -> None:
        self.folder = folder
        self.reads = Health(f"reading from {folder.path}")
        self.writes = Health(f"writing to {folder.path}")
        self.direct = takes_direct_io(folder.descriptor)
        if not self.direct:
            log.warning("%s has no direct I/O; objects go through the page cache", folder.path)
        self.rate = FIRST_RATE
        self.queued_bytes = 0
        self._lock = threading.Lock()
        self._reads: deque[Read | _Reading] = deque()
        self._writes: deque[Write] = deque()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each item; False: the end
        self._num_open = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                thread = threading.Thread(target=self._run, name=f"paddle_kv-files-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close(Deadline(None))
            raise

    def write(self, item: Write) -> None:
        with self._lock:
            if not self._closed:
                self.queued_bytes += item.size_bytes
                self._writes.append(item)
                self._tickets.put(True)
                return
        item.ended(Outcome.DROPPED)

    def read(self, item: Read) -> None:
        if not self._queue_read(item):
            item.ended(Outcome.DROPPED)

    def _queue_read(self, item: Read | _Reading) -> bool:
        with self._lock:
            if not self._closed:
                self._reads.append(item)
                self._tickets.put(True)
            return not self._closed

    def close(self, deadline: Deadline) -> bool:
        """Whether all threads have ended in time. What is queued is dropped by them."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tickets.put(False)
        for thread in self._threads:
            thread.join(deadline.left_s())
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.folder.close()
        return True

    # ---- in the threads ----
    def _run(self) -> None:
        while self._tickets.get():
            self._serve(self._next())

    def _next(self) -> Read | _Reading | Write | None:
        for items in (self._reads, self._writes):
            with contextlib.suppress(IndexError):
                return items.popleft()
        return None

    def _serve(self, work: Any) -> None:
        try:
            if isinstance(work, _Reading):
                self._read_stage(work)
            elif hasattr(work, "num_stages"):
                self._begin_read(work)
            else:
                self._write(work)
        except Exception:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine files")
            (work.item if isinstance(work, _Reading) else work).ended(Outcome.FAILED)

    def _write(self, item: Write) -> None:
        outcome = Outcome.DROPPED
        started_s = time.monotonic()
        try:
            if item.deadline.over:
                outcome = Outcome.LATE
            elif not (self._closed or self.writes.resting):
                try:
                    outcome = self._store(item)
                except FileNotFoundError:
                    self.folder.check()
                    outcome = self._store(item)
        except OSError as error:
            self.writes.failed(error)
            outcome = Outcome.FAILED
        finally:
            with self._lock:
                self.queued_bytes -= item.size_bytes
                if outcome is Outcome.DONE:
                    rate = item.size_bytes * len(self._threads) / max(time.monotonic() - started_s, 1e-6)
                    self.rate += RATE_WEIGHT * (rate - self.rate)
            item.ended(outcome)

    def _store(self, item: Write) -> Outcome:
        buffers = None if item.name in self.folder else item.buffers()
        # What is not wanted any more must not make others go.
        place = None if buffers is None else self.folder.begin_write(item.name, item.size_bytes)
        if buffers is None or place is None:
            return Outcome.DONE if item.name in self.folder else Outcome.DROPPED
        complete = False
        try:
            write_file(self.folder.descriptor, place.temporary, buffers, direct=self.direct and item.aligned)
            complete = True
        finally:
            self.folder.end_write(place, complete=complete)
        self.writes.worked()
        return Outcome.DONE

    def _begin_read(self, item: Read) -> None:
        if item.deadline.over:
            item.ended(Outcome.LATE)
        elif self._closed or self.reads.resting:
            item.ended(Outcome.DROPPED)
        elif (path := self.folder.begin_read(item.name)) is None:
            item.ended(Outcome.MISSING)
        else:
            self._read_stage(_Reading(item, path))

    def _read_stage(self, reading: _Reading) -> None:
        outcome: Outcome | None = Outcome.FAILED
        try:
            outcome = self._read_range(reading)
            self.reads.worked()
        except FileNotFoundError:
            self.folder.delete(reading.item.name)
            outcome = Outcome.MISSING
        except OSError as error:
            if error.errno == errno.ELOOP:
                outcome = Outcome.DAMAGED  # somebody's link: the storage works
            else:
                self.reads.failed(error)
        finally:
            if outcome is not None:
                self._end_read(reading, outcome)
        if outcome is None and not self._queue_read(reading):
            self._end_read(reading, Outcome.DROPPED)

    def _read_range(self, reading: _Reading) -> Outcome | None:
        """None: there is another stage."""
        item, stage = reading.item, reading.stage
        asked = item.buffers(stage)
        if asked is None or self._closed:
            return Outcome.DROPPED
        descriptor = self._open(reading)
        if stage == 0 and os.fstat(descriptor).st_size != item.size_bytes:
            return Outcome.DAMAGED
        offset, buffers = asked
        if not read_range(descriptor, offset, buffers):
            return Outcome.DAMAGED
        reading.stage += 1
        if not item.arrived(stage) or reading.stage == item.num_stages:
            return Outcome.DONE
        if self._num_open > MOST_OPEN_FILES:
            self._close_file(reading)
        return None

    def _open(self, reading: _Reading) -> int:
        if reading.descriptor < 0:
            direct = self.direct and reading.item.aligned
            reading.descriptor = open_file(self.folder.descriptor, reading.path, direct=direct)
            with self._lock:
                self._num_open += 1
        return reading.descriptor

    def _close_file(self, reading: _Reading) -> None:
        if reading.descriptor >= 0:
            os.close(reading.descriptor)
            reading.descriptor = -1
            with self._lock:
                self._num_open -= 1

    def _end_read(self, reading: _Reading, outcome: Outcome) -> None:
        try:
            self._close_file(reading)
            self.folder.end_read(reading.item.name)
        finally:
            reading.item.ended(outcome)
