"""Jobs in flight: one counts as done where every rank says so, and is over at its deadline whoever has not."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from .checks import check_integer
from .jobs import Hello, Job, Outcome, Result, new_life
from .messages import check_result

REMEMBERED_FAILURES = 4096
NO_POSITIONS: frozenset[int] = frozenset()


class Pending:
    """A job in flight.

    Attributes:
        waiting: ranks that have not said how it ended.
        after: loads that a save was computed from, of which it is not decided how they end.
        failed, damaged: positions that some rank has not moved, or found damaged.
    """

    __slots__ = ("after", "damaged", "decided", "dependents", "failed", "job", "reason", "waiting")

    def __init__(self, job: Job, waiting: set[int]) -> None:
        self.job = job
        self.waiting = waiting
        self.after: set[int] = set()
        self.dependents: list[Pending] = []
        self.failed = self.damaged = NO_POSITIONS
        self.reason = ""
        self.decided = False

    def fail(self, reason: str) -> None:
        self.failed = frozenset(range(len(self.job.keys)))
        self.reason = self.reason or reason

    def outcome(self) -> Outcome:
        job = self.job
        failed = tuple(sorted(self.failed)) if self.failed else ()
        late = tuple(sorted(self.waiting)) if self.waiting else ()
        return Outcome(job.id, job.kind, job.keys, job.device_ids, failed, late, self.reason)


class Ranks:
    """Which ranks there are, in which of their lives, and the jobs that they have not ended.

    Attributes:
        epochs: rank -> its life; None: it is not there.
        ready: whether all are there.
        named_epochs: as a job says them: 0 for a rank that is not there.

    ``settle`` is called once for each job, when it is decided how it ends; ``drop`` with a job and
    positions that a rank has found damaged when that was decided already.
    """

    def __init__(
        self,
        num_ranks: int,
        clock: Callable[[], float],
        settle: Callable[[Pending], None],
        drop: Callable[[Job, Sequence[int]], object],
    ) -> None:
        self._set_epochs((None,) * num_ranks)
        self._lost: set[tuple[int, int | None]] = set()  # rank and life
        self.pending: dict[int, Pending] = {}
        self._clock = clock
        self._settle = settle
        self._drop = drop
        self._due: list[tuple[float, int, bool]] = []  # when, whose, and whether it is the second time
        self._first = self._next = new_life()  # so a job of another directory is never taken for one of this
        self._failed: dict[int, None] = {}  # loads, the oldest first
        self._forgotten = 0  # the largest number of a failed load that is not remembered any more

    def begin(self, rank: int, epoch: int | None) -> None:
        """Another life of this rank; None: it is not there."""
        self._set_epochs((*self.epochs[:rank], epoch, *self.epochs[rank + 1 :]))

    def _set_epochs(self, epochs: tuple[int | None, ...]) -> None:
        """And what each job asks of them."""
        self.epochs = epochs
        self.ready = None not in epochs
        self.named_epochs = tuple(epoch or 0 for epoch in epochs)
        self._there = frozenset(rank for rank, epoch in enumerate(epochs) if epoch is not None)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that were there, and are not."""
        if self.ready:
            return frozenset()
        return frozenset(rank for rank, _ in self._lost if self.epochs[rank] is None)

    def next_id(self) -> int:
        self._next += 1
        return self._next - 1

    def add(self, job: Job, computed_from: Iterable[int] = ()) -> None:
        """It is about to be sent to all ranks."""
        there, now_s, timeout_s = self._there, self._clock(), job.timeout_s
        pending = self.pending[job.id] = Pending(job, set(there))
        for number in computed_from:
            load = self.pending.get(number)
            if load is not None and not load.decided:
                pending.after.add(number)
                load.dependents.append(pending)
        if not there:  # nobody will say anything of it, whatever its time
            heapq.heappush(self._due, (now_s, job.id, False))
        elif timeout_s is not None:
            heapq.heappush(self._due, (now_s + timeout_s, job.id, False))

    def has_failed(self, load_id: int) -> bool:
        """Whether a load has ended as failed, or may have, so long ago that nobody knows."""
        pending = self.pending.get(load_id)
        if pending is not None:  # perhaps decided, and not over because a rank is late
            return pending.decided and bool(pending.failed)
        return load_id in self._failed or load_id <= self._forgotten

    def check_loads(self, numbers: Iterable[int]) -> None:
        """TypeError or ValueError unless all of them are loads that were planned here."""
        for position, number in enumerate(numbers):
            if type(number) is not int:
                raise TypeError(
                    f"computed_from[{position}] is {type(number).__name__}; the number of a load is expected"
                )
            pending = self.pending.get(number)
            if not self._first <= number < self._next or (pending is not None and pending.job.kind != "load"):
                raise ValueError(
                    f"computed_from[{position}] = {number} must be a load of this directory, whose jobs have "
                    f"numbers in [{self._first}, {self._next})"
                )

    def check_rank(self, rank: int) -> None:
        """TypeError or ValueError unless there is such a rank."""
        check_integer(rank, "rank")
        if not 0 <= rank < len(self.epochs):
            raise ValueError(f"rank = {rank} must be in [0, {len(self.epochs)})")

    def check_hello(self, hello: Hello) -> None:
        """ValueError: no such rank, or one that was lost and may still move what it had."""
        self.check_rank(hello.rank)
        if (hello.rank, hello.epoch) in self._lost:
            raise ValueError(
                f"rank {hello.rank} was lost in its life {hello.epoch}; restart() of its mover begins another"
            )

    def check_result(self, result: Result) -> None:
        """TypeError: not a result, or not of its form. ValueError: another version, no such rank, or positions that the
        job has not."""
        check_result(result)
        self.check_rank(result.rank)
        if not result.failed and not result.damaged:
            return
        pending = self.pending.get(result.job_id)
        if pending is not None:
            count = len(pending.job.keys)
            for position in (*result.failed, *result.damaged):
                if not 0 <= position < count:
                    name = f"position {position} of job {result.job_id}"
                    raise ValueError(f"rank {result.rank} names {name}; it must be in [0, {count})")

    def lose(self, rank: int, reason: str) -> list[Outcome]:
        """The rank is gone with all that it had: what was not decided has failed."""
        self._lost.add((rank, self.epochs[rank]))
        self.begin(rank, None)
        found = []
        for pending in list(self.pending.values()):
            waited = rank in pending.waiting
            pending.waiting.discard(rank)
            if not pending.decided:
                pending.fail(reason)
                found += self._decide(pending)
            elif waited and not pending.waiting:
                found.append(self._end(pending))
        return found

    def take(self, results: Iterable[Result]) -> list[Outcome]:
        """What the ranks have said; of another life of theirs it does not count."""
        found = []
        for result in results:
            if self.epochs[result.rank] != result.epoch:
                continue
            pending = self.pending.get(result.job_id)
            if pending is None or result.rank not in pending.waiting:  # it has said so already
                continue
            pending.waiting.discard(result.rank)
            if pending.decided:
                if result.damaged:
                    self._drop(pending.job, result.damaged)
                found += [] if pending.waiting else [self._end(pending)]
                continue
            if result.failed or result.damaged:
                pending.failed = pending.failed.union(result.failed, result.damaged)
                pending.damaged = pending.damaged.union(result.damaged)
                pending.reason = pending.reason or f"rank {result.rank}: {result.reason}"
            if not pending.waiting and not pending.after:
                found += self._decide(pending)
        return found

    def expire(self) -> tuple[list[Outcome], list[int]]:
        """What is over because its time is; and the ranks that have not ended a job after twice its time."""
        now_s = self._clock()
        found: list[Outcome] = []
        stuck: set[int] = set()
        while self._due and self._due[0][0] <= now_s:
            _, number, again = heapq.heappop(self._due)
            pending = self.pending.get(number)
            if pending is None:
                continue
            if again:
                stuck |= pending.waiting
                continue
            timeout_s = pending.job.timeout_s
            if not pending.decided:
                late = f"ranks {sorted(pending.waiting)} were not done after timeout_s = {timeout_s}"
                pending.fail(late if pending.waiting else "no rank was there when it was planned")
                found += self._decide(pending)
            if timeout_s is not None and pending.waiting:
                # From now on: or a pause of this process would lose ranks whose answers are waiting to be read.
                heapq.heappush(self._due, (now_s + timeout_s, number, True))
        return found, sorted(stuck)

    def _decide(self, pending: Pending) -> list[Outcome]:
        """With the saves that wait for it."""
        pending.decided = True
        self._settle(pending)
        if not pending.waiting:
            del self.pending[pending.job.id]
        own = pending.outcome()
        if pending.job.kind == "save" or not (pending.failed or pending.dependents):
            return [own]  # nothing else hangs on how it ends: nothing is computed from what one saves
        return [own, *self._decide_saves_of(pending)]

    def undo(self, pending: Pending) -> list[Outcome]:
        """It was begun on no rank: nothing of it is settled, and what was computed from it has failed."""
        del self.pending[pending.job.id]
        pending.waiting.clear()
        if pending.decided:
            return [pending.outcome()]
        pending.decided = True
        pending.fail("it was never begun")
        return self._decide_saves_of(pending)

    def _decide_saves_of(self, pending: Pending) -> list[Outcome]:
        """It is decided how a load ends: so may be the saves that were computed from it."""
        if pending.failed and pending.job.kind == "load":
            self._failed[pending.job.id] = None
            if len(self._failed) > REMEMBERED_FAILURES:
                oldest = next(iter(self._failed))
                del self._failed[oldest]
                self._forgotten = max(self._forgotten, oldest)
        found: list[Outcome] = []
        for save in pending.dependents:
            save.after.discard(pending.job.id)
            if pending.failed:
                save.fail(f"load {pending.job.id}, from which it was computed, failed")
            if not save.decided and not save.waiting and not save.after:
                found += self._decide(save)
        return found

    def _end(self, pending: Pending) -> Outcome:
        del self.pending[pending.job.id]
        return pending.outcome()
