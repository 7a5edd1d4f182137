"""Moves what a directory has planned: one beside each cache, in the process of its rank."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ..backend.work import Stream
from ..checks import check_ids
from ..errors import ClosedError, TransferError
from ..ops import _arguments as arguments
from ..schedule import settling, submission
from ..schedule.movement import Movement
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..timeouts import check_timeout
from ..tracking.group import MemoryGroup, change
from ..tracking.keeper import Deadline
from .checks import checked_count, checked_list
from .hashing import spec_digest
from .jobs import Hello, Job, Result, new_life
from .messages import check_job
from .moving import Moves, Moving


@dataclass(frozen=True)
class Submitted:
    """The transfers that a step's jobs became: what a ``ForwardPass`` of the step takes.

    Attributes:
        loads: whose layers the pass waits for.
        saves: the layerwise ones, whose layers it marks. Keep them: one that is lost is cancelled.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


_Kind = tuple[str, bool, float | None]  # of jobs that may be one transfer: they end together, also by their time


class _Batch:
    """Jobs that one transfer can carry, and what they touch."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.jobs: list[Job] = []
        self.device: set[int] = set()
        self.host: set[int] = set()

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        self.device.update(job.device_ids)
        self.host.update(job.host_slots)

    def is_before(self, job: Job) -> bool:
        """Whether the job has to wait for it: they touch a block, and not both to read it."""
        loads = job.kind == "load"
        reads_both = (self.kind[0] == "load") == loads
        device = self.device.isdisjoint(job.device_ids) or (reads_both and not loads)
        host = self.host.isdisjoint(job.host_slots) or (reads_both and loads)
        return not device or not host


def batches_of(jobs: Iterable[Job]) -> list[list[Job]]:
    """As few as keep the order in which jobs touch a block: only reads of one block may stand in any order."""
    done: list[_Batch] = []
    open_batches: dict[_Kind, _Batch] = {}
    for job in jobs:
        kind = (job.kind, job.layerwise, job.timeout_s)
        if any(batch.is_before(job) for batch in open_batches.values()):
            done += open_batches.values()
            open_batches = {}
        open_batches.setdefault(kind, _Batch(kind)).add(job)
    return [batch.jobs for batch in [*done, *open_batches.values()]]


class Mover:
    """Loads and saves of one rank. The host pool of the scheduler becomes the mover's: all blocks that are free now.

    Args:
        scheduler: of this rank; it and its pool stay the caller's to close.
        rank: from 0.
        capacity_blocks: host blocks for the directory; None: all that are free.

    Attributes:
        epoch: a number of this life of the rank.

    Raises:
        TypeError: not a scheduler, or a number that is no integer.
        ValueError: a negative rank, less than one block.
        MemoryError: the pool has not so many free blocks.

    Any thread may call, but jobs are moved in the order in which they are submitted.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.offload import Directory, Mover
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> mover, directory = Mover(scheduler), Directory(8)
        >>> directory.join(mover.hello())
        []
        >>> _ = mover.submit([directory.plan_save([b"a", b"b"], [4, 2]).job])
        >>> scheduler.drain()  # an engine goes on with its step
        >>> [saved] = directory.complete(mover.finished())
        >>> saved.failed, directory.peek([b"a", b"b"])
        ((), 2)
        >>> mover.close(); scheduler.close()
    """

    def __init__(self, scheduler: LayerwiseScheduler, *, rank: int = 0, capacity_blocks: int | None = None) -> None:
        check_scheduler(scheduler)
        self.rank = arguments.integer(rank, "rank")
        if self.rank < 0:
            raise ValueError(f"rank = {rank} must not be negative")
        pool = scheduler.host_pool
        if capacity_blocks is not None:
            capacity_blocks = checked_count(capacity_blocks, "capacity_blocks", least=1)
        count = pool.num_free_blocks if capacity_blocks is None else capacity_blocks
        self._scheduler = scheduler
        self._spec = spec_digest(scheduler.device_cache.spec)
        self._blocks = pool.allocate(count)  # slot -> block of the pool
        self._moves = Moves(scheduler)
        self._holds: dict[int, bytes] = {}  # slot -> the block whose bytes are in it
        self._written_by: dict[int, Job] = {}  # slot -> its last save
        self._ended: list[Result] = []
        self._deadlines: dict[Moving, float] = {}
        self._closed = False
        self.epoch = new_life()

    @property
    def group(self) -> MemoryGroup:
        """The lock under which it changes."""
        return self._scheduler.group

    def hello(self) -> Hello:
        """What the directory is told first, and after :meth:`restart`."""
        return Hello(self.rank, self.epoch, len(self._blocks), self._spec)

    def submit(self, jobs: Sequence[Job]) -> Submitted:
        """Starts what the directory has planned for a step, in few transfers. What cannot be started (of another life
        of the rank, a block that is not there) ends as failed, and :meth:`finished` tells.

        Raises:
            TypeError: not a job, or not of its form.
            ValueError: a job of another version, or one that is no load or save of so many different blocks.
            IndexError: a job names a block that this rank has not.
            ClosedError: closed. Then nothing was started.
        """
        jobs = checked_list(jobs, "jobs", "Job")
        for job in jobs:
            check_job(job)
            check_ids(job.device_ids, f"device_ids of job {job.id}", self._scheduler.device_cache.num_blocks)
            check_ids(job.host_slots, f"host_slots of job {job.id}", len(self._blocks))
        compute = self._scheduler.compute_stream(None)
        submitted = Submitted()
        change(self, functools.partial(self._submit_here, jobs, compute, submitted))
        for transfer in [*submitted.loads, *submitted.saves]:
            self._hold_if_failed(transfer)
        return submitted

    def finished(self) -> list[Result]:
        """How jobs have ended since the last call, for the directory. Does not wait: an engine calls it in each step,
        and whoever wants to sleep until something ends does so on ``scheduler.fileno()``. Jobs that are not over in
        their time are cancelled here."""
        if not self._moves.moving and not self._ended:  # an engine asks in each step: without a section
            return []
        return list(change(self, self._finished_here))

    def restart(self, timeout_s: float = 10.0) -> Hello:
        """Begins a new life, with nothing in host memory: when the directory has lost the rank. Cancels all jobs and
        waits until nothing of them moves.

        Raises:
            TimeoutError: a transfer was not over after ``timeout_s``; the old life goes on.
            TypeError, ValueError: a time that is none.
            ClosedError: closed.
        """
        check_timeout(timeout_s)
        deadline = Deadline(timeout_s)
        while moving := change(self, self._begin_anew):  # again: another thread may have submitted meanwhile
            for movement in moving:
                Transfer(movement).wait_over(deadline.left_s())
        return self.hello()

    def close(self) -> None:
        """Cancels its jobs and gives its blocks back to the pool. Again: does nothing."""
        change(self, self._close_here)

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hold_if_failed(self, transfer: Transfer) -> None:
        """The compute stream waits for what may run of a submission that went wrong; its jobs end as failed."""
        with contextlib.suppress(TransferError):
            self._scheduler.check_started(transfer)

    # ---- sections ----
    def _submit_here(self, jobs: list[Job], compute: Stream, submitted: Submitted) -> None:
        if self._closed:
            raise ClosedError("the mover is closed")
        for batch in batches_of([job for job in jobs if self._accept(job)]):
            try:
                self._start(batch, compute, submitted)
            except TransferError:
                for job in batch:  # whichever it was, the others go on
                    try:
                        self._start([job], compute, submitted)
                    except TransferError as error:
                        self._refuse(job, str(error), error.damaged_host_blocks)

    def _accept(self, job: Job) -> bool:
        wrong, lost = "", []
        if job.epochs[self.rank : self.rank + 1] != (self.epoch,):
            wrong = "it was planned for another life of the rank"
        elif job.space.spec and job.space.spec != self._spec:
            wrong = "it is for a cache of another spec"
        elif job.tier is not None:
            wrong = f"this rank has no tier {job.tier!r}"
        elif job.kind == "load" and tuple(map(self._holds.get, job.host_slots)) != job.keys:
            wrong = "a block is not in host memory"
            there = zip(job.host_slots, job.keys, strict=True)
            lost = [self._blocks[slot] for slot, key in there if self._holds.get(slot) != key]
        if wrong:
            self._refuse(job, wrong, lost)
        elif job.kind == "save":
            for slot in job.host_slots:
                self._holds.pop(slot, None)
                self._written_by[slot] = job
        return not wrong

    def _start(self, jobs: list[Job], compute: Stream, submitted: Submitted) -> None:
        saves, layerwise = jobs[0].kind == "save", jobs[0].layerwise
        slots = [slot for job in jobs for slot in job.host_slots]
        ids = [one for job in jobs for one in job.device_ids]
        blocks = [self._blocks[slot] for slot in slots]
        transfer = self._moves.start("offload" if saves else "onload", ids, blocks, compute, layerwise=layerwise)
        transfer._movement.computed_from = ()  # the directory knows from what, and which ranks have failed
        transfer._movement.told = True  # by the result: an engine waits for no save
        moving = Moving(transfer._movement, jobs)
        self._moves.moving.append(moving)
        if (timeout_s := jobs[0].timeout_s) is not None:
            self._deadlines[moving] = time.monotonic() + timeout_s
        if not saves:
            submitted.loads.append(transfer)
        elif layerwise:
            submitted.saves.append(transfer)

    def _refuse(self, job: Job, reason: str, damaged: Iterable[int] = ()) -> None:
        wrong = set(damaged)
        positions = tuple(i for i, slot in enumerate(job.host_slots) if self._blocks[slot] in wrong)
        everything = tuple(range(len(job.keys)))
        self._ended.append(Result(job.id, self.rank, self.epoch, everything, positions, reason))

    def _finished_here(self) -> list[Result]:
        now_s = time.monotonic()
        for moving, deadline_s in list(self._deadlines.items()):
            if deadline_s <= now_s:
                settling.progress(submission.cancel(moving.movement))
        for moving in self._moves.take_over():
            self._deadlines.pop(moving, None)
            self._ended += moving.results(self.rank, self.epoch, self._blocks)
            if not moving.failed:
                for job in moving.jobs:
                    for slot, key in zip(job.host_slots, job.keys, strict=True):
                        if self._written_by.get(slot) is job:  # and no later one, which may have written a part
                            self._holds[slot] = key
        taken, self._ended = self._ended, []
        return taken

    def _cancel_all(self) -> None:
        for moving in self._moves.moving:
            settling.progress(submission.cancel(moving.movement))

    def _begin_anew(self) -> list[Movement]:
        """What still moves; if nothing does, all is forgotten."""
        if self._closed:
            raise ClosedError("the mover is closed")
        self._cancel_all()
        still = [moving.movement for moving in self._moves.moving if not moving.movement.over]
        if not still:
            self._moves.moving.clear()
            for books in (self._deadlines, self._ended, self._holds, self._written_by):
                books.clear()
            self.epoch = new_life()
        return still

    def _close_here(self) -> None:
        if not self._closed:
            self._closed = True
            self._cancel_all()
            if not self._scheduler.host_pool.closed:
                self._scheduler.host_pool.free_here(self._blocks)
