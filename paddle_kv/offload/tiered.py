"""The books of a manager with a tier below host memory: what is loaded from there, and what goes down."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence, Set
from typing import Any

from ..errors import ClosedError, ForkedError, TransferError
from ..schedule import arriving
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from ..tiers import Job as TierJob
from ..tiers import Outcome, Saver, Tier, loading
from ..tiers.job import check_keys
from ..tracking.group import change
from ..tracking.keeper import Deadline
from .below import Below, Clearing, Timed
from .books import EPOCH, RANK, Books
from .fetching import TierFetching, parts_of
from .found import BlockState
from .jobs import Job, Result
from .policy import Policy
from .prefetch import Prefetch

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
    """TypeError or ValueError unless the tier is one over the pool of the scheduler."""
    saver = Saver(tier, "write_through") if isinstance(tier, Tier) else tier
    if not isinstance(saver, Saver):
        raise TypeError(f"tier is {type(tier).__name__}; a Tier or a Saver is expected")
    if saver.tier.pool is not scheduler.host_pool:
        raise ValueError("tier is over another host pool than that of the scheduler")
    return TieredBooks(scheduler, policy, capacity_blocks, max_events, Below(saver), timeout_s)


class TieredBooks(Books):
    """See the module.

    Args:
        below: the tier, with its policy.
        timeout_s: of a load.
    """

    def __init__(
        self,
        scheduler: LayerwiseScheduler,
        policy: str | Policy[bytes],
        capacity_blocks: int,
        max_events: int,
        below: Below,
        timeout_s: float,
    ) -> None:
        super().__init__(scheduler, policy, capacity_blocks, max_events)
        self.below, self.timeout_s, self.tier = below, timeout_s, below.tier
        self._has_events = max_events > 0
        self.looks_at_ends = True  # what they bring goes down
        self._prefetches: weakref.WeakSet[Prefetch] = weakref.WeakSet()
        below.begin(self)

    # ---- outside of sections ----
    def ask(self, keys: list[bytes]) -> Set[bytes]:
        slots, arriving = self.index.slots, self.index.arriving  # without the lock: it is a hint in any case
        return self.below.having([key for key in keys if key not in slots or key in arriving])

    def load_s(self, num_blocks: int) -> float:
        return self.below.rate.seconds(num_blocks)

    def start_load(self, keys: list[bytes], device_ids: list[int], compute: Any) -> Transfer:
        start = functools.partial(self._start_load, keys, device_ids, self.ask(keys), compute)
        started: Transfer = self.group.host.call(start)  # as a whole, whatever a signal handler raises
        return started

    def _start_load(self, keys: list[bytes], device_ids: list[int], below: Set[bytes], compute: Any) -> Transfer:
        start = functools.partial(self._onload_from, keys, device_ids, below, compute)
        transfer, asked = change(self, start)
        if asked is not None:
            job, timed = asked
            try:
                loading.read(self.below.tier, transfer._movement, job)
            except Exception as error:  # noqa: BLE001  the transfer has failed, and ends
                if not job.started_s:
                    timed.give_up()
                raise TransferError(f"the tier could not be asked: {error}") from None
        return transfer  # type: ignore[no-any-return]

    def prefetch(self, keys: list[bytes], timeout_s: float) -> Prefetch:
        below = self.ask(keys)

        def start() -> Prefetch:
            found, fetching = change(self, functools.partial(self._prefetch, keys, below, timeout_s))
            for one in fetching:
                one.read(self.below.tier)
            return found  # type: ignore[no-any-return]

        started: Prefetch = self.group.host.call(start)
        return started

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

    def forget(self, keys: list[bytes]) -> int:
        check_keys(keys, "hashes")  # all, before one of them is dropped

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
    def _walk(self, keys: Sequence[bytes], below: Set[bytes]) -> list[BlockState]:
        """Of the longest prefix that can be loaded: where each block is."""
        below = self.below.not_forgotten(below)
        slots, coming, following = self.index.slots, self.index.arriving, self.directory.following
        states = []
        for key in keys:
            if key not in slots:
                if key not in below:
                    break
                states.append(BlockState.TIER)
            elif key not in coming:
                states.append(BlockState.PRESENT)
            elif key in following:
                states.append(BlockState.ARRIVING)
            else:
                break
        if BlockState.TIER not in states:
            return states
        left = self._room(keys[: len(states)])
        for position, state in enumerate(states):
            left -= state is BlockState.TIER
            if left < 0:
                return states[:position]
        return states

    def _room(self, keys: Sequence[bytes]) -> int:
        """How many blocks could come into host memory beside these."""
        slots = self.index.slots
        held = {key for key in (*self.index.pins, *keys) if key in slots}
        pool = self.slots.pool
        return min(self.index.capacity_blocks, len(self.slots.taken) + pool.count_free_here()) - len(held)

    def lookup(self, keys: list[bytes], below: Set[bytes]) -> tuple[list[bytes], list[BlockState], int]:
        self.settle()
        states = self._walk(keys, below)
        hashes = keys[: len(states)]
        present = [keys[i] for i, state in enumerate(states) if state is BlockState.PRESENT]
        self.directory.lookup(present, prompt=keys).hand_over()  # the lease has a guard of its own
        self.directory.counters["looked_up_blocks"] += len(keys) - len(present)
        self.index.pin(keys[i] for i, state in enumerate(states) if state is not BlockState.PRESENT)
        self.counts["tier_hit_blocks"] += len(hashes) - len(present)
        slots = self.index.slots
        if self._has_events:
            self._note_hint(keys, states, self.below.not_forgotten(below))
        behind = next((i for i in range(len(states), len(keys)) if keys[i] not in slots), len(keys))
        return hashes, states, behind - len(states)

    def _note_hint(self, keys: list[bytes], states: list[BlockState], below: Set[bytes]) -> None:
        """What a tier finds when it starts, and what it evicts, is heard of when somebody asks for it."""
        self.directory.tier_stored(self.below.name, [key for key in keys if key in below])
        gap = keys[len(states) :][:1]  # behind it nobody may have asked
        self._forget_tier([key for key in gap if key not in below])

    def states(self, keys: list[bytes], below: Set[bytes]) -> list[BlockState]:
        return super().states(keys, self.below.not_forgotten(below))

    def peek(self, keys: list[bytes], below: Set[bytes]) -> int:
        self.settle()
        return len(self._walk(keys, below))

    def _onload_from(
        self, keys: list[bytes], device_ids: list[int], below: Set[bytes], compute: Any
    ) -> tuple[Transfer, tuple[TierJob, Timed] | None]:
        """One transfer of what is in host memory and what is read into it meanwhile."""
        self.settle()
        below = self.below.not_forgotten(below)
        slots = self.index.slots
        coming = (self.index.arriving.keys() & keys) - self.directory.following
        if coming:  # of the tier when they were looked up, say
            raise TransferError(
                f"{len(coming)} of the blocks are being brought by a prefetch or a save; compute instead"
            )
        absent = [position for position, key in enumerate(keys) if key not in slots]
        there = [position for position, key in enumerate(keys) if key in slots]
        if not absent:
            return self.onload(keys, device_ids, compute), None
        gone = [keys[position] for position in absent if keys[position] not in below]
        if gone:
            self.directory.plan_load(gone, range(len(gone)))  # says why it cannot be loaded
        jobs: list[Job] = []
        timed = None
        wanted = [keys[position] for position in absent]
        self.index.pin(keys)  # none of them makes room for the others
        try:
            jobs.append(self._plan_from_tier(wanted, [device_ids[position] for position in absent]))
            if there:
                jobs.append(self.directory.plan_load([keys[i] for i in there], [device_ids[i] for i in there]))
            host_ids = [slots[key] for key in keys]
            arrival = loading.Arrival()
            timed = self.below.timed(arrival, len(wanted))
            reading = TierJob(wanted, list(jobs[0].host_slots), timeout_s=self.timeout_s, observer=timed)
            plan = self.scheduler.plan("onload", device_ids, host_ids)
            transfer = arriving.start(self.scheduler, plan, compute, None, reading)
        except BaseException as error:
            if timed is not None:
                timed.give_up()
            damaged = error.damaged_host_blocks if isinstance(error, TransferError) else ()
            for job in jobs:
                self.directory.undo(job, [i for i, slot in enumerate(job.host_slots) if slot in damaged])
            if not self._has_events:
                self._forget_tier(wanted)
            raise
        finally:
            self.index.unpin(keys)
        arrival.movement = transfer._movement
        self.directory.following.update(wanted)
        self.moves.add(transfer, jobs)
        self.loads.add(transfer._movement)
        self._look_at_its_end(transfer)
        return transfer, (reading, timed)

    def _plan_from_tier(self, keys: list[bytes], device_ids: list[int]) -> Job:
        self.directory.tier_stored(self.below.name, keys)
        job = self.directory.plan_load(keys, device_ids, tier=self.below.name)
        if len(job.keys) < len(keys):
            self._undo_from_tier(job, keys)
            raise TransferError(f"host memory has no room for {len(keys)} blocks of the tier: what is there is held")
        return job

    def _undo_from_tier(self, job: Job, keys: list[bytes]) -> None:
        self.directory.undo(job)
        if not self._has_events:  # else what a lookup has noted stays
            self._forget_tier(keys)

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
            self.counts["tier_lost_blocks"] += len(failed)
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
        pool, index = self.slots.pool, self.index
        free = min(index.capacity_blocks - len(index.slots), pool.count_free_here())
        missing = max(1, index.capacity_blocks // RESERVE_SHARE) - free - len(self.below.storing)
        self.take_out(missing)

    def take_out(self, num_blocks: int) -> int:
        """Lets go of up to so many blocks that nothing holds; they are offered to the tier."""
        try:
            taken = self.index.take_out(num_blocks)
        finally:
            self.directory.tell_evicted()
        going = self.below.storing | self.below.forgotten
        offered = {key: slot for key, slot in taken.items() if key not in going}
        leased = bool(offered) and self.slots.pool.domain.try_lease(list(offered.values()), write=False)
        self.slots.give_back(list(taken.values()))
        if leased:
            self.below.offer("evicting", offered)
        return len(taken)

    def evict(self, num_blocks: int) -> int:
        self.settle()
        return self.take_out(num_blocks) if self.below.keeps_room else self.directory.evict(num_blocks)

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

    def _forget_tier(self, keys: Sequence[bytes]) -> None:
        self.directory.tier_removed(self.below.name, keys)

    def drop(self, keys: list[bytes]) -> int:
        dropped = super().drop(keys)
        self.directory.following.difference_update(keys)
        self.below.forget(keys)
        self._forget_tier(keys)
        return dropped

    def _clear(self, call: Clearing) -> int:
        dropped = super().clear()
        self.directory.following.clear()
        self.below.forget_all(call)
        if self._has_events:
            self.directory.tier_removed(
                self.below.name, list(self.directory.snapshot().blocks.get(self.below.name, ()))
            )
        return dropped

    def close(self) -> None:
        if not self.closed:
            for prefetch in list(self._prefetches):
                prefetch.cancel()
            super().close()

    # ---- prefetch ----
    def _prefetch(self, keys: list[bytes], below: Set[bytes], timeout_s: float) -> tuple[Prefetch, list[TierFetching]]:
        self.settle()
        states = self._walk(keys, below)
        hashes = keys[: len(states)]
        wanted = [keys[i] for i, state in enumerate(states) if state is BlockState.TIER]
        fetching: list[TierFetching] = []
        self.index.pin(hashes)
        try:
            for part in parts_of(wanted):
                job = self._plan_from_tier(part, list(range(len(part))))  # no device block is meant
                if not self.slots.pool.domain.try_lease(job.host_slots, write=True):
                    self._undo_from_tier(job, part)
                    break
                fetching.append(TierFetching(self, job, timeout_s))
        except TransferError:
            pass  # what has room comes
        except Exception:
            if not fetching:  # of a policy
                raise
        finally:
            self.index.unpin(hashes)
        prefetch = Prefetch(self, fetching)
        self._prefetches.add(prefetch)
        return prefetch, fetching

    @property
    def num_reading_blocks(self) -> int:
        return self.below.rate.blocks_under_way

    def read_soon(self, keys: list[bytes]) -> Prefetch:
        prefetch, fetching = self._prefetch(keys, frozenset(keys), self.timeout_s)
        for one in fetching:
            self.group.host.tell(functools.partial(one.read, self.below.tier))
        return prefetch

    def fetched(self, job: Job, outcomes: Sequence[Outcome | None]) -> None:
        """It is known which blocks of a prefetch have come."""
        failed = tuple(i for i, outcome in enumerate(outcomes) if outcome is not Outcome.DONE)
        good = [slot for i, slot in enumerate(job.host_slots) if i not in set(failed)]
        self.slots.pool.domain.mark_rewritten(good)
        self.slots.pool.domain.end_lease(good, write=True)
        self.group.notify()
        if self.closed:
            return
        result = Result(job.id, RANK, EPOCH, failed)
        self.directory.complete([result])
        self.counts["prefetched_blocks"] += len(good)
        self.ended(job, result)
        self.feed.fill(self)
