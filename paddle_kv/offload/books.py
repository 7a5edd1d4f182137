"""What a manager keeps book of: a directory of its own, and what moves its jobs, in one process. Changes in sections of
the group of its scheduler alone (:mod:`paddle_kv.tracking.group`)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Any, Protocol

from ..backend.work import Stream
from ..errors import ClosedError, TransferError
from ..memory import HostPool
from ..schedule import settling, submission
from ..schedule.movement import Movement, State
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from ..tracking.group import MemoryGroup, change
from .directory import Directory
from .feed import Feed
from .feeding import Meeting
from .found import BlockState
from .hints import Expectation
from .jobs import Event, Hello, Job, Result, Snapshot
from .moving import Moves, Moving
from .pieces import Piece
from .policy import Policy
from .prefetch import Prefetch
from .rates import LINK, LINK_UP, Rates

if TYPE_CHECKING:
    from ..tiers import Tier
    from ..tiers.neighbours import Lender
    from .lending import Lending

RANK, EPOCH = 0, 0  # there is one, and it lives as long as the directory
_COUNTS = (
    "tier_hit_blocks",
    "tier_lost_blocks",
    "tier_dropped_blocks",
    "prefetched_blocks",
    "recomputed_blocks",
    "dropped_save_blocks",
)
MOST_SAVES_S = 0.25  # of the link, until saves of requests are dropped


class Lookup(Protocol):
    """What a lease holds."""

    hashes: list[bytes]
    states: list[BlockState]


class PoolSlots:
    """Blocks of the pool, taken as they are needed.

    Attributes:
        taken: those that are the manager's.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.taken: set[int] = set()

    def take(self, count: int) -> list[int]:
        count = min(count, self.pool.count_free_here())
        slots = self.pool.allocate_here(count).take() if count else []
        self.taken.update(slots)
        return slots  # ascending: neighbours of a prompt become neighbours here, in the same order

    def give_back(self, slots: list[int]) -> None:
        self.taken.difference_update(slots)
        if slots and not self.pool.closed:
            self.pool.free_here(slots)


class Books:
    """See the module.

    Attributes:
        loads: those that :meth:`onload` has started, as long as anybody refers to them.
        left_out: save -> positions of its blocks for which there was no room.
    """

    def __init__(
        self, scheduler: LayerwiseScheduler, policy: str | Policy[bytes], capacity_blocks: int, max_events: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.slots = PoolSlots(scheduler.host_pool)
        self.directory = Directory(
            capacity_blocks, policy=policy, timeout_s=None, max_events=max_events, slots=self.slots
        )
        self.directory.join(Hello(RANK, EPOCH, capacity_blocks))
        self.index = self.directory.index
        self.moves = Moves(scheduler)
        self.loads: weakref.WeakSet[Movement] = weakref.WeakSet()
        self.left_out: weakref.WeakKeyDictionary[Movement, list[int]] = weakref.WeakKeyDictionary()
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.feed = Feed()
        spec = scheduler.device_cache.spec
        self.rates = Rates(spec.block_bytes * spec.num_layers, spec.block_size)
        self.lending: Lending | None = None
        self.looks_at_ends = False  # of saves: somebody waits for what they bring
        self.closed = False

    @property
    def group(self) -> MemoryGroup:
        """The lock under which all of this changes."""
        return self.scheduler.group

    # ---- what a tier below has: see :class:`TieredBooks` ----
    tier: Tier | None = None
    timeout_s = 0.0  # of a load from there

    def ask(self, keys: list[bytes]) -> Set[bytes]:
        """Those of the keys that a tier may have. Not in a section."""
        return frozenset()

    def check_names(self, keys: list[bytes]) -> None:
        """ValueError unless a tier could have each of them."""

    def load_s(self, num_blocks: int) -> float:
        """How long it may take until so many blocks have come from there."""
        return 0.0

    def start_load(self, keys: list[bytes], device_ids: list[int], compute: Stream) -> Transfer:
        """Not in a section."""
        started: Transfer = change(self, functools.partial(self.onload, keys, device_ids, compute))
        return started

    def prefetch(self, keys: list[bytes], timeout_s: float) -> Prefetch:
        if self.closed:
            raise ClosedError("the offload manager is closed")
        return Prefetch(self)

    def prefetch_expected(self, keys: list[bytes], expectation: Expectation[bytes] | None) -> Prefetch:
        """Of a prompt that is expected; None: of no blocks."""
        return self.prefetch(keys, self.timeout_s)

    @property
    def num_reading_blocks(self) -> int:
        """That the tier was asked for, for whomever, and that are not there: what is asked for now comes behind
        them."""
        return 0

    @property
    def reads_layerwise(self) -> bool:
        """Whether a tier has the first layers of a block before the last ones."""
        return self.tier is not None and self.tier.reads_layerwise

    def is_read(self, keys: list[bytes]) -> bool:
        """In a section: whether all of these that are not in host memory are on their way there from the tier."""
        return False

    def read_soon(self, keys: list[bytes]) -> Prefetch:
        """In a section: those of a prefix that are not in host memory, before all that is read ahead. ``feed`` hears
        what came."""
        return Prefetch(self)

    def flush(self, timeout_s: float | None) -> None:
        """Until what was saved so far has gone down."""

    def forget(self, keys: list[bytes]) -> int:
        """In the tier too, and may wait for its storage, as the next one."""
        return int(change(self, functools.partial(self.drop, keys)))

    def forget_all(self) -> int:
        """NotImplementedError if there is a tier that cannot be cleared."""
        return int(change(self, self.clear))

    def end(self) -> None:
        """Behind :meth:`close`."""

    # ---- sections ----
    def lend(self, lender: Lender) -> None:
        """Once: others may read what is present from now on."""
        from .lending import Lending  # needs packages that not everybody has

        self.lending = Lending(lender, self.index, self)
        self.directory.listen(self.lending.heard)
        self.looks_at_ends = True

    def lookup(
        self, keys: list[bytes], below: Set[bytes], *, joins: bool = False
    ) -> tuple[list[bytes], list[BlockState], int]:
        """The prefix that can be loaded, pinned; where each of its blocks is; and how many blocks behind it are
        arriving. ``joins``: also what is just being read from the tier for others."""
        self.settle()
        found = self.directory.lookup(keys)
        keys = found.hand_over()  # the lease has a guard of its own
        return keys, [BlockState.PRESENT] * len(keys), found.num_arriving

    def peek(self, keys: list[bytes], below: Set[bytes]) -> int:
        self.settle()
        return self.directory.peek(keys)

    def states(self, keys: list[bytes], below: Set[bytes]) -> list[BlockState]:
        self.settle()
        return [
            BlockState.TIER if state is BlockState.ABSENT and key in below else state
            for key, state in zip(keys, self.directory.states(keys), strict=True)
        ]

    def onload(
        self, keys: list[bytes], device_ids: list[int], compute: Stream, *, urgent: bool | None = None
    ) -> Transfer:
        self.settle()
        job = self.directory.plan_load(keys, device_ids)
        try:
            transfer = self.moves.start("onload", device_ids, job.host_slots, compute, urgent=urgent)
        except BaseException as error:
            damaged = error.damaged_host_blocks if isinstance(error, TransferError) else ()
            self.directory.undo(job, [i for i, slot in enumerate(job.host_slots) if slot in damaged])
            raise
        self.moves.add(transfer, [job])
        self.loads.add(transfer._movement)
        return transfer

    def save(
        self, keys: list[bytes], device_ids: list[int], loads: list[Transfer], layerwise: bool, compute: Stream
    ) -> Transfer:
        self.settle()
        plan = self.directory.plan_save(keys, device_ids)
        job = plan.job
        ids, slots = (job.device_ids, job.host_slots) if job is not None else ((), ())
        try:
            behind = self.users_of(device_ids)
            transfer = self.moves.start("offload", ids, slots, compute, layerwise=layerwise, behind=behind)
        except BaseException:  # nothing may seem to be there
            if job is not None:
                self.directory.undo(job)
            raise
        movement = transfer._movement
        movement.computed_from = tuple(load._movement for load in loads)
        if job is not None:
            self.moves.add(transfer, [job])
        self.left_out[movement] = list(plan.left_out)
        if self.looks_at_ends:
            self._look_at_its_end(transfer)
        return transfer

    def follow(self, keys: list[bytes], device_ids: list[int], compute: Any) -> tuple[Transfer, Prefetch]:
        """One load of what is in host memory and of what the tier brings, is asked for it now, layer by layer as it
        comes; and what is read for it. TransferError where not all of it has room."""
        raise NotImplementedError

    def call_at(self, at_s: float, function: Callable[[], object]) -> None:
        """On the monotonic clock; not in a section then."""
        raise NotImplementedError

    def begin_meeting(
        self,
        found: Lookup,
        device_ids: list[int],
        pieces: list[Piece],
        compute: Stream,
        num_tokens: int,
        chunk_tokens: int,
    ) -> Meeting:
        meeting = Meeting(
            self, found.hashes, device_ids, found.states, pieces, self.rates, compute, num_tokens, chunk_tokens
        )
        self.feed.fill(self)
        return meeting

    def end_meeting(self, meeting: Meeting) -> None:
        if not meeting.ended:
            meeting.end()
            self.counts["recomputed_blocks"] += meeting.num_computed_blocks
            self.feed.fill(self)

    def takes_saves(self, num_blocks: int) -> bool:
        """Whether those on their way would be through soon; else these are to be dropped, and are counted."""
        backlog = sum(
            len(moving.movement.plan.device_ids)
            for moving in self.moves.moving
            if moving.jobs[0].kind == "save" and not moving.movement.over and not moving.movement.unmarked
        )
        seconds = self.rates.load_s(backlog, LINK_UP)
        takes = seconds is None or seconds <= MOST_SAVES_S
        self.counts["dropped_save_blocks"] += 0 if takes else num_blocks
        return takes

    def save_chunk(
        self, written: list[int], keys: list[bytes], device_ids: list[int], loads: list[Transfer], compute: Stream
    ) -> Transfer | None:
        """A pass writes the blocks ``written`` next, and fills those of the keys, which are saved layer by layer; None:
        they are dropped. All of it in one section, since it is done for each chunk while the model waits."""
        self.scheduler.device_cache.domain.mark_rewritten(written)
        return self.save(keys, device_ids, loads, True, compute) if self.takes_saves(len(keys)) else None

    def evict(self, num_blocks: int) -> int:
        self.settle()
        return self.directory.evict(num_blocks)

    def drop(self, keys: list[bytes]) -> int:
        self.settle()
        return self.directory.drop(keys)

    def clear(self) -> int:
        self.settle()
        return self.directory.clear()

    def cancel_all(self) -> None:
        for moving in list(self.moves.moving):
            settling.progress(submission.cancel(moving.movement))

    def in_flight(self) -> list[Movement]:
        return [moving.movement for moving in self.moves.moving if not moving.movement.over]

    def pin(self, keys: Iterable[bytes]) -> None:
        self.index.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        if not self.closed:
            self.index.unpin(keys)

    def expect(self, keys: list[bytes], in_seconds: float | None) -> Expectation[bytes] | None:
        self.settle()
        return self.directory.expect(keys, in_seconds)

    def end_session(self, keys: list[bytes]) -> None:
        self.settle()
        self.directory.end(keys)

    def take_events(self) -> list[Event]:
        if not self.closed:
            self.settle()
        return self.directory.take_events()

    def snapshot(self) -> Snapshot:
        self.settle()
        return self.directory.snapshot()

    def stats(self) -> dict[str, int]:
        if not self.closed:
            self.settle()
        found = {**self.directory.stats(), **self.counts}
        del found["jobs_in_flight"]
        free = 0 if self.slots.pool.closed else self.slots.pool.count_free_here()
        found["capacity_blocks"] = min(self.index.capacity_blocks, len(self.slots.taken) + free)
        return found

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for meeting in list(self.feed.meetings.values()):
            meeting.end()
        for moving in self.moves.moving:
            if moving.jobs[0].kind == "save":
                settling.progress(submission.cancel(moving.movement))
        self.moves.moving.clear()
        for blocks in (self.index.slots, self.index.arriving, self.index.pins):
            blocks.clear()
        if self.lending is not None:
            self.lending.end()
        self.slots.give_back(list(self.slots.taken))

    # ---- inside of them ----
    def settle(self) -> None:
        """Books what has ended: what has arrived becomes visible, what failed is forgotten."""
        if self.closed:
            raise ClosedError("the offload manager is closed")
        for moving in self.moves.take_over():
            self._measure(moving)
            results = moving.results(RANK, EPOCH, range(self.slots.pool.num_blocks))  # its slots are blocks
            self.directory.complete(results)
            for job, result in zip(moving.jobs, results, strict=True):
                self.ended(job, result)

    def _look_at_its_end(self, transfer: Transfer) -> None:
        """What it brought is seen soon, also if nobody calls the manager."""
        movement = transfer._movement
        if movement.over:
            self.group.host.tell(functools.partial(self.look, self))
        else:
            movement.callbacks.append(functools.partial(self.look, self))

    @staticmethod
    def look(books: Books) -> None:
        """Not in a section."""
        change(books, lambda: None if books.closed else books.settle())

    def _measure(self, moving: Moving) -> None:
        movement = moving.movement
        if movement.sample is not None and min(movement.sample) > 0:
            num_bytes, seconds = movement.sample[0], movement.sample[1] / 1e3
            if moving.jobs[0].kind == "save":
                self.rates.observe_save(num_bytes, seconds)
            else:
                self.rates.observe_load(LINK, num_bytes, seconds, shared=movement.shares_link)
        elif movement.state is State.FAILED and moving.is_of_link:
            self.rates.observe_failed(LINK)

    def ended(self, job: Job, result: Result) -> None:
        """It is booked."""

    def users_of(self, device_ids: list[int]) -> list[Any]:
        """The transfers in flight that touch these device blocks: of other saves of the same blocks, for example."""
        return self.scheduler.device_cache.domain.holders(device_ids)
