"""Which blocks are in host memory, arriving there, or in a tier below; what is held; what came and went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from .checks import check_seconds, check_tier, checked_count, checked_hashes
from .events import EventLog, Listener
from .found import BlockState, Found, Holds
from .hints import Expectation
from .index import BlockIndex
from .jobs import HOST, Event, Snapshot
from .policy import Policy
from .slots import Slots

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


class Contents:
    """What a :class:`~paddle_kv.offload.Directory` knows of blocks, whoever moves them."""

    def __init__(
        self, policy: Policy[bytes], capacity_blocks: int, slots: Slots, max_events: int, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self.index: BlockIndex[bytes] = BlockIndex(policy, capacity_blocks)
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._slots = slots
        self._holds = Holds(self.index)
        self._tiers: dict[bytes, tuple[str, ...]] = {}
        self._events = EventLog(max_events)
        self.index.evicted = [] if max_events else None

    # ---- what is there ----
    def lookup(self, hashes: Sequence[bytes], *, prompt: Sequence[bytes] | None = None) -> Found:
        """The longest prefix that is present, held against eviction. A use of these blocks: once per request.
        ``prompt``: all hashes of it, where some are left out that are known to be elsewhere."""
        keys, prompt = checked_hashes(hashes), None if prompt is None else checked_hashes(prompt, "prompt")
        if self._holds.lost:
            self._holds.end_lost()
        count = self.index.lookup(keys, prompt)
        counters, num_arriving = self.counters, 0
        counters["lookups"] += 1
        counters["looked_up_blocks"] += len(keys)
        counters["hit_blocks"] += count
        if self.index.arriving:
            num_arriving = len(list(takewhile(self.index.slots.__contains__, keys[count:])))
        return Found(self._holds, keys[:count], num_arriving)

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
        [key] = checked_hashes([key], "key")
        return self._tiers.get(key, ())

    def tier_stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        """A tier below host memory says that it has these blocks, of all ranks.

        Raises:
            ValueError: ``tier`` is host memory itself, or no name at all.
        """
        check_tier(tier)
        added = [key for key in dict.fromkeys(checked_hashes(hashes)) if tier not in self._tiers.get(key, ())]
        for key in added:
            self._tiers[key] = (*self._tiers.get(key, ()), tier)
        self._events.add("stored", tier, added)

    def tier_removed(self, tier: str, hashes: Sequence[bytes]) -> None:
        """It has them no more.

        Raises:
            ValueError: ``tier`` is host memory itself.
        """
        check_tier(tier)
        gone = [key for key in dict.fromkeys(checked_hashes(hashes)) if tier in self._tiers.get(key, ())]
        for key in gone:
            left = tuple(one for one in self._tiers.pop(key) if one != tier)
            if left:
                self._tiers[key] = left
        self._events.add("removed", tier, gone)

    # ---- hints ----
    def expect(self, hashes: Sequence[bytes], in_seconds: float | None = None) -> Expectation[bytes] | None:
        """A prompt that begins with these blocks will be looked up: after so many seconds, or as the next one behind
        those that are expected already (None). Its blocks, also those that come later, are evicted after all others,
        and those that are due last first; they make no room for what is due later. Ends with the :meth:`lookup` of a
        prompt that contains the last of them, or as many blocks later as four times the capacity. A use of the blocks
        that are there.

        Returns:
            Its ``over`` says whether the prompt has come, or was given up; None: there are no blocks.

        Raises:
            TypeError: not a list of bytes, or not a number.
            ValueError: a time that is negative or not finite.
        """
        due_s = self._clock() + check_seconds(in_seconds, "in_seconds")
        return self.index.expect(checked_hashes(hashes), due_s)

    def end(self, hashes: Sequence[bytes]) -> None:
        """The session of this prompt is over: its blocks are evicted before all others, from the end on. A block stays
        on which blocks of other prompts hang that are there, and one that is used again. A hint that turns out to be
        wrong costs hits, and nothing else.

        Raises:
            TypeError: not a list of bytes.
        """
        self.index.end(checked_hashes(hashes))

    # ---- room ----
    def evict(self, num_blocks: int) -> int:
        """Lets go of up to so many blocks that nothing holds, in the order of the policy; how many.

        Raises:
            TypeError: not an integer.
            ValueError: negative.
        """
        num_blocks = checked_count(num_blocks, "num_blocks")
        self._holds.end_lost()
        try:
            slots = self.index.evict(num_blocks)
        finally:
            self.tell_evicted()
        self._slots.give_back(slots)
        return len(slots)

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forgets those of the blocks that are there or arriving, whoever holds them; how many there were. Jobs in
        flight go on."""
        found = [key for key in dict.fromkeys(checked_hashes(keys, "keys")) if key in self.index.slots]
        present = [key for key in found if key not in self.index.arriving]
        self._forget(found)
        self._events.add("removed", HOST, present)
        return len(found)

    def clear(self) -> int:
        """:meth:`drop` of all blocks in host memory."""
        slots = self.index.clear()
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

    def listen(self, listener: Listener) -> None:
        """It is called with kind, tier and keys of each event, in the middle of the change: it calls nothing here."""
        self._events.listen(listener)
        self.index.evicted = []

    # ---- for the plans ----
    def _admit(self, keys: list[bytes]) -> dict[bytes, int]:
        index = self.index
        there = index.slots
        free_slots: list[int] = []
        if (room := index.capacity_blocks - len(there)) > 0:
            free_slots = self._slots.take(min(room, len(keys) - sum(map(there.__contains__, keys))))
        try:
            return index.admit(keys, free_slots)
        finally:
            if free_slots:
                self._slots.give_back(free_slots)
            if index.evicted:
                self.tell_evicted()

    def _forget(self, keys: Iterable[bytes]) -> None:
        slots = []
        for key in list(keys):
            slots.append(self.index.remove(key))
        self._slots.give_back(slots)

    def tell_evicted(self) -> None:
        if self.index.evicted:
            self._events.add("removed", HOST, self.index.evicted)
            self.index.evicted = []

    def _has_room(self, keys: list[bytes]) -> bool:
        index = self.index
        absent = sum(key not in index.slots for key in keys)
        held = {key for key in index.pins if key in index.slots}
        held.update(key for key in keys if key in index.slots)
        held.update(key for key in index.hung_on(keys) if key in index.slots)
        return absent <= index.capacity_blocks - len(held)
