"""The books of a manager with a tier below host memory, as far as blocks are read into host memory: what is found, read
ahead, or read for a request that runs."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from ..errors import ClosedError, ForkedError, TransferError
from ..schedule import arriving
from ..schedule.transfer import Transfer
from ..tiers import Job as TierJob
from ..tiers import Outcome
from ..tracking.group import change
from ..tracking.keeper import Deadline, log
from .books import EPOCH, RANK
from .fetching import TierFetching, parts_of
from .following import Following
from .found import BlockState
from .hints import Expectation
from .jobs import Job, Result
from .loading import LoadingBooks
from .prefetch import Prefetch
from .rates import TIER

LOOK_AGAIN_S = 0.5  # for room, where some waits


class ReadingBooks(LoadingBooks):
    """See the module."""

    # ---- outside of sections ----
    def prefetch(self, keys: list[bytes], timeout_s: float) -> Prefetch:
        return self._read_ahead(keys, None, deadline=Deadline(timeout_s))

    def prefetch_expected(self, keys: list[bytes], expectation: Expectation[bytes] | None) -> Prefetch:
        return self._read_ahead(keys, expectation, timeout_s=self.timeout_s)

    def _read_ahead(self, keys: list[bytes], expectation: Expectation[bytes] | None, **options: Any) -> Prefetch:
        """What is expected as far as there may be room some time."""
        due_s = time.monotonic() if expectation is None else expectation.due_s
        below = self.ask(keys)

        def line_up() -> Prefetch:
            prefix, waiting = self._below_of(keys, below, later=expectation is not None)
            made = Prefetch(self, prefix=prefix, waiting=waiting, expectation=expectation, **options)
            return self._line_up(made, due_s)

        def start() -> Prefetch:
            made: Prefetch = change(self, line_up)
            if (error := self.hand_over().get(made)) is not None:
                raise error
            return made

        started: Prefetch = self.group.host.call(start)
        return started

    def hand_over(self) -> dict[Prefetch, Exception]:
        """To the tier, what may be read ahead now. Returns what of it ended with an error of a policy."""
        errors: dict[Prefetch, Exception] = {}
        while (turn := change(self, self._next_turn)) is not None:
            below = self.ask(turn[1])  # it may have waited long
            try:
                fetching = change(self, functools.partial(self._fetch_ahead, turn, below))
            except Exception as error:  # noqa: BLE001  others' turn comes all the same
                log.warning("blocks that are expected stay in the tier: %r", error)
                errors[turn[0]] = error
            else:
                if fetching is not None:
                    fetching.read(self.below.tier)
        return errors

    # ---- sections ----
    def _walk(
        self, keys: Sequence[bytes], below: Set[bytes], *, joins: bool = False, later: bool = False
    ) -> list[BlockState]:
        """Of the longest prefix that can be loaded: where each block is. ``joins``: what is being read into host
        memory counts as what lies in the tier. ``later``: by then nobody holds blocks."""
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
            elif joins and self.queue.bringing(coming[key]) is not None:
                states.append(BlockState.TIER)
            else:
                break
        if BlockState.TIER not in states:
            return states
        pins = {} if later else self.index.pins
        left = min(self.index.capacity_blocks, self.slots.pool.num_blocks) if later else self._room(pins)
        for position in range(len(states)):
            left -= keys[position] not in slots or keys[position] not in pins
            if left < 0:
                return states[:position]
        return states

    def _room(self, held: Iterable[bytes]) -> int:
        """How many blocks could come into host memory beside those of these that are there, each named once."""
        total = min(self.index.capacity_blocks, len(self.slots.taken) + self.slots.pool.count_free_here())
        return total - sum(map(self.index.slots.__contains__, held))

    def _room_beside(self, keys: Sequence[bytes]) -> int:
        """And beside all that is held."""
        return self._room(self.index.pins.keys() | keys)

    def lookup(
        self, keys: list[bytes], below: Set[bytes], *, joins: bool = False
    ) -> tuple[list[bytes], list[BlockState], int]:
        self.settle()
        states = self._walk(keys, below, joins=joins)
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

    # ---- reading into host memory ----
    def _below_of(self, keys: list[bytes], below: Set[bytes], *, later: bool) -> tuple[list[bytes], list[bytes]]:
        """The prefix that can be loaded, and what of it lies in the tier alone."""
        self.settle()
        prefix = keys[: len(self._walk(keys, below, joins=True, later=later))]
        return prefix, [key for key in prefix if key not in self.index.slots]

    def _line_up(self, prefetch: Prefetch, due_s: float) -> Prefetch:
        if prefetch.expectation is not None:
            prefetch.expectation.reader = prefetch
        self.queue.is_full = False  # or so it may be
        self.queue.add(prefetch, due_s)
        prefetch.beside = [*self._parts_of(prefetch.prefix)]
        return prefetch

    def _next_turn(self) -> tuple[Prefetch, list[bytes]] | None:
        return None if self.closed else self.queue.next(self.rates.load_s(1, TIER))

    def _fetch_ahead(self, turn: tuple[Prefetch, list[bytes]], below: Set[bytes]) -> TierFetching | None:
        """If it is still its turn."""
        if self._next_turn() != turn:
            return None
        prefetch, keys = turn
        left: list[bytes] = []  # whatever is raised
        fetching = None
        try:
            self.settle()
            one = prefetch.expectation
            if one is not None and one.released and self._read_again(self.index.expect_again(one)):
                left = prefetch.waiting
                return None  # perhaps another one comes first now
            wanted, left = self._still_wanted(prefetch, keys, self.below.not_forgotten(below))
            if wanted and (self.rates.load_s(self.queue.num_blocks + len(wanted), TIER) or 0.0) > prefetch.left_s:
                left = []  # it would be late
            elif wanted:
                fetching = self._fetch_what_fits(prefetch, keys, wanted)
                if fetching is not None:
                    prefetch.fetching.append(fetching)
                if fetching is None or fetching.num_blocks < len(wanted):
                    left = self._left_without_room(prefetch, keys, left)
        except Exception:
            left = []
            if not prefetch.fetching:  # of a policy
                raise
        finally:
            prefetch.waiting = left
            if not prefetch.waits:
                self.group.notify()
        return fetching

    def _read_again(self, expectations: list[Expectation[bytes]]) -> bool:
        """What of these has been evicted meanwhile. Whether there is any."""
        found = False
        for one in expectations:
            prefetch, slots = one.reader, self.index.slots
            if prefetch is None or prefetch.cancelled:
                continue
            waiting = [key for key in prefetch.prefix if key not in slots]
            num_lost = len(waiting) - len(prefetch.waiting)
            if num_lost > 0:
                prefetch.num_blocks += num_lost
                prefetch.waiting = waiting
                self.queue.add(prefetch, one.due_s)
                found = True
        return found

    def _still_wanted(
        self, prefetch: Prefetch, keys: list[bytes], below: Set[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """Of a part that waited, what is to be read; and what of the prompt waits still."""
        slots, wanted = self.index.slots, []
        left = prefetch.left_behind(keys)
        prefetch.beside += [one for one in self._parts_of(keys) if one not in prefetch.beside]
        for key in keys:
            if key in slots:
                prefetch.num_found += key not in self.index.arriving
            elif key not in below:  # what comes behind it is of no use
                left = [] if prefetch.expectation is None else left
                break
            elif not self.feed.holds(key):  # else that prompt decides what becomes of it
                wanted.append(key)
        return wanted, left

    def _fetch_what_fits(self, prefetch: Prefetch, keys: list[bytes], wanted: list[bytes]) -> TierFetching | None:
        """As many of them as there is room for: those of it that have come make no room for others of it."""
        if prefetch.is_expected:
            room = self.make_room(len(wanted), wanted[0])
        else:  # of a prompt that has come, nothing holds the blocks any more
            room = self._room_beside(keys if prefetch.expectation is None else prefetch.prefix)
        while wanted := prefetch.first_of(wanted, max(0, room)):
            with contextlib.suppress(TransferError):
                return self._fetch(wanted, prefetch.left_s, urgent=False)
            room = self._room_beside(prefetch.prefix)
            if room >= len(wanted):
                break
        return None

    def _left_without_room(self, prefetch: Prefetch, keys: list[bytes], left: list[bytes]) -> list[bytes]:
        """What waits still when not all of a part had room."""
        if not prefetch.is_expected:
            return []
        self.queue.is_full = True
        if not self._is_to_look:
            self._is_to_look = True
            self._alarms.add(time.monotonic() + LOOK_AGAIN_S, functools.partial(_look_for_room, weakref.ref(self)))
        return [*left, *(key for key in keys if key not in self.index.slots)]

    def make_room(self, num_blocks: int, incoming: bytes) -> int:
        """For so many blocks, or as many as what is not due sooner may give; how many. ``incoming``: one of them, which
        is expected."""
        raise NotImplementedError

    def look_for_room(self) -> None:
        """When somebody has waited for it for a while."""
        self._is_to_look = False
        if self.queue.is_full:
            self.there_is_room()

    def there_is_room(self) -> None:
        """Perhaps: others' turn may have come."""
        self.queue.is_full = False
        if self._next_turn() is not None:
            self.look_at_turns()

    def unpin(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        super().unpin(keys)
        if keys and self.queue.is_full and not self.closed:
            self.there_is_room()

    def _fetch(self, keys: list[bytes], timeout_s: float, *, urgent: bool, layerwise: bool = False) -> TierFetching:
        job = self._plan_from_tier(keys, list(range(len(keys))))  # no device block is meant
        if not self.slots.pool.domain.try_lease(job.host_slots, write=True):
            self._undo_from_tier(job, keys)
            raise TransferError("somebody else holds the host blocks")
        fetching = TierFetching(self, job, timeout_s, urgent=urgent, layerwise=layerwise)
        self.queue.began(fetching.reading, fetching)
        return fetching

    @property
    def num_reading_blocks(self) -> int:
        return self.queue.num_blocks

    def _reading_of(self, keys: Iterable[bytes]) -> dict[bytes, TierFetching]:
        """Those of the blocks that are being read into host memory, and by what."""
        arriving, found = self.index.arriving, {}
        for key in keys:
            if key in arriving and (fetching := self.queue.bringing(arriving[key])) is not None:
                found[key] = fetching
        return found

    def _parts_of(self, keys: Iterable[bytes]) -> list[TierFetching]:
        """What brings those of the blocks that are being read, once each."""
        return list(dict.fromkeys(self._reading_of(keys).values()))

    def is_read(self, keys: list[bytes]) -> bool:
        slots, arriving = self.index.slots, self.index.arriving
        if not all(key in slots for key in keys):
            return False
        reading = self._reading_of(keys)
        return bool(reading) and all(key in reading or key not in arriving for key in keys)

    def read_soon(self, keys: list[bytes]) -> Prefetch:
        self.settle()
        states = self._walk(keys, frozenset(keys), joins=True)
        hashes, slots = keys[: len(states)], self.index.slots
        fetching = self._parts_of(hashes)
        for one in fetching:
            one.urgent = True
        self.index.pin(hashes)
        try:
            for part in parts_of([key for key in hashes if key not in slots]):
                own = self._fetch(part, self.timeout_s, urgent=True)
                fetching.append(own)
                self.group.host.tell(functools.partial(own.read, self.below.tier))
        except TransferError:
            pass  # what has room comes
        except Exception:
            if not fetching:  # of a policy
                raise
        finally:
            self.index.unpin(hashes)
        return self._used_by_one(fetching)

    def _used_by_one(self, fetching: list[TierFetching]) -> Prefetch:
        prefetch = Prefetch(self, fetching)
        prefetch.blocks_until = self.queue.blocks_until(fetching)
        for one in fetching:
            one.users.add(prefetch)
        return prefetch

    def follow(self, keys: list[bytes], device_ids: list[int], compute: Any) -> tuple[Transfer, Prefetch]:
        self.settle()
        if len(self._walk(keys, frozenset(keys), joins=True)) < len(keys):
            raise TransferError(f"not all of {len(keys)} blocks are there or have room")
        slots, following = self.index.slots, self.directory.following
        self.index.pin(keys)
        try:
            absent = [key for key in keys if key not in slots]
            if absent:
                own = self._fetch(absent, self.timeout_s, urgent=True, layerwise=True)
                self.group.host.tell(functools.partial(own.read, self.below.tier))
            reading = self._reading_of(keys)
            fetching = list(dict.fromkeys(reading.values()))
            for one in fetching:
                one.urgent = True
            behind = reading.keys() - following
            following |= behind  # this load may follow them, and no other one
            try:
                job = self.directory.plan_load(keys, device_ids)
            finally:
                following -= behind
        finally:
            self.index.unpin(keys)
        try:
            plan = self.scheduler.plan("onload", device_ids, list(job.host_slots))
            transfer = arriving.follow(self.scheduler, plan, compute, None, [slots[key] for key in reading])
        except BaseException as error:
            damaged = error.damaged_host_blocks if isinstance(error, TransferError) else ()
            self.directory.undo(job, [i for i, slot in enumerate(job.host_slots) if slot in damaged])
            raise
        movement = transfer._movement
        movement.shares_link = True  # it waits for the tier, and what is measured is the end of it
        self.moves.add(transfer, [job], follows=True)
        self.loads.add(movement)
        if fetching:  # else others have brought all meanwhile
            Following(movement, keys, fetching)
        return transfer, self._used_by_one(fetching)

    def read_ended(self, job: TierJob) -> None:
        super().read_ended(job)  # others' turn may have come
        if self._next_turn() is not None:
            self.look_at_turns()

    def look_at_turns(self) -> None:
        """Soon, and not in this section."""
        self.group.host.tell(functools.partial(_hand_over, weakref.ref(self)))

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


def _hand_over(books: Callable[[], ReadingBooks | None]) -> None:
    """Not in a section."""
    found = books()
    if found is not None:
        found.hand_over()


def _look_for_room(books: Callable[[], ReadingBooks | None]) -> None:
    """Not in a section. There may be some of which nobody tells: others have given back theirs, say."""
    found = books()
    if found is not None:
        with contextlib.suppress(ClosedError, ForkedError):
            change(found, found.look_for_room)
