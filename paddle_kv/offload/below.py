"""What lies below the host memory of a manager: a tier, its policy, and the thread that goes there. The manager's own
calls ask only what exists, which costs no access to storage."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import compress
from typing import Any, Protocol

from ..errors import ClosedError, ForkedError
from ..tiers import Job, Observer, Outcome, Saver, Tier
from ..tiers.job import check_keys
from ..tracking.group import MemoryGroup, change, change_soon
from ..tracking.keeper import Living, log
from .rates import TIER, Rates

FIRST_ASKED, ASKED_GROWTH = 64, 4  # keys at a time: behind the first gap nothing is of use
RATE_WEIGHT = 0.2  # of the last load
END_S = 5.0


class Owner(Protocol):
    """The books, as the tier's side sees them: see :class:`TieredBooks`."""

    rates: Rates

    @property
    def group(self) -> MemoryGroup: ...

    def end_offer(self, blocks: dict[bytes, int], stored: Set[bytes]) -> None: ...

    def stored(self, job: Job) -> list[bytes]: ...

    def lost_below(self, keys: list[bytes]) -> None: ...

    def count_lost(self, num_blocks: int) -> None: ...

    def read_ended(self, job: Job) -> None: ...


class Rate:
    """How long a load takes behind those before it: an average over the last ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.blocks_under_way = 0
        self._seconds_per_block = 0.0  # nothing is known yet

    def began(self, num_blocks: int) -> int:
        with self._lock:
            self.blocks_under_way += num_blocks
            return self.blocks_under_way

    def ended(self, num_blocks: int, blocks_before: int, seconds: float | None) -> None:
        """``blocks_before``: what :meth:`began` said; ``seconds=None``: that says nothing of others."""
        with self._lock:
            self.blocks_under_way -= num_blocks
            if seconds is not None:
                last = seconds / blocks_before
                known = self._seconds_per_block
                self._seconds_per_block = known + RATE_WEIGHT * (last - known) if known else last

    def seconds(self, num_blocks: int) -> float:
        """Until so many blocks would be there."""
        with self._lock:
            return (self.blocks_under_way + num_blocks) * self._seconds_per_block if num_blocks else 0.0


class Clearing:
    """A call that deletes all."""


class Below:
    """Args:
        saver: the tier and when what goes there.

    Attributes:
        storing: keys of blocks that are offered to the tier or on their way there. In sections only, as the next two.
        held: those of them that are in host memory and must stay there until then.
        forgotten: keys that were dropped while they were on their way: deleted as soon as they are there.
    """

    def __init__(self, saver: Saver) -> None:
        if saver.told is not None:
            raise ValueError("tier is a Saver that another manager has")
        self._saver = saver
        self.tier: Tier = saver.tier
        self.name = self.tier.engine.name
        self.when = saver.when
        self.keeps_room = saver.when in ("write_back", "exclusive")
        self.rate = Rate()
        self.storing: set[bytes] = set()
        self.held: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        self._dropping: Counter[bytes] = Counter()  # what was dropped and may be there still
        self._clearing: weakref.WeakSet[Clearing] = weakref.WeakSet()
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._process_id = os.getpid()
        self._told_of_error = False
        self._thread: threading.Thread | None = None

    def begin(self, books: Owner) -> None:
        """Once. The tier and the saver are theirs until :meth:`close`, or stay free where this raises."""
        self.tier.begin(books)
        self._books = weakref.ref(books)
        self._end = weakref.finalize(books, self._tasks.put, None)
        self._saver.told = self._told
        thread = threading.Thread(target=_serve, args=(self._tasks,), name="paddle_kv-below", daemon=True)
        try:
            thread.start()
        except BaseException:
            self.close()
            raise
        self._thread = thread

    # ---- asked: not in a section ----
    def having(self, keys: Sequence[bytes]) -> Set[bytes]:
        """Those of the first keys that the tier may have, up to the first one that it has not."""
        found: set[bytes] = set()
        start, count = 0, FIRST_ASKED
        try:
            while start < len(keys):
                part = keys[start : start + count]
                there = self.tier.exists(part)
                found.update(compress(part, there))
                if not all(there):
                    break
                start, count = start + count, count * ASKED_GROWTH
        except (ClosedError, ForkedError):
            return frozenset()
        except Exception as error:  # noqa: BLE001  whatever it is: serving goes on without the tier
            if not self._told_of_error and _are_names(keys):
                self._told_of_error = True
                log.warning("the tier %s could not be asked what it has (%s); serving goes on", self.name, error)
            return frozenset()
        return found

    # ---- in sections ----
    def not_forgotten(self, keys: Set[bytes]) -> Set[bytes]:
        """Those that may be loaded: what the tier was asked before a block was dropped does not count."""
        if self._clearing:
            return frozenset()
        return keys - self.forgotten - self._dropping.keys() if self.forgotten or self._dropping else keys

    def forget(self, keys: list[bytes]) -> None:
        """They are about to be deleted. What is on its way down now is deleted when it is there."""
        self._dropping.update(keys)
        self.forgotten |= self.storing.intersection(keys)

    def deleted(self, keys: list[bytes]) -> None:
        """Behind :meth:`forget` of the same."""
        self._dropping -= Counter(keys)

    def forget_all(self, call: Clearing) -> None:
        """All is about to be deleted, by this call."""
        self._clearing.add(call)
        self.forgotten |= self.storing

    def cleared(self, call: Clearing) -> None:
        """Or nobody refers to the call any more."""
        self._clearing.discard(call)

    def wants(self, what: str) -> bool:
        """Whether the policy has anything to do with such an offer."""
        if self._process_id != os.getpid():
            return False  # the thread is the parent's
        return self.when in {
            "saved": ("write_through", "nth_use"),
            "used": ("nth_use",),
            "evicting": ("write_back", "exclusive"),
        }.get(what, ())

    def offer(self, what: str, blocks: dict[bytes, int]) -> None:
        """Leased blocks, to ``saved``, ``used`` or ``evicting`` of the saver."""
        self.storing.update(blocks)
        self._tasks.put(functools.partial(self._offer, what, blocks))

    def moved_up(self, keys: list[bytes]) -> None:
        """They are in host memory now."""
        self._tasks.put(functools.partial(self._saver.loaded, keys))

    # ---- in threads of the tier ----
    def _told(self, job: Job) -> None:
        """A store is over."""
        self.tier.pool.domain.group.host.soon(functools.partial(self._end_store, job))

    def _end_store(self, job: Job) -> None:
        books = self._books()
        late = [key for key in job.keys if key in self.forgotten]
        if books is not None:
            late = change(books, functools.partial(books.stored, job))
        if late:
            with contextlib.suppress(ClosedError):  # the engine deletes all the same
                self.tier.engine.delete([self.tier.format.name_of(key) for key in late])
            if books is not None:
                change(books, functools.partial(self.forgotten.difference_update, late))

    # ---- the thread ----
    def _offer(self, what: str, blocks: dict[bytes, int]) -> None:
        job = None
        wanted = {key: slot for key, slot in blocks.items() if key not in self.forgotten}
        try:
            job = getattr(self._saver, what)(list(wanted), list(wanted.values()))
        finally:
            domain = self.tier.pool.domain
            change(domain, functools.partial(self._end_lease, domain, blocks))
            books = self._books()
            if books is not None:
                stored = frozenset(job.keys if job is not None else ())
                change(books, functools.partial(books.end_offer, blocks, stored))

    @staticmethod
    def _end_lease(domain: Any, blocks: dict[bytes, int]) -> None:
        domain.end_lease(list(blocks.values()), write=False)
        domain.group.notify()

    def drain(self, timeout_s: float | None) -> bool:
        """Waits until what was offered so far was handed to the tier.

        Raises:
            ClosedError: closed meanwhile.
        """
        if self._process_id != os.getpid():
            return True  # of a forked child nothing goes down
        reached = threading.Event()
        self._tasks.put(reached.set)
        if not self._end.alive:  # the thread may have ended before it comes to that
            raise ClosedError("the offload manager is closed")
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Hands nothing down any more."""
        self._end()
        if self._thread is not None and self._process_id == os.getpid():
            self._thread.join(END_S)
        if self._saver.told == self._told:
            self._saver.told = None  # another manager may have it
        books = self._books()
        if books is not None:
            self.tier.end(books)

    def timed(self, observer: Observer, num_blocks: int) -> Timed:
        """The same, for a load that is about to begin."""
        return Timed(observer, num_blocks, self.rate, self._books)


class Timed:
    """Measures a load, and says what the tier has not."""

    def __init__(self, observer: Observer, num_blocks: int, rate: Rate, books: Callable[[], Owner | None]) -> None:
        self._observer, self._rate, self._books = observer, rate, books
        self._before = rate.began(num_blocks)
        self._num_blocks = num_blocks
        self._started_s = time.monotonic()

    def give_up(self) -> None:
        """It has not begun after all."""
        self._rate.ended(self._num_blocks, 1, None)

    def layers_arrived(self, job: Job, layers: range) -> None:
        self._observer.layers_arrived(job, layers)

    def settled(self, job: Job) -> None:
        self._rate.ended(self._num_blocks, self._before, time.monotonic() - self._started_s if job.done else None)
        books = self._books()
        if books is not None:
            self._tell_rates(books.rates, set(job.outcomes), time.monotonic() - self._started_s)
        gone = [
            key
            for key, outcome in zip(job.keys, job.outcomes, strict=True)
            if outcome in (Outcome.MISSING, Outcome.DAMAGED)
        ]
        if gone and books is not None:
            change_soon(books, functools.partial(books.lost_below, gone))
        if job.num_lost and books is not None:  # before the observer hears of it, which may cancel the job
            change_soon(books, functools.partial(books.count_lost, job.num_lost))
        self._observer.settled(job)
        if books is not None:  # behind what the observer asks of the tier next
            change_soon(books, functools.partial(books.read_ended, job))

    def _tell_rates(self, rates: Rates, outcomes: set[Outcome | None], seconds: float) -> None:
        num_bytes = self._before * rates.block_bytes  # those before it were loaded in the same time
        if seconds <= 0:
            return  # by a coarse clock
        if outcomes == {Outcome.DONE}:
            rates.observe_load(TIER, num_bytes, seconds)
        elif outcomes & {Outcome.FAILED, Outcome.DAMAGED, Outcome.MISSING}:
            rates.observe_failed(TIER)
        elif Outcome.LATE in outcomes:
            rates.observe_late(TIER, num_bytes, seconds)

    def over(self, job: Job) -> None:
        self._observer.over(job)


def _are_names(keys: Sequence[bytes]) -> bool:
    """Whether a tier could have each of these: it is no error of the tier if not."""
    try:
        check_keys(keys)
    except ValueError:
        return False
    return True


def _serve(tasks: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    """Knows nobody: who is forgotten ends it."""
    while (task := tasks.get()) is not None:
        # One that was closed before the manager is no error. The next task may work.
        with Living("an error while blocks went to a tier"), contextlib.suppress(ClosedError, ForkedError):
            task()
        del task
