"""A tier: the blocks of a pool as checked objects in an engine. What it promises is in docs/tiers.md."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ..checks import check_distinct, check_ids, check_process
from ..errors import ClosedError
from ..layout import check_positive
from ..memory import HostPool
from ..memory.host_rows import block_rows, rows_with_room
from ..ops import _arguments as arguments
from ..timeouts import check_timeout
from ..tracking.group import change, change_soon, wake
from ..tracking.keeper import Deadline, Waiter, log
from ..values import check_methods
from .counters import Counters
from .deadlines import Deadlines
from .items import Item, ReadItem, WriteItem, stages_of
from .job import Job, check_keys
from .object_format import ALIGN_BYTES, ObjectFormat
from .protocol import Engine, Outcome

_Answer = TypeVar("_Answer")
MOST_OBJECTS = 1 << 24  # on their way at once: 64 GiB of headers
_claims = threading.Lock()  # no tier's own: what is freed while it is held may ask for that
LET_GO_S = 1.0  # for an engine that nobody waits for any more, until a tier is closed without it


class Tier:
    """Stores blocks of a host pool in an engine, and loads them, each with its checksums.

    No call waits for storage, but :meth:`drain` and :meth:`close`. What is late, missing, damaged or of another model
    is a miss, and so is all that is asked of an engine that raises.

    Args:
        engine: where the objects are. It stays its owner's: close the tiers first, then the engine.
        pool: ``HostPool(..., layout="block_first")``.
        model: what the content of a block depends on beside spec and tokens, as :func:`~paddle_kv.offload.cache_salt`
            makes it: the model with its revision.
        rank: of this process.
        group: of layers.
        max_store_bytes: stores on their way; what comes beyond is dropped, and counted.
        max_objects: objects on their way in all, each with a header of 4 KiB or more; more are dropped.

    Raises:
        TypeError: no engine, no pool.
        ValueError: a pool that is not block-first, a number that is not positive or far too large.

    Example:
        >>> import tempfile
        >>> from paddle_kv import HostPool, KVCacheSpec
        >>> from paddle_kv.tiers import FilesEngine, Job, Tier
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> pool = HostPool(spec, 4, layout="block_first")
        >>> folder = tempfile.TemporaryDirectory()
        >>> engine = FilesEngine({folder.name: 1 << 20})
        >>> with engine, Tier(engine, pool, model=b"m") as tier:
        ...     pool.view("key", 1, 0)[...] = 2.5
        ...     store, load = Job([b"hash"], [0]), Job([b"hash"], [3])
        ...     tier.store([store])
        ...     tier.drain(timeout_s=10)
        ...     tier.load([load])
        ...     tier.drain(timeout_s=10)
        ...     load.done, tier.exists([b"hash", b"other"]), pool.view("key", 1, 3).max().item()
        (True, [True, False], 2.5)
    """

    least_stage_bytes = 128 << 10  # of an object, behind its first layers: shorter reads cost more than they bring

    def __init__(
        self,
        engine: Engine,
        pool: HostPool,
        *,
        model: bytes,
        rank: int = 0,
        group: int = 0,
        max_store_bytes: int = 1 << 30,
        max_objects: int = 8192,
    ) -> None:
        check_methods(engine, "engine", ("register", "write", "read", "exists", "delete"), "an object")
        if not isinstance(pool, HostPool):
            raise TypeError(f"pool is {type(pool).__name__}; a HostPool is expected")
        if not isinstance(model, bytes):
            raise TypeError(f"model is {type(model).__name__}; bytes are expected")
        self.engine, self.pool = engine, pool
        self.format = ObjectFormat(pool.spec, model, group=group, rank=rank)
        self._rows = block_rows(pool)
        self.aligned = not (self._rows.ctypes.data % ALIGN_BYTES or self._rows.strides[0] % ALIGN_BYTES)
        self._max_store_bytes = check_positive(max_store_bytes, "max_store_bytes")
        # Anonymous memory: only the pages of headers that were ever used at once are there.
        size = self.format.header_bytes
        if check_positive(max_objects, "max_objects") > MOST_OBJECTS:
            raise ValueError(f"max_objects = {max_objects} must be in [1, {MOST_OBJECTS}]")
        self._header_memory = mmap.mmap(-1, max_objects * size, mmap.MAP_PRIVATE)
        memory = memoryview(self._header_memory)
        self._headers = deque(memory[start : start + size] for start in range(0, len(memory), size))
        engine.register(np.frombuffer(memory, np.uint8))
        self._whole = rows_with_room(pool)
        engine.register(self._whole)
        # Where a header lies before its block they are one buffer. None of two tiers may have that.
        self._has_room = pool.room_bytes >= size and not pool.room_lent
        pool.room_lent = pool.room_lent or self._has_room
        self._in_room: dict[int, tuple[memoryview, memoryview]] = {}  # by block; and the header not needed meanwhile
        self._stages = {
            way: stages_of(self.format, self.least_stage_bytes, layerwise=way, aligned=self.aligned)
            for way in (False, True)
        }
        self._lock = threading.Lock()
        self._drains: list[Waiter] = []  # of threads that wait until no job is left
        self._closers: list[Waiter] = []  # of those that wait until nobody waits for one
        self._jobs: dict[Job, None] = {}  # not over
        self._kept: set[Job] = set()  # of these when the tier was closed
        self._store_bytes = 0
        self._finished: list[Job] = []
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._counters = Counters()
        self._deadlines = Deadlines(self._late)
        self._process_id = os.getpid()
        self._closed = False
        self._books: weakref.ref[Any] | None = None  # of the manager that has it

    def payload(self, block_id: int) -> memoryview:
        """The bytes of a block: all layers, as they lie in the pool.

        Raises:
            TypeError, IndexError: not a block of the pool.
        """
        block_id, end = arguments.integer(block_id, "block_id"), self.pool.num_blocks
        if not 0 <= block_id < end:
            raise IndexError(f"block_id = {block_id} must be in [0, {end})")
        return memoryview(self._rows[block_id])

    # ---- calls ----
    def store(self, jobs: Sequence[Job]) -> None:
        """Stores blocks. What the queue has no room for is dropped, and so is what the engine has already."""
        self._call(functools.partial(self._start, jobs, "store", self._writes_of, self.engine.write))

    def load(self, jobs: Sequence[Job]) -> None:
        """Loads blocks."""
        self._call(functools.partial(self._start, jobs, "load", self._reads_of, self.engine.read))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether objects are there: a hint, at the cost of no access to storage. A load may find otherwise. What
        the engine raises is its caller's."""
        self.check_open()
        return self.engine.exists([self.format.name_of(key) for key in check_keys(keys)])

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes objects that are there: from now on they are not found."""
        self.check_open()
        names = [self.format.name_of(key) for key in check_keys(keys)]
        self._call(lambda: self.ask(lambda: self.engine.delete(names), None))

    def clear(self) -> None:
        """Deletes all that the engine has, also of other tiers. It may wait for its storage.

        Raises:
            NotImplementedError: see :meth:`check_clear`.
        """
        self.check_clear()
        self.check_open()
        self.engine.clear()  # type: ignore[attr-defined]

    def check_clear(self) -> None:
        """NotImplementedError if the engine has no method ``clear``, which not every one has."""
        if not hasattr(self.engine, "clear"):
            raise NotImplementedError(
                f"the engine {self.engine.name} cannot delete all; other weights need another salt"
            )

    def fileno(self) -> int:
        """A descriptor (eventfd) that can be read from when a job was settled since the last :meth:`finished`."""
        self.check_open()
        return self._descriptor

    def finished(self) -> list[Job]:
        """The jobs without an observer that were settled since the last call."""
        taken: list[Job] = self._call(self._take_finished)
        return taken

    def _take_finished(self) -> list[Job]:
        with self._lock:
            self.check_open()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
            taken, self._finished = self._finished, []
        return taken

    def stats(self) -> dict[str, Any]:
        """Counts since the tier was made; those of its engine have the prefix ``engine_``."""
        with self._lock:
            found: dict[str, Any] = {
                **self._counters.as_dict(),
                "jobs_in_flight": len(self._jobs),
                "store_bytes_in_flight": self._store_bytes,
            }
        engine: dict[str, float] = self.ask(self.engine.stats, {})
        return found | {f"engine_{name}": value for name, value in engine.items()}

    def drain(self, timeout_s: float | None = None) -> None:
        """Blocks until all jobs are over, and their observers have heard of it.

        Raises:
            TimeoutError: not after ``timeout_s``.
        """
        check_timeout(timeout_s)
        if not self._wait(self._drains, lambda: not self._jobs, timeout_s):
            raise TimeoutError(f"{len(self._jobs)} jobs of the tier were not over after timeout_s = {timeout_s}")

    def _wait(self, waiters: list[Waiter], is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Until it is so, which whoever makes it so tells the waiters; False if that takes longer."""
        waiter = Waiter()
        self._call(functools.partial(self._await, waiter, waiters, is_so))
        found = self.pool.domain.group.host.park(waiter, timeout_s)
        if not found:
            with contextlib.suppress(ValueError):
                waiters.remove(waiter)
        return found

    def _await(self, waiter: Waiter, waiters: list[Waiter], is_so: Callable[[], bool]) -> None:
        with self._lock:
            waiters.append(waiter)  # before it is asked: what is cancelled without the lock looks for whom to tell
            if is_so():
                wake(waiters)

    def _is_unawaited(self) -> bool:
        """Under the lock: whether nobody waits for what is left, since its time is over or it was cancelled."""
        return all(job.settled or job.cancelled for job in self._jobs)

    def _cancelled(self) -> None:
        """A job was, in the middle of anything, also of what the lock is held for."""
        if self._closers and self._process_id == os.getpid():
            self.pool.domain.group.host.post(self._look_at_closers)

    def _look_at_closers(self) -> None:
        with self._lock:
            if self._is_unawaited():
                wake(self._closers)

    @property
    def reads_layerwise(self) -> bool:
        """Whether the first layers of a load can be there before the others: small objects come at once."""
        return len(self._stages[True]) > 1

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the jobs, each until its own time is over, and no longer than ``timeout_s``; then drops what has
        not begun. Again: does nothing.

        Of a job that is cancelled, or late, it waits a second at most: an engine may have lost the answer, and ends it
        when it is closed. Until then such blocks are held as by a lease, the pool cannot be closed, and :meth:`drain`
        waits for them; the log says how many. Close the engine next.
        """
        check_timeout(timeout_s)
        if self._closed or self._process_id != os.getpid():
            return
        deadline = Deadline(timeout_s)
        self._wait(self._closers, self._is_unawaited, timeout_s)
        with self._lock:
            left = list(self._jobs)
        for job in left:
            job.cancel()
        left_s = deadline.left_s()
        if left:
            self._wait(self._drains, lambda: not self._jobs, LET_GO_S if left_s is None else min(LET_GO_S, left_s))
        self._call(self._end)

    def _end(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._descriptor)
            left = list(self._jobs)
        for job in left:
            self._end_all(job, Outcome.DROPPED)
        self._deadlines.close()  # not under the lock: its thread may be about to take it
        kept = change(self.pool.domain, functools.partial(self._keep, left))
        with self._lock:
            self._free_room()
        if kept:
            log.warning(
                "the tier was closed while the engine %s had not let go of %d jobs; their blocks are held until it "
                "has, or is closed",
                self.engine.name,
                kept,
            )

    def _keep(self, jobs: Sequence[Job]) -> int:
        """How many of these, which are all settled, the engine may still be at. The blocks of the others may be
        anybody's by now."""
        with self._lock:
            kept = [job for job in jobs if job in self._jobs and not job.over]
            self._kept.update(kept)
        for job in kept:  # one that is over from here on lets go behind this section
            self.pool.domain.add_lease(job.left_block_ids, write=job.kind == "load")
        return len(kept)

    def _let_go(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.pool.domain.end_lease(job.left_block_ids, write=job.kind == "load")
        self.pool.domain.group.notify()

    def _free_room(self) -> None:
        """Under the lock. Once nothing touches the headers any more another tier may have it."""
        if self._has_room and self._closed and not self._jobs:
            self.pool.room_lent = self._has_room = False

    def __enter__(self) -> Tier:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    # ---- for a manager ----
    def check_unused(self) -> None:
        """ValueError if a manager has it that is not closed, whatever Saver it goes by."""
        if self._books is not None and self._books() is not None:
            raise ValueError("tier is one that another manager has")

    def begin(self, books: object) -> None:
        """These books have it until :meth:`end`, or until nobody refers to them any more.

        Raises:
            ValueError: see :meth:`check_unused`.
        """
        with _claims:
            self.check_unused()
            self._books = weakref.ref(books)

    def end(self, books: object) -> None:
        """It is free again, unless others have it by now."""
        with _claims:
            if self._books is not None and self._books() is books:
                self._books = None

    def ask(self, call: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """What an engine answers. One that raises ends neither the caller nor a thread."""
        try:
            return call()
        except Exception:  # noqa: BLE001  it is nobody's
            log.exception("an error in the engine %s", self.engine.name)
            return otherwise

    # ---- starting ----
    def _call(self, function: Callable[[], Any]) -> Any:
        """Where no signal handler raises in the middle of it."""
        return self.pool.domain.group.host.call(function)

    def _start(
        self,
        jobs: Sequence[Job],
        kind: str,
        items_of: Callable[[Job], list[Any]],
        submit: Callable[[list[Any]], None],
    ) -> None:
        self.check_open()
        if not isinstance(jobs, (list, tuple)) or not all(isinstance(job, Job) for job in jobs):
            raise TypeError(f"jobs is {jobs!r}; a list of Job is expected")
        for job in jobs:
            check_ids(job.block_ids, "block_ids", self.pool.num_blocks)
            if kind == "load":
                check_distinct("block_ids", job.block_ids)
        self._deadlines.start()  # may fail: nothing has begun yet
        for job in jobs:
            with self._lock:
                self.check_open()  # what begins behind a close would not be ended by it
                job.begin(kind, len(self._stages[job.layerwise]), time.monotonic(), self._cancelled)
                self._jobs[job] = None
            items = items_of(job)
            dropped = range(len(items), len(job.keys))
            self._counters.ended(kind, job.end((position, Outcome.DROPPED) for position in dropped), 0)
            self._deadlines.add(job)
            try:
                submit(items)
            except Exception:  # noqa: BLE001  it is nobody's
                log.exception("an error in the engine %s", self.engine.name)
                for item in items:
                    item.give_up()
                self._end_all(job, Outcome.FAILED)
            job.let_go(len(dropped))
            self._look(job)

    def _writes_of(self, job: Job) -> list[WriteItem]:
        room = self._take(job.block_ids, self.format.object_bytes)
        return [WriteItem(self, job, position, header) for position, header in enumerate(room)]

    def _reads_of(self, job: Job) -> list[ReadItem]:
        room, stages = self._take(job.block_ids, 0), self._stages[job.layerwise]
        return [ReadItem(self, job, position, header, stages) for position, header in enumerate(room)]

    def _take(self, block_ids: Sequence[int], store_bytes: int) -> list[memoryview]:
        """A header for as many objects as there is room for."""
        with self._lock:
            count = len(block_ids)
            if store_bytes:
                count = min(count, max(0, self._max_store_bytes - self._store_bytes) // store_bytes)
            count = min(count, len(self._headers))
            self._store_bytes += count * store_bytes
            return [self._header_of(block_id) for block_id in block_ids[:count]]

    def _header_of(self, block_id: int) -> memoryview:
        """Before the block, unless another object of that block has its header there."""
        header = self._headers.popleft()
        if not self._has_room or block_id in self._in_room:
            return header
        end = self.pool.room_bytes
        mine = memoryview(self._whole[block_id][end - self.format.header_bytes : end])
        self._in_room[block_id] = mine, header
        return mine

    def _give_back(self, item: Item) -> None:
        mine, other = self._in_room.get(item.block_id, (None, item.header))
        if mine is item.header:
            del self._in_room[item.block_id]
        self._headers.append(other if mine is item.header else item.header)

    # ---- the end ----
    def items_ended(self, job: Job, ends: Sequence[tuple[Item, Outcome]]) -> None:
        """In a thread of the engine: nothing touches their blocks any more."""
        with self._lock:
            if self._in_room:
                for item, _ in ends:
                    self._give_back(item)
            else:
                self._headers.extend(item.header for item, _ in ends)
            self._store_bytes -= sum(item.size_bytes for item, _ in ends if isinstance(item, WriteItem))
        bad = (Outcome.DAMAGED, Outcome.MISSING)
        lost = [item.name for item, outcome in ends if outcome in bad and isinstance(item, ReadItem)]
        if lost:
            self.ask(lambda: self.engine.delete(lost), None)  # or every lookup would find them again
        fresh = job.end([(item.position, outcome) for item, outcome in ends])
        self._counters.ended(job.kind, fresh, self.format.payload_bytes)
        self._look(job)
        job.let_go(len(ends))
        self._look(job)

    def _late(self, job: Job) -> None:
        """Its time is over. The engine may still be at it; nobody waits for that."""
        self._end_all(job, Outcome.LATE)

    def _end_all(self, job: Job, outcome: Outcome) -> None:
        fresh = job.end((position, outcome) for position in range(len(job.keys)))
        self._counters.ended(job.kind, fresh, 0)
        self._look(job)

    def _look(self, job: Job) -> None:
        if job.settle():
            self._counters.job(job.kind, time.monotonic() - job.started_s)
            with self._lock:
                if not job.observed:
                    self._finished.append(job)
                    if not self._closed:
                        os.eventfd_write(self._descriptor, 1)
            if self._closers:
                self._look_at_closers()
        if job.told:  # over alone is not enough: whoever waits for the tier finds what observers do at the end
            with self._lock:
                self._jobs.pop(job, None)
                kept = job in self._kept
                self._kept.discard(job)
            if kept:
                change_soon(self.pool.domain, functools.partial(self._let_go, [job]))
            with self._lock:
                if not self._jobs:
                    self._free_room()
                    wake(self._drains)

    def check_open(self) -> None:
        """ClosedError or ForkedError unless jobs can be handed to it."""
        check_process(self._process_id, "tier")
        if self._closed:
            raise ClosedError("the tier is closed")
