"""Which block lies in which slot. Moves no bytes and knows no device: the manager and the replay share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Generic

from .policy import Key, Policy


class BlockIndex(Generic[Key]):
    """Blocks by key, at most ``capacity_blocks`` of them; ``policy`` decides which ones stay.

    Not thread-safe: the owner serialises the calls.

    Attributes:
        slots: block -> its slot, also for blocks that are still arriving.
        arriving: blocks whose bytes are not there yet; the owner keeps it, and :meth:`lookup` stops at them.
        pins: block -> how often it is held; see :meth:`pin`.
        evicted_blocks: blocks that made room for others.
    """

    def __init__(self, policy: Policy[Key], capacity_blocks: int) -> None:
        self.slots: dict[Key, int] = {}
        self.arriving: set[Key] = set()
        self.pins: dict[Key, int] = {}
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self._policy = policy
        # Not one that a subclass inherits: it would pass by the methods that the subclass overrides.
        self._replace = policy.replace if "replace" in vars(type(policy)) else None  # type: ignore[attr-defined]

    def lookup(self, keys: Sequence[Key]) -> int:
        """Length of the longest prefix of ``keys`` whose blocks are all there; counts as a use of these blocks."""
        slots, arriving, on_access = self.slots, self.arriving, self._policy.on_access
        count = 0
        for key in keys:
            if key not in slots or key in arriving:
                break
            on_access(key)
            count += 1
        return count

    def admit(self, keys: Sequence[Key], free_slots: list[int]) -> dict[Key, int]:
        """Gives slots to those of the blocks that are absent, in order: free ones (taken from the list), then those of
        victims. Returns the blocks that are new, with their slots.

        A block that is there already keeps its place; it counts as used only behind an absent one, since
        :meth:`lookup` has counted the others. The policy may choose a block of this very call as victim: then that one
        is not admitted. Of more blocks than there are slots in all, the first are taken; blocks behind one for which
        there is no room because all others are pinned are left out.
        """
        slots, pins = self.slots, self.pins
        on_access, on_insert = self._policy.on_access, self._policy.on_insert
        make_room = self._replace or self._policy.victim
        free = min(len(free_slots), self.capacity_blocks - len(slots))
        admitted: dict[Key, int] = {}
        behind_absent = False
        for key in keys[: len(slots) + free]:
            if key in slots:
                if behind_absent:
                    on_access(key)
                continue
            behind_absent = True
            told = False
            if free:
                free -= 1
                slot = free_slots.pop()
            else:
                victim = make_room(key, pins)
                if victim is None:
                    break
                slot = slots.pop(victim)
                if victim in admitted:
                    del admitted[victim]
                else:
                    self.evicted_blocks += 1
                told = self._replace is not None
            admitted[key] = slots[key] = slot
            if not told:
                on_insert(key)
        return admitted

    def pin(self, keys: Iterable[Key]) -> None:
        """Keeps blocks from being evicted until as many calls of :meth:`unpin`."""
        pins = self.pins
        for key in keys:
            pins[key] = pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[Key]) -> None:
        """One :meth:`pin` of each of these blocks less."""
        pins = self.pins
        for key in keys:
            if pins[key] == 1:
                del pins[key]
            else:
                pins[key] -= 1

    def remove(self, key: Key) -> int:
        """Forgets a block that will never arrive; its slot."""
        slot = self.slots.pop(key)
        self._policy.on_remove(key)
        return slot

    def undo(self, keys: Iterable[Key]) -> list[int]:
        """Forgets blocks whose :meth:`admit` went wrong half way, whatever the policy knows of them; their slots."""
        taken = [(key, self.slots.pop(key)) for key in keys]
        for key, _ in taken:
            self.arriving.discard(key)
            self.pins.pop(key, None)
            with suppress(Exception):
                self._policy.on_remove(key)
        return [slot for _, slot in taken]

    def evict(self, num_blocks: int) -> list[int]:
        """Lets go of up to so many blocks that nothing holds; their slots."""
        taken: list[int] = []
        while len(taken) < num_blocks:
            victim = self._policy.victim(None, self.pins)
            if victim is None:
                break
            taken.append(self.slots.pop(victim))
        self.evicted_blocks += len(taken)
        return taken
