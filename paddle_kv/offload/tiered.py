"""The books of a manager with a tier below host memory, as a whole: what comes up from there (:mod:`.reading`), and
what goes down."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence, Set
from typing import Any

from ..errors import ClosedError, ForkedError
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from ..tiers import Job as TierJob
from ..tiers import Outcome, Saver, Tier
from ..tiers.job import check_keys
from ..tracking.group import change
from ..tracking.keeper import Deadline
from .below import Below, Clearing
from .jobs import Job, Result
from .policy import Policy
from .reading import ReadingBooks

RESERVE_SHARE = 8  # with a policy that stores what leaves host memory, this part of it is kept free for what comes
STORING_SHARE = 0.75  # at most so much of host memory is held for stores on their way; more is dropped


def make_books(
    scheduler: LayerwiseScheduler,
    policy: str | Policy[bytes],
    capacity_blocks: int,
    max_events: int,
    tier: Tier | Saver,
    timeout_s: float,
) -> TieredBooks:
    """TypeError or ValueError unless the tier is one over the pool of the scheduler, and no other manager's."""
    saver = Saver(tier, "write_through") if isinstance(tier, Tier) else tier
    if not isinstance(saver, Saver):
        raise TypeError(f"tier is {type(tier).__name__}; a Tier or a Saver is expected")
    if saver.tier.pool is not scheduler.host_pool:
        raise ValueError("tier is over another host pool than that of the scheduler")
    below = Below(saver)
    saver.tier.check_unused()
    books = TieredBooks(scheduler, policy, capacity_blocks, max_events, below, timeout_s)
    below.begin(books)
    return books


class TieredBooks(ReadingBooks):
    """See the module."""

    # ---- outside of sections ----
    def flush(self, timeout_s: float | None) -> None:
        deadline = Deadline(timeout_s)
        step = self._most_held()
        left: list[bytes] = change(self, self._present)
        for start in range(0, max(1, len(left)), step):  # without any, others may be on their way
            change(self, functools.partial(self._offer_here, left[start : start + step]))
            if not self.below.drain(deadline.left_s()):
                raise TimeoutError(f"blocks were not handed to the tier after timeout_s = {timeout_s}")
            with contextlib.suppress(ClosedError):
                self.below.tier.drain(deadline.left_s())

    def _present(self) -> list[bytes]:
        self.settle()
        return [key for key in self.index.slots if key not in self.index.arriving]

    def _offer_here(self, keys: list[bytes]) -> None:
        self.offer("evicting", {key: self.index.slots[key] for key in keys if key in self.index.slots})

    def check_names(self, keys: list[bytes]) -> None:
        check_keys(keys, "hashes")

    def forget(self, keys: list[bytes]) -> int:
        self.check_names(keys)  # all, before one of them is dropped

        def whole() -> int:
            dropped = super(TieredBooks, self).forget(keys)
            try:
                with contextlib.suppress(ClosedError, ForkedError):
                    self.below.tier.delete(keys)
            finally:
                change(self, functools.partial(self.below.deleted, keys))
            return dropped

        return int(self.group.host.call(whole))  # as a whole, whatever a signal handler raises

    def forget_all(self) -> int:
        self.below.tier.check_clear()
        call = Clearing()
        try:
            dropped = int(change(self, functools.partial(self._clear, call)))
            with contextlib.suppress(ClosedError, ForkedError):
                self.below.tier.clear()
            return dropped
        finally:
            change(self, functools.partial(self.below.cleared, call))

    def end(self) -> None:
        self.below.close()

    # ---- sections ----
    def save(self, keys: list[bytes], device_ids: list[int], *others: Any) -> Transfer:
        before = self.index.evicted_blocks
        transfer = super().save(keys, device_ids, *others)
        if self.below.keeps_room:  # they were written over before they could be stored
            self.counts["tier_dropped_blocks"] += self.index.evicted_blocks - before
        return transfer

    def ended(self, job: Job, result: Result) -> None:
        if job.tier is not None:
            self.directory.following.difference_update(job.keys)
        slots, failed = self.index.slots, set(result.failed)
        good = {
            key: job.host_slots[i]
            for i, key in enumerate(job.keys)
            if i not in failed and slots.get(key) == job.host_slots[i]
        }
        if job.tier is not None:
            if self.below.when == "exclusive":
                self.below.moved_up(list(good))
            if not self._has_events:
                self._forget_tier(job.keys)
        elif job.kind == "save":
            self.offer("saved", good)
        else:
            self.offer("used", good)
        if self.below.keeps_room:
            self._keep_room()
        if self.queue.is_full:
            self.there_is_room()  # it held its blocks

    def offer(self, what: str, blocks: dict[bytes, int]) -> None:
        """To be stored, if the policy says so; held until it is."""
        if not self.below.wants(what):
            return
        room = self._most_held() - len(self.below.held)
        going = self.below.storing | self.below.forgotten
        blocks = {key: slot for key, slot in blocks.items() if key not in going}
        taken = dict(list(blocks.items())[: max(0, room)])
        self.counts["tier_dropped_blocks"] += len(blocks) - len(taken)
        if taken and self.slots.pool.domain.try_lease(list(taken.values()), write=False):
            self.index.pin(taken)
            self.below.held.update(taken)
            self.below.offer(what, taken)

    def _most_held(self) -> int:
        return max(1, int(self.index.capacity_blocks * STORING_SHARE))

    def _keep_room(self) -> None:
        """What leaves host memory is stored before its place is needed: a place that is being stored is not free."""
        self.take_out(self._reserve - self._num_free - len(self.below.storing))

    @property
    def _reserve(self) -> int:
        return max(1, self.index.capacity_blocks // RESERVE_SHARE) if self.below.keeps_room else 0

    @property
    def _num_free(self) -> int:
        return min(self.index.capacity_blocks - len(self.index.slots), self.slots.pool.count_free_here())

    def make_room(self, num_blocks: int, incoming: bytes) -> int:
        self.take_out(self._reserve + num_blocks - self._num_free, incoming)
        return min(num_blocks, self._num_free - self._reserve)

    def take_out(self, num_blocks: int, incoming: bytes | None = None) -> int:
        """Lets go of up to so many blocks that nothing holds; they are offered to the tier, if that keeps room."""
        try:
            taken = self.index.take_out(num_blocks, incoming)
        finally:
            self.directory.tell_evicted()
        going = self.below.storing | self.below.forgotten
        offered = {key: slot for key, slot in taken.items() if self.below.keeps_room and key not in going}
        leased = bool(offered) and self.slots.pool.domain.try_lease(list(offered.values()), write=False)
        self.slots.give_back(list(taken.values()))
        if leased:
            self.below.offer("evicting", offered)
        return len(taken)

    def evict(self, num_blocks: int) -> int:
        self.settle()
        evicted = self.take_out(num_blocks) if self.below.keeps_room else self.directory.evict(num_blocks)
        self.there_is_room()
        return evicted

    def end_offer(self, blocks: dict[bytes, int], stored: Set[bytes]) -> None:
        """The tier has taken some of them, and holds these itself."""
        left = [key for key in blocks if key not in stored]
        self._release(left)
        self.below.forgotten.difference_update(left)

    def _release(self, keys: Sequence[bytes]) -> None:
        """These are not being stored any more."""
        held = [key for key in keys if key in self.below.held]
        self.below.held.difference_update(held)
        self.below.storing.difference_update(keys)
        self.unpin(held)

    def stored(self, job: TierJob) -> list[bytes]:
        """A store of the tier is over. Returns what was forgotten meanwhile."""
        self._release(job.keys)
        late = [key for key in job.keys if key in self.below.forgotten]
        done = [key for i, key in enumerate(job.keys) if job.outcomes[i] is Outcome.DONE]
        if self._has_events and not self.closed:
            self.directory.tier_stored(self.below.name, [key for key in done if key not in late])
        return late

    def lost_below(self, keys: list[bytes]) -> None:
        """The tier does not have them."""
        if not self.closed:
            self._forget_tier(keys)
            self._forget_waiting([key for key in keys if key not in self.index.slots or key in self.index.arriving])

    def _forget_waiting(self, keys: list[bytes]) -> None:
        """What is read ahead behind them is of no use any more, and who waits for it hears that."""
        if self.queue.forget(frozenset(keys)):
            self.group.notify()

    def drop(self, keys: list[bytes]) -> int:
        dropped = super().drop(keys)
        self.directory.following.difference_update(keys)
        self._forget_waiting(keys)
        self.below.forget(keys)
        self._forget_tier(keys)
        self.there_is_room()
        return dropped

    def _clear(self, call: Clearing) -> int:
        dropped = super().clear()
        self.directory.following.clear()
        self.queue.forget_all()
        self.group.notify()  # who waits for it
        self.below.forget_all(call)
        if self._has_events:
            self.directory.tier_removed(
                self.below.name, list(self.directory.snapshot().blocks.get(self.below.name, ()))
            )
        return dropped

    def close(self) -> None:
        if not self.closed:
            self.queue.end()
            self._end_alarms()
            super().close()
