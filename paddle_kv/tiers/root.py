"""One root of the engine "files": a folder, and the threads that read and write in it.

Objects that lie side by side are moved by one call of the system, so that small ones go as large ones do.
"""

from __future__ import annotations

import errno
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..tracking.keeper import Deadline, log
from .folder import Folder
from .health import OF_ONE_OBJECT, Health
from .object_file import read_range, write_range
from .object_format import ALIGN_BYTES
from .protocol import Outcome, Read, Write
from .recovery import recover
from .slab import Slab
from .space import Place, Spot

BATCH_BYTES = 4 << 20  # of objects that one thread takes at once
MOST_BATCHED = 64
RATE_WEIGHT = 0.1  # of the latest write in the measured rate
FIRST_RATE = 1e9  # bytes/s, until one is measured
_PADDING = memoryview(bytes(ALIGN_BYTES))


class _Writing:
    """A write. It fails unless it is known how it ended; no outcome: it waits for another write of its name."""

    __slots__ = ("buffers", "item", "outcome", "place")

    def __init__(self, item: Write) -> None:
        self.item = item
        self.buffers: list[memoryview] | None = None
        self.place: Place
        self.outcome: Outcome | None = Outcome.FAILED

    def padded(self, slot_bytes: int) -> list[memoryview]:
        """What goes into the slot; nothing if nobody wants that."""
        if self.buffers is None:
            self.buffers = self.item.buffers()
        rest = slot_bytes - self.item.size_bytes
        return [*self.buffers, _PADDING[:rest]] if self.buffers and rest else self.buffers or []


class _Reading:
    """A read between its stages."""

    __slots__ = ("aligned", "item", "outcome", "size_bytes", "spot", "stage")

    def __init__(self, item: Read) -> None:
        self.item = item
        self.size_bytes = item.size_bytes
        self.aligned = item.aligned
        self.stage = 0
        self.spot: Spot | None = None  # from its beginning on
        self.outcome: Outcome | None = None


class _Part:
    """Bytes that one stage of a read asks for, from ``start`` to ``stop`` of a slab."""

    __slots__ = ("buffers", "reading", "slab", "start", "stop")

    def __init__(self, reading: _Reading, offset: int, buffers: list[memoryview]) -> None:
        assert reading.spot is not None
        self.reading = reading
        self.slab, slot = reading.spot
        self.buffers = buffers
        self.start = slot * self.slab.slot_bytes + offset
        self.stop = self.start + sum(map(len, buffers))


class Root:
    """Reads come before writes. Every item is ended, whatever happens."""

    def __init__(self, folder: Folder, num_threads: int) -> None:
        self.folder = folder
        self.reads = Health(f"reading from {folder.path}")
        self.writes = Health(f"writing to {folder.path}")
        if not folder.direct:
            log.warning("%s has no direct I/O; objects go through the page cache", folder.path)
        self.rate = FIRST_RATE
        self.queued_bytes = 0
        self.most_batched = MOST_BATCHED
        self._lock = threading.Lock()
        self._reads: deque[_Reading] = deque()
        self._writes: deque[Write] = deque()
        self._deleted: deque[Spot] = deque()
        self._tickets: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there is work; False: the end
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                self._start(self._run, f"paddle_kv-files-{number}")
            self._num_workers = num_threads
            self.recovery = self._start(self._recover, "paddle_kv-files-recovery")
        except BaseException:
            self.close(Deadline(None))
            raise

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def write(self, items: Sequence[Write]) -> None:
        with self._lock:
            taken = not self._closed
            if taken:
                self.queued_bytes += sum(item.size_bytes for item in items)
                self._writes.extend(items)
                self._wake(len(items))
        for item in () if taken else items:
            item.ended(Outcome.DROPPED)

    def read(self, items: Sequence[Read]) -> None:
        if not self._queue_reads([_Reading(item) for item in items]):
            for item in items:
                item.ended(Outcome.DROPPED)

    def _queue_reads(self, readings: Sequence[_Reading]) -> bool:
        with self._lock:
            if not self._closed:
                self._reads.extend(readings)
                self._wake(len(readings))
            return not self._closed

    def delete(self, names: Iterable[bytes]) -> None:
        """From now on they are not found; their slots are given back later."""
        gone = self.folder.delete(names)
        with self._lock:
            queued = not self._closed
            if gone and queued:
                self._deleted.extend(gone)
                self._wake(1)
        if not queued:
            self._clear(gone)  # by a thread that ends: none comes behind it

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._threads))):
            self._tickets.put(True)

    def close(self, deadline: Deadline) -> bool:
        """Whether all threads have ended in time. What is queued is dropped by them."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._tickets.put(False)
        for thread in self._threads:
            thread.join(deadline.left_s())
        return not any(thread.is_alive() for thread in self._threads)

    # ---- in the threads ----
    def _recover(self) -> None:
        try:
            recover(self.folder, lambda: self._closed)
        except Exception:  # noqa: BLE001  what is not known is not served
            log.exception("what a former process left in %s could not be looked at", self.folder.path)

    def _run(self) -> None:
        while self._tickets.get():
            while self._serve():
                pass

    def _serve(self) -> bool:
        """Whether there was something to do."""
        with self._lock:
            deleted, reads, writes = list(self._deleted), [], []
            self._deleted.clear()
            if not deleted:
                reads = _batch(self._reads, self.most_batched)
                writes = [] if reads else _batch(self._writes, self.most_batched)
                self.queued_bytes -= sum(item.size_bytes for item in writes)
        if deleted:
            self._clear(deleted)
        elif reads:
            self._read(reads)
        elif writes:
            self._write(writes)
        return bool(deleted or reads or writes)

    def _clear(self, deleted: Sequence[Spot]) -> None:
        failure = self.folder.clear(deleted)
        if failure is not None:
            log.warning("%s: what was deleted may be found again after a restart: %s", self.folder.path, failure)
            self.writes.failed(failure)

    # ---- writing ----
    def _write(self, items: list[Write]) -> None:
        writings, started_s = [_Writing(item) for item in items], time.monotonic()
        try:
            lost = self._store([one for one in writings if self._wanted(one)])
            if lost:
                self.folder.check()
                lost = self._store(lost)
            if lost:
                raise FileNotFoundError(errno.ENOENT, "the folder is not there", str(self.folder.path))
        except OSError as error:
            self.writes.failed(error)
        except Exception:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine files")
        finally:
            done_bytes = sum(one.item.size_bytes for one in writings if one.outcome is Outcome.DONE)
            if done_bytes:
                rate = done_bytes * self._num_workers / max(time.monotonic() - started_s, 1e-6)
                with self._lock:
                    self.rate += RATE_WEIGHT * (rate - self.rate)
            for one in writings:
                if one.outcome is not None:
                    _end(one.item, one.outcome)

    def _wanted(self, one: _Writing) -> bool:
        """What is not wanted any more must not make others go."""
        if one.item.deadline.over:
            one.outcome = Outcome.LATE
        elif self._closed or self.writes.resting:
            one.outcome = Outcome.DROPPED
        elif one.item.name in self.folder:
            return True  # nothing to write, as it seems
        else:
            one.buffers = one.item.buffers()
            if one.buffers is None:
                one.outcome = Outcome.DROPPED
        return one.buffers is not None

    def _store(self, writings: Sequence[_Writing]) -> list[_Writing]:
        """Returns those for which a file was missing."""
        lost, placed, failures = [], [], {}
        for one, place in zip(writings, self.folder.begin_write([one.item for one in writings]), strict=True):
            if isinstance(place, Place):
                one.place = place
                placed.append(one)
            elif isinstance(place, FileNotFoundError):
                lost.append(one)
            elif isinstance(place, OSError):
                failures[id(place)] = place
            else:
                one.outcome = place
        for failure in failures.values():
            self.writes.failed(failure)
        placed.sort(key=lambda one: (one.place.slab.number, one.place.slot))
        runs = deque(_runs(placed, lambda one: (one.place.slab, one.place.slot, one.place.slot + 1)))
        try:
            while runs:
                lost += self._write_run(runs.popleft())
        finally:
            for run in runs:
                self._end_run(run, complete=False)
        return lost

    def _write_run(self, run: Sequence[_Writing]) -> list[_Writing]:
        """Neighbours, at once. Every place is ended. Returns those for which a file was missing."""
        slab, failure = run[0].place.slab, None
        try:
            buffers = [one.padded(slab.slot_bytes) for one in run]
            complete = all(buffers)
            if complete:
                direct = self.folder.direct and run[0].item.aligned
                at = run[0].place.slot * slab.slot_bytes
                write_range(slab.file(direct=direct), at, list(itertools.chain.from_iterable(buffers)))
        except OSError as error:
            complete, failure = False, error
        except BaseException:
            self._end_run(run, complete=False)
            raise
        if not complete and len(run) > 1 and (failure is None or failure.errno in OF_ONE_OBJECT):
            return [lost for one in run for lost in self._write_run([one])]
        failure = self._end_run(run, complete=complete, failure=failure)
        if isinstance(failure, FileNotFoundError):
            return list(run)
        if failure is not None:
            self.writes.failed(failure)
        elif complete:
            self.writes.worked()
        return []

    def _end_run(self, run: Sequence[_Writing], *, complete: bool, failure: OSError | None = None) -> OSError | None:
        places = [one.place for one in run]
        try:
            self.folder.end_write(places, complete=complete, bad=failure is not None)
        except OSError as error:
            failure = error
        for one in run:
            if one.place.kept:
                one.outcome = Outcome.DONE
            elif failure is None:
                one.outcome = Outcome.DROPPED
            for other in one.place.waiting:
                if one.place.kept:
                    _end(other, Outcome.DONE)
                else:
                    self.write([other])
        return failure

    # ---- reading ----
    def _read(self, readings: list[_Reading]) -> None:
        try:
            self._begin([one for one in readings if one.spot is None])
            asked = []
            for one in readings:
                if one.outcome is None:
                    part = None if self._closed else one.item.buffers(one.stage)
                    if part is None:
                        one.outcome = Outcome.DROPPED
                    else:
                        asked.append(_Part(one, *part))
            asked.sort(key=lambda part: (part.slab.number, part.start))
            for run in _runs(asked, lambda part: (part.slab, part.start, part.stop)):
                self._read_run(run)
        except Exception:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine files")
            for one in readings:
                one.outcome = one.outcome or Outcome.FAILED
        finally:
            left = [one for one in readings if one.outcome is None]
            over = [one for one in readings if one.outcome is not None]  # before another thread goes on with the others
            if left and not self._queue_reads(left):
                over += left
            for one in over:
                if one.spot is not None:
                    self.folder.end_read(one.spot)
                _end(one.item, one.outcome or Outcome.DROPPED)

    def _begin(self, readings: Sequence[_Reading]) -> None:
        for one in readings:
            if one.item.deadline.over:
                one.outcome = Outcome.LATE
            elif self._closed or self.reads.resting:
                one.outcome = Outcome.DROPPED
        wanted = [one for one in readings if one.outcome is None]
        for one, place in zip(wanted, self.folder.begin_read([one.item.name for one in wanted]), strict=True):
            if place is None:
                one.outcome = Outcome.MISSING
            elif one.size_bytes > place[0].slot_bytes:
                one.outcome = Outcome.DAMAGED
                self.folder.end_read(place)
            else:
                one.spot = place

    def _read_run(self, run: Sequence[_Part]) -> None:
        """Ranges that lie side by side, at once."""
        slab, whole = run[0].slab, False
        try:
            direct = self.folder.direct and run[0].reading.item.aligned
            buffers = [buffer for part in run for buffer in part.buffers]
            whole = read_range(slab.file(direct=direct), run[0].start, buffers)
            self.reads.worked()
        except OSError as error:
            if len(run) == 1:
                self.reads.failed(error)
                run[0].reading.outcome = Outcome.FAILED
                if error.errno in OF_ONE_OBJECT:
                    self.delete([run[0].reading.item.name])
                return
        if not whole:
            if len(run) == 1:
                run[0].reading.outcome = Outcome.DAMAGED
            for part in run if len(run) > 1 else ():
                self._read_run([part])
            return
        for part in run:
            one, stage = part.reading, part.reading.stage
            one.stage += 1
            if not one.item.arrived(stage) or one.stage == one.item.num_stages:
                one.outcome = Outcome.DONE


def _batch(items: deque[Any], most: int) -> list[Any]:
    """Objects of one size that a thread takes at once."""
    if not items:
        return []
    batch = [items.popleft()]
    size, aligned = batch[0].size_bytes, batch[0].aligned
    most = min(most, BATCH_BYTES // size)
    while items and len(batch) < most and (items[0].size_bytes, items[0].aligned) == (size, aligned):
        batch.append(items.popleft())
    return batch


def _runs(found: Sequence[Any], where: Callable[[Any], tuple[Slab, int, int]]) -> list[list[Any]]:
    """Those of one slab of which each begins where the one before ends, together."""
    runs: list[list[Any]] = []
    before: tuple[Slab, int] | None = None
    for one in found:
        slab, start, stop = where(one)
        if before == (slab, start):
            runs[-1].append(one)
        else:
            runs.append([one])
        before = slab, stop
    return runs


def _end(item: Write | Read, outcome: Outcome) -> None:
    try:
        item.ended(outcome)
    except Exception:  # noqa: BLE001  the others are ended too
        log.exception("an error in the end of an object")
