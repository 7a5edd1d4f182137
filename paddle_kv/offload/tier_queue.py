"""Who comes first at a tier: what a running request needs is handed to it at once, and what is read ahead waits its
turn. A tier serves what it was given in the order in which it came, so little is given to it ahead."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import time
from collections.abc import Iterable, Set

from ..tiers import Job as TierJob
from .fetching import TierFetching
from .prefetch import Prefetch

PARTS = 6  # under way of what is read ahead: when one ends, the others keep the threads of an engine busy
AHEAD_S = 0.03  # that the tier needs for them together: so long an urgent read waits for what is read ahead
FIRST_BLOCKS, MOST_BLOCKS = 2, 256  # of a part: while nothing is known of the tier; of one that is quick
QUEUED = 1.5  # times the shortest time of a part: it has stood behind others
MOST_MORE_BLOCKS = 256
SLOWER = 1.05  # with each part that took longer though there was no more: storage that is slower for good is believed


def blocks_of_part(block_s: float | None) -> int:
    """Of what is read ahead. ``block_s``: seconds that the tier needs for one; None: unknown."""
    if block_s is None:
        return FIRST_BLOCKS
    return max(1, min(MOST_BLOCKS, math.ceil(AHEAD_S / PARTS / block_s)))


class Room:
    """How many blocks more than that may be under way: storage that is far away brings many in the time of one. There
    is more as long as parts take no longer for it, as in the congestion control of TCP Vegas."""

    def __init__(self) -> None:
        self.more_blocks = 0
        self._least_s = math.inf
        self._no_more_since_s = -math.inf

    def came(self, num_blocks: int, begun_s: float, ended_s: float) -> None:
        """A part of what is read ahead, by the same clock as all others."""
        seconds = ended_s - begun_s
        self._least_s = min(self._least_s, seconds)
        if seconds <= QUEUED * self._least_s:
            self.more_blocks = min(MOST_MORE_BLOCKS, self.more_blocks + num_blocks)
        elif self.more_blocks:
            self.more_blocks //= 2
            self._no_more_since_s = ended_s
        elif begun_s >= self._no_more_since_s:  # nothing of what is more stood before it
            self._least_s *= SLOWER


class TierQueue:
    """In sections only."""

    def __init__(self) -> None:
        self._turns: list[tuple[float, int, Prefetch]] = []  # a heap: what is due first comes first, then the first one
        self._numbers = itertools.count()
        self._under_way: dict[TierJob, TierFetching | None] = {}  # in order; None: a load to the device
        self._by_job: dict[int, TierFetching] = {}
        self._room = Room()
        self.is_full = False  # host memory, of what is expected sooner, as far as one knows
        self._process_id = os.getpid()

    # ---- what waits ----
    def add(self, prefetch: Prefetch, due_s: float) -> None:
        """It is read ahead, before what is due later."""
        if prefetch.waiting:
            heapq.heappush(self._turns, (due_s, next(self._numbers), prefetch))

    def next(self, block_s: float | None) -> tuple[Prefetch, list[bytes]] | None:
        """What may be handed to the tier now, of all that waits; nothing while a request waits for the tier. What no
        request waits for any more may be late for long: it holds up nothing."""
        while self._turns and not self._turns[0][-1].waits:
            heapq.heappop(self._turns)
        first = self._first()
        if first is None or any(one is None or one.awaited for one in self._under_way.values()):
            return None
        most = blocks_of_part(block_s)
        if self.num_blocks > (PARTS - 1) * most + self._room.more_blocks:
            return None
        return first, first.first_of(first.waiting, most)

    def _first(self) -> Prefetch | None:
        """Of all that waits. What is expected waits for room in host memory, and holds up nothing else."""
        turns = self._turns
        if self.is_full:
            turns = [one for one in turns if one[-1].waits and not one[-1].is_expected]
        return min(turns)[-1] if turns else None

    def forget(self, keys: Set[bytes]) -> bool:
        """They are nowhere any more: what waits behind them is of no use. Returns whether anything did."""
        cut = False
        for _, _, prefetch in self._turns:
            prefix = prefetch.prefix or prefetch.waiting
            stop = next((at for at, key in enumerate(prefix) if key in keys), None) if prefetch.waiting else None
            if stop is None:
                continue
            before = set(prefix[:stop])
            left = [key for key in prefetch.waiting if key in before]
            cut |= len(left) < len(prefetch.waiting)
            prefetch.waiting = left
        return cut

    def forget_all(self) -> None:
        """As :meth:`forget` of all."""
        for _, _, prefetch in self._turns:
            prefetch.waiting = []

    def end(self) -> None:
        """Nothing more is handed over, and what of it the storage has not begun is not read. Loads go on."""
        for _, _, prefetch in self._turns:
            prefetch.cancel()
        for fetching in self._by_job.values():
            fetching.reading.cancel()

    # ---- what the tier was given ----
    @property
    def num_blocks(self) -> int:
        """Under way, for whomever."""
        return sum(len(job.keys) for job in self._under_way)

    def began(self, job: TierJob, fetching: TierFetching | None = None) -> None:
        self._under_way[job] = fetching
        if fetching is not None:
            self._by_job[fetching.job.id] = fetching

    def ended(self, job: TierJob) -> None:
        """Again: does nothing."""
        fetching = self._under_way.pop(job, None)
        if fetching is None:
            return
        del self._by_job[fetching.job.id]
        if not fetching.urgent and job.done and job.started_s:
            self._room.came(len(job.keys), job.started_s, time.monotonic())

    def bringing(self, job_id: int) -> TierFetching | None:
        """What a request may wait for, of the job that a block arrives by."""
        fetching = self._by_job.get(job_id)
        if fetching is None or fetching.reading.cancelled or self._process_id != os.getpid():
            return None
        return fetching

    def blocks_until(self, fetching: Iterable[TierFetching]) -> int:
        """That the tier reads until all of these are there, with those before them."""
        last, total, found = {one.reading for one in fetching}, 0, 0
        for job in self._under_way:
            total += len(job.keys)
            if job in last:
                found = total
        return found
