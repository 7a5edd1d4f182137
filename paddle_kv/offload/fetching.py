"""Parts of what is read from the tier into host blocks that nobody else may touch meanwhile."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ..tiers import Job as TierJob
from ..tiers import Outcome, Tier
from ..tracking import stamps
from ..tracking.group import MemoryGroup, change_soon
from .jobs import Job
from .prefetch import Prefetch

BLOCKS_PER_JOB = 64  # what has arrived can be found before all has


def parts_of(keys: list[bytes]) -> Iterator[list[bytes]]:
    """In parts."""
    for start in range(0, len(keys), BLOCKS_PER_JOB):
        yield keys[start : start + BLOCKS_PER_JOB]


class Owner(Protocol):
    """The books: see :class:`TieredBooks`."""

    slots: Any
    below: Any
    queue: Any

    @property
    def group(self) -> MemoryGroup: ...

    def fetched(self, job: Job, outcomes: Sequence[Outcome | None]) -> None: ...

    def read_ended(self, job: TierJob) -> None: ...

    def look_at_turns(self) -> None: ...


class TierFetching:
    """A part. Made in a section, with a lease for writing on the host blocks.

    Attributes:
        urgent: a request that runs needs it, or did.
        users: what such requests have of it.
        num_layers: that are in host memory, of all of its blocks.
        lost: what of it did not come.
        followers: who hear of both, in sections.
    """

    def __init__(self, books: Owner, job: Job, timeout_s: float, *, urgent: bool, layerwise: bool = False) -> None:
        self._books, self.job = books, job
        self.num_layers, self.lost = 0, frozenset[bytes]()
        self.followers: list[Callable[[], object]] = []
        self.urgent, self._is_ahead = urgent, not urgent
        self.users: weakref.WeakSet[Prefetch] = weakref.WeakSet()
        self._domain = books.slots.pool.domain
        stamps.forget(self._domain, job.host_slots)
        self._timed = books.below.timed(self, len(job.keys))
        self.reading = TierJob(
            list(job.keys), list(job.host_slots), timeout_s=timeout_s, layerwise=layerwise, observer=self._timed
        )
        self.num_blocks, self.num_arrived = len(job.keys), 0
        self.known = False
        self._left: list[int] = []  # slots that the tier may still write to

    def leave(self, user: Prefetch) -> None:
        """One of its users does not need it any more. What was read ahead comes all the same: it is soon there, and
        the request that it is for may be about to begin. In a section, if a request is its user."""
        if user not in self.users or self.awaited:
            return
        if not self._is_ahead:
            self.reading.cancel()
        self._books.look_at_turns()  # nothing of it may end for long

    @property
    def awaited(self) -> bool:
        """Whether a request waits for it. In a section."""
        return self.urgent and any(not one.cancelled for one in self.users)

    def read(self, tier: Tier) -> None:
        """Not in a section. It comes, or is given up."""
        try:
            tier.load([self.reading])
        except Exception:  # noqa: BLE001  a tier that is closed, say: nothing comes
            if not self.reading.started_s:
                self._timed.give_up()
                self.settled(self.reading)
                self.over(self.reading)
                change_soon(self._books, functools.partial(self._books.read_ended, self.reading))

    def layers_arrived(self, job: TierJob, layers: range) -> None:
        change_soon(self._books, functools.partial(self._layers_are_there, layers.stop))

    def settled(self, job: TierJob) -> None:
        change_soon(self._books, functools.partial(self._settle, list(job.outcomes)))

    def over(self, job: TierJob) -> None:
        change_soon(self._books, self._end)

    def _layers_are_there(self, num_layers: int) -> None:
        self.num_layers = max(self.num_layers, num_layers)
        for tell in self.followers:
            tell()

    def _settle(self, outcomes: list[Outcome | None]) -> None:
        self.known, self.num_arrived = True, outcomes.count(Outcome.DONE)
        self._left = [
            slot for slot, outcome in zip(self.job.host_slots, outcomes, strict=True) if outcome is not Outcome.DONE
        ]
        self._books.queue.ended(self.reading)  # before anything is asked for behind it
        ends = zip(self.job.keys, outcomes, strict=True)
        self.lost = frozenset(key for key, outcome in ends if outcome is not Outcome.DONE)
        followers, self.followers = self.followers, []
        for tell in followers:
            tell()
        self._books.fetched(self.job, outcomes)

    def _end(self) -> None:
        self._domain.end_lease(self._left, write=True)
        self._domain.group.notify()
