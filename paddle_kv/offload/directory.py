"""Where the blocks of all ranks are, and what moves them: for the process that schedules requests. Moves no bytes and
imports neither Paddle nor NumPy; the movers beside the caches do what its jobs say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

from ..errors import TransferError
from .checks import check_device_ids, check_tier, check_timeout, checked_hashes
from .events import EventLog
from .found import BlockState, Found
from .index import BlockIndex
from .jobs import HOST, Event, Hello, Job, Namespace, Outcome, Result, SavePlan, Snapshot
from .joining import Pending, Ranks
from .policies import make_policy
from .policy import Policy
from .slot_lru import SlotLru
from .slots import NumberedSlots, Slots
from .uses import UseCounts

_COUNTERS = (
    "lookups",
    "looked_up_blocks",
    "hit_blocks",
    "saved_blocks",
    "deduplicated_blocks",
    "left_out_blocks",
    "loaded_blocks",
    "damaged_blocks",
    "failed_saves",
    "failed_loads",
)


class Directory:
    """Blocks by the hash of their tokens and of all before them, on one rank or several.

    Args:
        capacity_blocks: host blocks of each rank, the same number on all.
        num_ranks: each has a mover; nothing is found or planned before all of them have said hello (:meth:`join`).
        space: what the blocks are blocks of.
        policy: "lru", "arc", "s3fifo", or a fresh object with the methods of :class:`~paddle_kv.offload.Policy`.
        timeout_s: of a job that names no other; None: no bound, which a rank that dies unnoticed makes for ever.
        max_events: events kept until they are taken; 0: none are collected.
        clock: seconds, never going back.
        slots: who gives out host blocks; None: they are numbered from 0.

    Raises:
        ValueError: an unknown policy, less than one block or rank.
        TypeError: not a policy.

    Of one thread: the caller serialises. Messages to a rank arrive in the order in which they were planned.

    Example:
        >>> from paddle_kv.offload import Directory, Hello, Result
        >>> directory = Directory(8, num_ranks=2)
        >>> for rank in range(2):
        ...     _ = directory.join(Hello(rank, epoch=7, capacity_blocks=8))
        >>> save = directory.plan_save([b"a", b"b"], [4, 2]).job
        >>> directory.complete([Result(save.id, 0, 7)]), directory.peek([b"a", b"b"])  # one rank is not all
        ([], 0)
        >>> [done] = directory.complete([Result(save.id, 1, 7)])
        >>> with directory.lookup([b"a", b"b", b"c"]) as found:
        ...     load = directory.plan_load(found.keys, [5, 6])
        >>> load.host_slots, [state.value for state in directory.states([b"a", b"c"])]
        ((0, 1), ['present', 'absent'])
    """

    def __init__(
        self,
        capacity_blocks: int,
        *,
        num_ranks: int = 1,
        space: Namespace | None = None,
        policy: str | Policy[bytes] = "lru",
        timeout_s: float | None = 10.0,
        max_events: int = 0,
        clock: Callable[[], float] = time.monotonic,
        slots: Slots | None = None,
    ) -> None:
        for name, value in (("capacity_blocks", capacity_blocks), ("num_ranks", num_ranks)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if policy == "lru" and slots is None:
            policy = SlotLru(capacity_blocks)
        elif isinstance(policy, str):
            policy = make_policy(policy, capacity_blocks)
        elif isinstance(policy, type) or not callable(getattr(policy, "victim", None)):
            raise TypeError(f"policy is {policy!r}; a name or an object with the methods of Policy is expected")
        check_timeout(timeout_s)
        self.space = space or Namespace()
        self.timeout_s = timeout_s
        self.index: BlockIndex[bytes] = BlockIndex(policy, capacity_blocks)
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.ranks = Ranks(num_ranks, clock, self._settle)
        self._slots = slots or NumberedSlots(capacity_blocks)
        self._bringing: dict[bytes, int] = {}  # arriving block -> the job that brings it
        self._uses = UseCounts(capacity_blocks)
        self._tiers: dict[bytes, tuple[str, ...]] = {}
        self._events = EventLog(max_events)
        self.index.evicted = [] if max_events else None

    # ---- ranks ----
    @property
    def ready(self) -> bool:
        """Whether all ranks are there."""
        return self.ranks.ready

    def join(self, hello: Hello) -> list[Outcome]:
        """A mover is there, for the first time or anew: then what its rank had is gone, and so all blocks are.

        Raises:
            ValueError: another version, rank, spec, fewer host blocks than the directory gives out, or a life of the
                rank that was lost: what it had on its way may still move.
        """
        self.ranks.check_hello(hello)
        if hello.capacity_blocks < self.index.capacity_blocks:
            raise ValueError(
                f"rank {hello.rank} has {hello.capacity_blocks} host blocks; {self.index.capacity_blocks} are expected"
            )
        if hello.spec and self.space.spec and hello.spec != self.space.spec:
            raise ValueError(f"rank {hello.rank} has a cache of another spec than the directory's")
        known = self.ranks.epochs[hello.rank]
        outcomes = [] if known in (None, hello.epoch) else self.lost(hello.rank)
        self.ranks.epochs[hello.rank] = hello.epoch
        return outcomes

    def lost(self, rank: int) -> list[Outcome]:
        """The rank is gone: all jobs that are not over have failed, and nothing is present. To be called when a
        process or its connection has died; who has not ended a job after twice its ``timeout_s`` is lost without.

        Whoever comes back under its number says hello with another epoch.

        Raises:
            ValueError: no such rank.
        """
        self.ranks.check_rank(rank)
        if self.ranks.epochs[rank] is None:
            return []
        outcomes = self.ranks.lose(rank, f"rank {rank} is lost")
        self.clear()
        return outcomes

    def complete(self, results: Iterable[Result] = ()) -> list[Outcome]:
        """The results of movers, in any order and also none: call it in every step, since it looks at the clock.

        Raises:
            ValueError: another version, no such rank, a position that the job has not. Nothing is booked.
        """
        results = list(results)
        for result in results:
            self.ranks.check_result(result)
        outcomes = self.ranks.take(results)
        expired, silent = self.ranks.expire()
        outcomes += expired
        for rank in silent:
            outcomes += self.lost(rank)
        return outcomes

    # ---- what is there ----
    def lookup(self, hashes: Sequence[bytes]) -> Found:
        """The longest prefix that is present, held against eviction. A use of these blocks: once per request."""
        keys = checked_hashes(hashes)
        count = self.index.lookup(keys)
        found = keys[:count]
        self.index.pin(found)
        self.counters["lookups"] += 1
        self.counters["looked_up_blocks"] += len(keys)
        self.counters["hit_blocks"] += count
        there = self.index.slots
        coming = next((i for i in range(count, len(keys)) if keys[i] not in there), len(keys))
        return Found(self.index, found, coming - count)

    def peek(self, hashes: Sequence[bytes]) -> int:
        """How many blocks :meth:`lookup` would find. No use, and holds nothing."""
        return self.index.peek(checked_hashes(hashes))

    def states(self, hashes: Sequence[bytes]) -> list[BlockState]:
        """Where each of the blocks is; no use."""
        return [self._state(key) for key in checked_hashes(hashes)]

    def _state(self, key: bytes) -> BlockState:
        if key in self.index.arriving:
            return BlockState.ARRIVING
        if key in self.index.slots:
            return BlockState.PRESENT
        return BlockState.TIER if key in self._tiers else BlockState.ABSENT

    def tiers_of(self, key: bytes) -> tuple[str, ...]:
        """The tiers below host memory that are believed to have the block."""
        return self._tiers.get(key, ())

    def tier_stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        """A tier below host memory says that it has these blocks, of all ranks.

        Raises:
            ValueError: ``tier`` is host memory itself.
        """
        check_tier(tier)
        added = [key for key in checked_hashes(hashes) if tier not in self._tiers.get(key, ())]
        for key in added:
            self._tiers[key] = (*self._tiers.get(key, ()), tier)
        self._events.add("stored", tier, added)

    def tier_removed(self, tier: str, hashes: Sequence[bytes]) -> None:
        """It has them no more."""
        gone = [key for key in checked_hashes(hashes) if tier in self._tiers.get(key, ())]
        for key in gone:
            left = tuple(one for one in self._tiers.pop(key) if one != tier)
            if left:
                self._tiers[key] = left
        self._events.add("removed", tier, gone)

    # ---- plans ----
    def plan_load(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Sequence[int],
        *,
        timeout_s: float | None = None,
        tier: str = HOST,
    ) -> Job:
        """Loads blocks: that of ``hashes[i]`` to device block ``device_block_ids[i]``, on all ranks. They are held
        until it is over.

        Args:
            hashes: of what :meth:`lookup` has found.
            device_block_ids: as many.
            timeout_s: None: that of the directory.
            tier: below host memory: loads those of the first blocks for which host memory has room, and keeps them
                there too.

        Raises:
            KeyError: a block is not there. Nothing is planned.
            TransferError: a block was dropped, or a rank was lost, since the lookup that holds it.
            ValueError: as many ids as hashes are expected, each once; from a tier each hash once, too.
        """
        keys, device_ids = checked_hashes(hashes), list(device_block_ids)
        check_device_ids(keys, device_ids)
        check_timeout(timeout_s)
        if tier != HOST:
            return self._plan_load_from(tier, keys, device_ids, timeout_s)
        index = self.index
        slots = list(map(index.slots.get, keys))
        if None in slots or not index.arriving.isdisjoint(keys):
            self._raise_not_present(keys)
        index.pin(keys)
        self.counters["loaded_blocks"] += len(keys)
        return self._job("load", keys, slots, device_ids, timeout_s)

    def _raise_not_present(self, keys: list[bytes]) -> None:
        slots = self.index.slots
        for position, key in enumerate(keys):
            if key not in slots and key in self.index.pins:
                raise TransferError(f"hashes[{position}] = {key.hex()} was dropped or found damaged since the lookup")
            if key not in slots or key in self.index.arriving:
                raise KeyError(f"hashes[{position}] = {key.hex()} is not present; load what lookup() has found")

    def _plan_load_from(self, tier: str, keys: list[bytes], device_ids: Sequence[int], timeout_s: float | None) -> Job:
        if len(set(keys)) != len(keys):
            raise ValueError("hashes names a block more than once; of a tier each is loaded once")
        for position, key in enumerate(keys):
            if tier not in self._tiers.get(key, ()) or key in self.index.slots:
                raise KeyError(f"hashes[{position}] = {key.hex()} is not in tier {tier!r} alone; see states()")
        admitted = self._admit(keys) if self.ready else {}
        count = next((i for i, key in enumerate(keys) if key not in admitted), len(keys))
        self._forget(key for key in keys[count:] if key in admitted)
        self.counters["loaded_blocks"] += count
        slots = [admitted[key] for key in keys[:count]]
        return self._bring("load", keys[:count], slots, list(device_ids)[:count], timeout_s, tier=tier)

    def plan_save(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Sequence[int],
        *,
        layerwise: bool = False,
        all_or_nothing: bool = False,
        min_uses: int = 1,
        computed_from: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> SavePlan:
        """Saves blocks on all ranks: device block ``device_block_ids[i]`` becomes that of ``hashes[i]``. Those that are
        present or arriving are not moved; room is made by evicting others; what finds none is left out, from the end.

        Args:
            hashes: of blocks that are full, also from the middle of a prompt.
            device_block_ids: as many.
            layerwise: the layers will be marked one by one.
            all_or_nothing: what would be left out in part is left out as a whole, and evicts nothing.
            min_uses: a block is kept when it is offered for the so-manieth time: 2 leaves out what comes once. As many
                blocks as the capacity and as many again are remembered.
            computed_from: numbers of the loads that the model reads to compute these blocks: they become present when
                these have ended well too, else never.
            timeout_s: None: that of the directory.

        Raises:
            ValueError: as many ids as hashes are expected.
            What the policy raises; then nothing is planned.
        """
        keys, device_ids = checked_hashes(hashes), list(device_block_ids)
        check_device_ids(keys, device_ids, distinct=False)
        check_timeout(timeout_s)
        computed_from = tuple(computed_from)
        index, source = self.index, dict(zip(keys, device_ids, strict=True))
        wanted = list(source)
        if min_uses > 1:
            wanted = self._uses.often(wanted, min_uses, index.slots)
        if not self.ready or any(map(self.ranks.has_failed, computed_from)):
            wanted = [key for key in wanted if key in index.slots]
        if all_or_nothing and not self._has_room(wanted):
            wanted = [key for key in wanted if key in index.slots]
        admitted = self._admit(wanted)
        if all_or_nothing and not all(key in index.slots for key in wanted):  # a policy has its own ideas
            self._forget(admitted)
            admitted = {}
        left_out: tuple[int, ...] = ()
        if not all(map(index.slots.__contains__, keys)):
            left_out = tuple(i for i, key in enumerate(keys) if key not in index.slots)
        num_left_out = len({keys[i] for i in left_out})
        self.counters["saved_blocks"] += len(admitted)
        self.counters["deduplicated_blocks"] += len(source) - len(admitted) - num_left_out
        self.counters["left_out_blocks"] += num_left_out
        if not admitted:
            return SavePlan(None, left_out)
        ids = [source[key] for key in admitted]
        slots = list(admitted.values())
        job = self._bring("save", list(admitted), slots, ids, timeout_s, layerwise, computed_from)
        return SavePlan(job, left_out)

    def undo(self, job: Job, damaged: Iterable[int] = ()) -> None:
        """It was never begun, on no rank: as if it had not been planned. ``damaged``: positions that are dropped."""
        pending = self.ranks.pending.pop(job.id)
        pending.decided = True
        self.index.unpin(job.keys)
        counter = "saved_blocks" if job.kind == "save" else "loaded_blocks"
        self.counters[counter] -= len(job.keys)
        self._forget(key for key in job.keys if self._bringing.get(key) == job.id)
        self._drop_damaged(job, damaged)

    # ---- room ----
    def evict(self, num_blocks: int) -> int:
        """Lets go of up to so many blocks that nothing holds, in the order of the policy; how many."""
        try:
            slots = self.index.evict(num_blocks)
        finally:
            self._tell_evicted()
        self._slots.give_back(slots)
        return len(slots)

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forgets those of the blocks that are there or arriving, whoever holds them; how many there were. Jobs in
        flight go on."""
        found = [key for key in dict.fromkeys(keys) if key in self.index.slots]
        present = [key for key in found if key not in self.index.arriving]
        self._forget(found)
        self._events.add("removed", HOST, present)
        return len(found)

    def clear(self) -> int:
        """:meth:`drop` of all blocks in host memory."""
        slots = self.index.clear()
        self._bringing.clear()
        self._slots.give_back(slots)
        self._events.add("cleared", HOST)
        return len(slots)

    # ---- events ----
    def take_events(self) -> list[Event]:
        """What came and went since the last call; see :class:`~paddle_kv.offload.Mirror`. If more than ``max_events``
        were waiting, the oldest are missing."""
        return self._events.take()

    def snapshot(self) -> Snapshot:
        """All that is present, for a :class:`~paddle_kv.offload.Mirror` that begins or has missed an event."""
        arriving = self.index.arriving
        blocks: dict[str, Any] = {HOST: tuple(key for key in self.index.slots if key not in arriving)}
        for key, tiers in self._tiers.items():
            for tier in tiers:
                blocks.setdefault(tier, []).append(key)
        return Snapshot(self._events.number, {tier: tuple(keys) for tier, keys in blocks.items()})

    def stats(self) -> dict[str, int]:
        """Counts since it was made, and what there is now."""
        index = self.index
        return {
            **self.counters,
            "evicted_blocks": index.evicted_blocks,
            "blocks": len(index.slots) - len(index.arriving),
            "saving_blocks": len(index.arriving),
            "pinned_blocks": sum(key in index.slots for key in index.pins),
            "jobs_in_flight": len(self.ranks.pending),
        }

    # ---- inside ----
    def _admit(self, keys: list[bytes]) -> dict[bytes, int]:
        index = self.index
        there = index.slots
        absent = len(keys) - sum(map(there.__contains__, keys))
        free_slots = self._slots.take(max(0, min(absent, index.capacity_blocks - len(there))))
        try:
            return index.admit(keys, free_slots)
        finally:
            self._slots.give_back(free_slots)
            self._tell_evicted()

    def _bring(
        self,
        kind: Any,
        keys: list[bytes],
        slots: list[int],
        ids: Sequence[int],
        timeout_s: float | None,
        layerwise: bool = False,
        computed_from: Iterable[int] = (),
        tier: str | None = None,
    ) -> Job:
        self.index.arriving.update(keys)
        self.index.pin(keys)
        job = self._job(kind, keys, slots, ids, timeout_s, layerwise, computed_from, tier)
        self._bringing.update(dict.fromkeys(keys, job.id))
        return job

    def _job(
        self,
        kind: Any,
        keys: list[bytes],
        slots: Sequence[Any],
        ids: Sequence[int],
        timeout_s: float | None,
        layerwise: bool = False,
        computed_from: Iterable[int] = (),
        tier: str | None = None,
    ) -> Job:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        job = Job(
            self.ranks.next_id(),
            kind,
            self.space,
            tuple(keys),
            tuple(slots),
            tuple(ids),
            tuple(epoch or 0 for epoch in self.ranks.epochs),
            timeout_s,
            layerwise,
            tier,
        )
        self.ranks.add(job, computed_from)
        return job

    def _settle(self, pending: Pending) -> None:
        """It is decided how the job ends, for all ranks."""
        job, failed = pending.job, pending.failed
        self.index.unpin(job.keys)
        self.counters["failed_saves" if job.kind == "save" else "failed_loads"] += bool(failed)
        bringing = self._bringing
        if job.kind == "save" or job.tier is not None:
            own = [bringing.get(key) == job.id for key in job.keys]  # not what was dropped meanwhile
            good = [mine and position not in failed for position, mine in enumerate(own)]
            arrived = list(compress(job.keys, good))
            for key in arrived:
                del bringing[key]
            self.index.arriving.difference_update(arrived)
            self._events.add("stored", HOST, arrived)
            if failed:
                self._forget([job.keys[position] for position in failed if own[position]])
        if pending.damaged:
            self._drop_damaged(job, pending.damaged)

    def _drop_damaged(self, job: Job, positions: Iterable[int]) -> None:
        if job.tier is not None:
            self.tier_removed(job.tier, [job.keys[position] for position in positions])
            return
        slots = self.index.slots
        wrong = [job.keys[one] for one in positions if slots.get(job.keys[one]) == job.host_slots[one]]
        self.counters["damaged_blocks"] += self.drop(wrong)

    def _forget(self, keys: Iterable[bytes]) -> None:
        slots = []
        for key in list(keys):
            self._bringing.pop(key, None)
            slots.append(self.index.remove(key))
        self._slots.give_back(slots)

    def _tell_evicted(self) -> None:
        if self.index.evicted:
            self._events.add("removed", HOST, self.index.evicted)
            self.index.evicted = []

    def _has_room(self, keys: list[bytes]) -> bool:
        index = self.index
        absent = sum(key not in index.slots for key in keys)
        held = {key for key in index.pins if key in index.slots}
        held.update(key for key in keys if key in index.slots)
        return absent <= index.capacity_blocks - len(held)
