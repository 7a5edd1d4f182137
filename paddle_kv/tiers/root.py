"""One root of the engine "files": a folder, and the threads that read and write in it.

Objects that lie side by side are moved by one call of the system, so that small ones go as large ones do.
"""

from __future__ import annotations

import errno
import functools
import heapq
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..tracking.keeper import Deadline, log
from ..tracking.worker import Worker
from . import object_file
from .folder import Folder
from .health import OF_ONE_OBJECT, Health
from .object_file import ALL_MOVED, FILE_ENDED
from .object_format import ALIGN_BYTES
from .protocol import Outcome, Read, Write, arrived, buffers_of, ended
from .recovery import recover
from .slab import Slab
from .space import Place, Spot

BATCH_BYTES = 4 << 20  # of objects that one thread takes at once
FIRST_BATCH_BYTES = 256 << 10  # of first layers: all threads work at them until the last one is there
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
        """What goes into the slot."""
        assert self.buffers is not None
        rest = slot_bytes - self.item.size_bytes
        return [*self.buffers, _PADDING[:rest]] if rest else self.buffers


class _Reading:
    """A read between its stages."""

    __slots__ = ("at", "buffers", "call", "item", "outcome", "slab", "slot", "stage")

    def __init__(self, item: Read, call: _Call) -> None:
        self.item = item
        self.call = call
        self.stage = 0
        self.slab: Slab | None = None  # from its beginning on
        self.slot = self.at = 0
        self.buffers: list[memoryview] = []
        self.outcome: Outcome | None = None

    def ask(self) -> bool:
        """Where the next stage is, and where it goes; whether anybody wants it."""
        asked = self.item.buffers(self.stage)
        if asked is None:
            return False
        assert self.slab is not None
        self.at = self.slot * self.slab.slot_bytes + asked[0]
        self.buffers = asked[1]
        return True


class _Call:
    """What is read together, layer by layer: what of it waits for its next stage."""

    __slots__ = ("number", "queued")

    def __init__(self, number: int, items: Sequence[Read]) -> None:
        self.number = number
        self.queued = deque(_Reading(item, self) for item in items)


_Work = Callable[[], object]


class Root:
    """Reads come before writes, in order of the calls: what was asked for first is there first, and not all at the end.
    Every item is ended, whatever happens."""

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
        self._numbers = itertools.count()
        self._calls: list[tuple[int, _Call]] = []  # for reads, of which something waits: a heap
        self._num_reads = 0  # that wait
        self._writes: deque[Write] = deque()
        self._deleted: deque[Spot] = deque()
        self._handed: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # to threads that wait; None: the end
        self._num_idle = 0  # threads that wait, and to whom nothing was handed
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._num_workers = num_threads
        try:
            for number in range(num_threads):
                self._start(self._run, f"paddle_kv-files-{number}")
            self.recovery = self._start(self._recover, "paddle_kv-files-recovery")
        except BaseException:
            self.close(Deadline(None))
            raise

    def _start(self, run: Callable[[], None], name: str) -> threading.Thread:
        thread = Worker(run, name)
        thread.start()
        self._threads.append(thread)
        return thread

    def write(self, items: Sequence[Write]) -> None:
        with self._lock:
            taken = not self._closed
            if taken:
                self.queued_bytes += sum(item.size_bytes for item in items)
                self._writes.extend(items)
                self._hand_out()
        if not taken:
            ended([(item, Outcome.DROPPED) for item in items])

    def read(self, items: Sequence[Read]) -> None:
        call = _Call(next(self._numbers), items)
        with self._lock:
            taken = not self._closed
            if taken and items:
                heapq.heappush(self._calls, (call.number, call))
                self._num_reads += len(items)
                self._hand_out()
        if not taken:
            ended([(item, Outcome.DROPPED) for item in items])

    def _queue_again(self, readings: Sequence[_Reading]) -> bool:
        """For their next stages. By a thread that comes back for one of them at least."""
        with self._lock:
            if not self._closed:
                for one in readings:
                    if not one.call.queued:
                        heapq.heappush(self._calls, (one.call.number, one.call))
                    one.call.queued.append(one)
                self._num_reads += len(readings)
                self._hand_out(mine=1)
            return not self._closed

    def delete(self, names: Iterable[bytes]) -> None:
        """From now on they are not found; their slots are given back later."""
        gone = self.folder.delete(names)
        with self._lock:
            queued = not self._closed
            if gone and queued:
                self._deleted.extend(gone)
                self._hand_out()
        if not queued:
            self._clear(gone)  # by a thread that ends: none comes behind it

    def _hand_out(self, mine: int = 0) -> None:
        """Work to the threads that wait for some. Under the lock."""
        while self._num_idle and self._num_reads + len(self._writes) + len(self._deleted) > mine:
            work = self._next(self._num_idle + mine)
            if work is None:
                return
            self._num_idle -= 1
            self._handed.put(work)

    def close(self, deadline: Deadline) -> bool:
        """Whether all threads have ended in time. What is queued is dropped by them."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._handed.put(None)
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
        while True:
            with self._lock:
                work = self._next(self._num_workers)
                self._num_idle += work is None
            if work is None:
                work = self._handed.get()
            if work is None:
                return
            work()
            del work  # it names objects and their blocks

    def _next(self, threads: int) -> _Work | None:
        """What a thread takes at once. ``threads``: to share the reads with. Under the lock."""
        if self._deleted:
            deleted = list(self._deleted)
            self._deleted.clear()
            return functools.partial(self._clear, deleted)
        if self._num_reads:
            reads = self._take_reads(min(self.most_batched, -(-self._num_reads // threads)))
            return functools.partial(self._read, reads)
        if self._writes:
            writes = _batch(self._writes, self.most_batched)
            self.queued_bytes -= sum(item.size_bytes for item in writes)
            return functools.partial(self._write, writes)
        return None

    def _take_reads(self, most: int) -> list[_Reading]:
        """Of the first call of which something waits, and of those behind it."""
        first = self._calls[0][1].queued[0]
        room = BATCH_BYTES if first.stage or first.item.num_stages == 1 else FIRST_BATCH_BYTES
        reads: list[_Reading] = []
        while self._calls and len(reads) < most and room > 0:
            queued = self._calls[0][1].queued
            reads.append(queued.popleft())
            room -= reads[-1].item.stage_bytes(reads[-1].stage)
            if not queued:
                heapq.heappop(self._calls)
        self._num_reads -= len(reads)
        return reads

    def _clear(self, deleted: Sequence[Spot]) -> None:
        failure = self.folder.clear(deleted)
        if failure is not None:
            log.warning("%s: what was deleted may be found again after a restart: %s", self.folder.path, failure)
            self.writes.failed(failure)

    # ---- writing ----
    def _write(self, items: list[Write]) -> None:
        writings, started_s = [_Writing(item) for item in items], time.monotonic()
        try:
            lost = self._store(self._wanted(writings))
            if lost:
                self.folder.check()
                lost = self._store(lost)
            if lost:
                raise FileNotFoundError(errno.ENOENT, "the folder is not there", str(self.folder.path))
        except OSError as error:
            self.writes.failed(error)
        except BaseException:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine files")
        finally:
            done_bytes = sum(one.item.size_bytes for one in writings if one.outcome is Outcome.DONE)
            if done_bytes:
                rate = done_bytes * self._num_workers / max(time.monotonic() - started_s, 1e-6)
                with self._lock:
                    self.rate += RATE_WEIGHT * (rate - self.rate)
            ended([(one.item, one.outcome) for one in writings if one.outcome is not None])

    def _wanted(self, writings: Sequence[_Writing]) -> list[_Writing]:
        """What is not wanted any more must not make others go."""
        dropped, asked = self._closed or self.writes.resting, []
        for one in writings:
            if one.item.deadline.over:
                one.outcome = Outcome.LATE
            elif dropped:
                one.outcome = Outcome.DROPPED
            elif one.item.name not in self.folder:  # else there is nothing to write, as it seems
                asked.append(one)
        _ask(asked)
        for one in asked:
            if one.buffers is None:
                one.outcome = Outcome.DROPPED
        return [one for one in writings if one.outcome is Outcome.FAILED]

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
        slabs = deque(list(some) for _, some in itertools.groupby(placed, lambda one: one.place.slab))
        try:
            while slabs:
                lost += self._write_slots(slabs.popleft())
        finally:
            for some in slabs:
                self._end_slots(some, complete=False)
        return lost

    def _write_slots(self, writings: list[_Writing]) -> list[_Writing]:
        """Those of one slab, by slot. Every place is ended. Returns those for which a file was missing."""
        lost: list[_Writing] = []
        left: deque[tuple[int | None, list[_Writing]]] = deque([(None, writings)])
        try:
            codes = dict(zip(writings, self._written(writings), strict=True))
            left = deque((code, list(some)) for code, some in itertools.groupby(writings, codes.__getitem__))
            while left:
                code, some = left.popleft()
                failure = OSError(code, os.strerror(code)) if code else None
                failure = self._end_slots(some, complete=code == ALL_MOVED, failure=failure)
                if isinstance(failure, FileNotFoundError):
                    lost += some
                elif failure is not None:
                    for _ in some if failure.errno in OF_ONE_OBJECT else some[:1]:
                        self.writes.failed(failure)
                elif code is not None:
                    self.writes.worked()
        finally:
            for _, some in left:
                self._end_slots(some, complete=False)
        return lost

    def _written(self, writings: Sequence[_Writing]) -> list[int | None]:
        """What the system says of each, in one call; None: nobody wants it any more."""
        slab = writings[0].place.slab
        _ask([one for one in writings if one.buffers is None])
        try:
            descriptor = slab.file(direct=self.folder.direct and writings[0].item.aligned)
        except OSError as error:
            return [error.errno or errno.EIO] * len(writings)
        size = slab.slot_bytes
        ranges = [(descriptor, one.place.slot * size, one.padded(size)) for one in writings if one.buffers]
        codes = iter(object_file.write_ranges(ranges))
        return [next(codes) if one.buffers else None for one in writings]

    def _end_slots(self, some: Sequence[_Writing], *, complete: bool, failure: OSError | None = None) -> OSError | None:
        places = [one.place for one in some]
        try:
            self.folder.end_write(places, complete=complete, bad=failure is not None)
        except OSError as error:
            failure = error
        for one in some:
            if one.place.kept:
                one.outcome = Outcome.DONE
            elif failure is None:
                one.outcome = Outcome.DROPPED
            for other in one.place.waiting:
                if one.place.kept:
                    ended([(other, Outcome.DONE)])
                else:
                    self.write([other])
        return failure

    # ---- reading ----
    def _read(self, readings: list[_Reading]) -> None:
        """The next stage of each."""
        try:
            self._begin([one for one in readings if one.slab is None])
            asked = []
            for one in readings:
                if one.outcome is None:
                    if not self._closed and one.ask():
                        asked.append(one)
                    else:
                        one.outcome = Outcome.DROPPED
            asked.sort(key=lambda one: (one.slab.number, one.at))  # type: ignore[union-attr]
            self._read_stages(asked)
        except BaseException:  # noqa: BLE001  the thread lives
            log.exception("an error in a thread of the engine files")
            for one in readings:
                one.outcome = one.outcome or Outcome.FAILED
        finally:
            left = [one for one in readings if one.outcome is None]
            over = [one for one in readings if one.outcome is not None]  # before another thread goes on with the others
            if left and not self._queue_again(left):
                over += left
            self.folder.end_read([(one.slab, one.slot) for one in over if one.slab is not None])
            ended([(one.item, one.outcome or Outcome.DROPPED) for one in over])

    def _begin(self, readings: Sequence[_Reading]) -> None:
        for one in readings:
            if one.item.deadline.over:
                one.outcome = Outcome.LATE
            elif self._closed or self.reads.resting:
                one.outcome = Outcome.DROPPED
        wanted = [one for one in readings if one.outcome is None]
        for one, spot in zip(wanted, self.folder.begin_read([one.item.name for one in wanted]), strict=True):
            if spot is None:
                one.outcome = Outcome.MISSING
                continue
            one.slab, one.slot = spot
            if one.item.size_bytes > one.slab.slot_bytes:
                one.outcome = Outcome.DAMAGED

    def _read_stages(self, readings: Sequence[_Reading]) -> None:
        whole = []
        for one, result in zip(readings, self._results(readings), strict=True):
            if result > 0:
                self.reads.failed(OSError(result, os.strerror(result)))
                one.outcome = Outcome.FAILED
                if result in OF_ONE_OBJECT:
                    self.delete([one.item.name])
                continue
            self.reads.worked()
            if result == FILE_ENDED:
                one.outcome = Outcome.DAMAGED
            else:
                whole.append(one)
        for one, wanted in zip(whole, arrived([(one.item, one.stage) for one in whole]), strict=True):
            one.stage += 1
            if not wanted or one.stage == one.item.num_stages:
                one.outcome = Outcome.DONE

    def _results(self, readings: Sequence[_Reading]) -> list[int]:
        ranges: list[object_file.Range] = []
        failures: dict[int, int] = {}
        for position, one in enumerate(readings):
            assert one.slab is not None
            try:
                descriptor = one.slab.file(direct=self.folder.direct and one.item.aligned)
            except OSError as error:
                failures[position] = error.errno or errno.EIO
            else:
                ranges.append((descriptor, one.at, one.buffers))
        results = object_file.read_ranges(ranges)
        for position, code in failures.items():
            results.insert(position, code)
        return results


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


def _ask(writings: Sequence[_Writing]) -> None:
    """For what is to be written."""
    for one, buffers in zip(writings, buffers_of([one.item for one in writings]), strict=True):
        one.buffers = buffers
