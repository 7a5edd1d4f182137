"""The way down: which blocks of the host pool go to a tier, and when. Nothing here waits for storage."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from ..checks import check_ids
from ..layout import check_positive
from ..timeouts import check_time
from ..tracking.group import change, change_soon
from .job import Job, check_blocks
from .tier import Tier

When = Literal["write_through", "write_back", "nth_use", "exclusive"]


class Saver:
    """Stores blocks as a policy says. Whoever keeps the host blocks tells it what becomes of them.

    ============= ==================================================================================================
    when          stores a block
    ============= ==================================================================================================
    write_through as soon as it is in host memory
    nth_use       with its ``uses``-th use: what is used once does not wear the disk
    write_back    when it is about to leave host memory
    exclusive     when it is about to leave host memory; what was loaded from the tier is deleted there
    ============= ==================================================================================================

    A block that is being stored is leased for reading: it may be freed at once, and the pool gives it out when the tier
    has let go of it. What does not fit into the tier's queue is not stored, and counted (``store_dropped``).

    Args:
        tier: takes the blocks.
        when: see above.
        uses: of ``nth_use``.
        timeout_s: of each store.
        most_counted: keys of which the uses are counted at once; those used longest ago are forgotten.

    Attributes:
        told: is called, in a thread of the tier, with each job that is over; None: nobody wants to know. A manager has
            it until that is closed; then another one with the same pool may take the saver.
    """

    told: Callable[[Job], object] | None = None

    def __init__(
        self, tier: Tier, when: When, *, uses: int = 2, timeout_s: float = 30.0, most_counted: int = 1 << 20
    ) -> None:
        if not isinstance(tier, Tier):
            raise TypeError(f"tier is {tier!r}; a Tier is expected")
        if when not in get_args(When):
            raise ValueError(f"when = {when!r} must be one of {', '.join(get_args(When))}")
        self.tier = tier
        self.when = when
        self.uses = check_positive(uses, "uses")
        self.timeout_s = check_time(timeout_s)
        self._most_counted = check_positive(most_counted, "most_counted")
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def saved(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Job | None:
        """These blocks are in host memory now: their first use. Returns the job, if there is one."""
        if self.when == "write_through":
            return self._store(self._checked(keys, block_ids))
        return self.used(keys, block_ids)

    def used(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Job | None:
        """These blocks, in host memory, were used."""
        if self.when != "nth_use":
            return None
        due = [(key, block) for key, block in self._checked(keys, block_ids) if self._count(key) == self.uses]
        return self._store(due)

    def evicting(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> Job | None:
        """These blocks are about to leave host memory. They may be freed when this returns."""
        if self.when not in ("write_back", "exclusive"):
            return None
        return self._store(self._checked(keys, block_ids))

    def loaded(self, keys: Sequence[bytes]) -> None:
        """These blocks came from the tier and are in host memory now."""
        if self.when == "exclusive":
            self.tier.delete(keys)

    def _count(self, key: bytes) -> int:
        with self._lock:
            count = self._counts.pop(key, 0) + 1
            if count < self.uses:  # one that has been stored is asked for of the tier
                self._counts[key] = count
                if len(self._counts) > self._most_counted:
                    self._counts.popitem(last=False)
            return count

    def _checked(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[tuple[bytes, int]]:
        """Each key with its block."""
        keys, ids = check_blocks(keys, block_ids)
        check_ids(ids, "block_ids", self.tier.pool.num_blocks)
        return list(zip(keys, ids, strict=True))

    def _store(self, blocks: list[tuple[bytes, int]]) -> Job | None:
        """Those that the tier does not have, and that nobody is writing."""
        self.tier.check_open()  # or the engine would be said to have raised
        # An engine that raises is asked to store them all the same: it knows what it has.
        there = self.tier.ask(lambda: self.tier.exists([key for key, _ in blocks]), [False] * len(blocks))
        found = [block for block, has in zip(blocks, there, strict=True) if not has]
        if not found:
            return None
        lease = _Lease(self.tier.pool, self.told)
        job = Job([key for key, _ in found], [block for _, block in found], timeout_s=self.timeout_s, observer=lease)
        # Both or none, whatever a signal handler raises.
        started = self.tier.pool.domain.group.host.call(functools.partial(self._start, lease, job))
        return job if started else None

    def _start(self, lease: _Lease, job: Job) -> bool:
        if not change(self.tier.pool.domain, functools.partial(lease.begin, job.block_ids)):
            return False
        try:
            self.tier.store([job])
        except BaseException:
            if not job.started_s:
                lease.over(job)
            raise
        return True


class _Lease:
    """Of the blocks of a job, until the tier has let go of them."""

    def __init__(self, pool: Any, told: Callable[[Job], object] | None) -> None:
        self._domain = pool.domain
        self._told = told

    def begin(self, block_ids: list[int]) -> bool:
        """In a section."""
        for holder in self._domain.holders(block_ids, writing=False):
            holder.look()
        self._domain.check(block_ids, "host pool", writing=False)
        return bool(self._domain.try_lease(block_ids, write=False))

    def layers_arrived(self, job: Job, layers: range) -> None:
        pass

    def settled(self, job: Job) -> None:
        pass

    def over(self, job: Job) -> None:
        change_soon(self._domain, functools.partial(self._end, job.block_ids))
        if self._told is not None and job.started_s:
            self._told(job)

    def _end(self, block_ids: list[int]) -> None:
        self._domain.end_lease(block_ids, write=False)
        self._domain.group.notify()
