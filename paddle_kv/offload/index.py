"""Which block lies in which slot. Moves no bytes and knows no device: the manager and the replay share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from .policy import Key, Policy


class Entry:
    """One block: its slot, how many leases and transfers hold it, and whether its bytes have arrived."""

    __slots__ = ("pins", "slot", "visible")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.pins = 0
        self.visible = False


class BlockIndex(Generic[Key]):
    """Blocks by key, at most ``capacity_blocks`` of them; ``policy`` decides which ones stay.

    Not thread-safe: the owner serialises the calls.

    Attributes:
        entries: all blocks, also those whose bytes are on their way.
        evicted_blocks: blocks that made room for others.
    """

    def __init__(self, policy: Policy[Key], capacity_blocks: int) -> None:
        self.entries: dict[Key, Entry] = {}
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self._policy = policy

    def lookup(self, keys: Sequence[Key]) -> list[Entry]:
        """The longest prefix of ``keys`` whose blocks are all there and visible; counts as a use of these blocks."""
        found = []
        entries, on_access = self.entries, self._policy.on_access
        for key in keys:
            entry = entries.get(key)
            if entry is None or not entry.visible:
                break
            on_access(key)
            found.append(entry)
        return found

    def admit(self, keys: Sequence[Key], free_slots: list[int]) -> dict[Key, Entry]:
        """Gives slots to those of the blocks that are absent, in order: free ones (taken from the list), then those of
        victims. The entries are neither visible nor pinned.

        A block that is there already keeps its place; it counts as used only behind an absent one, since
        :meth:`lookup` has counted the others. The policy may choose a block of this very call as victim: then that one
        is not admitted. Of more blocks than there are slots in all, the first are taken; blocks behind one for which
        there is no room because all others are pinned are left out.
        """
        entries, policy = self.entries, self._policy
        admitted: dict[Key, Entry] = {}
        behind_absent = False
        for key in keys[: min(self.capacity_blocks, len(entries) + len(free_slots))]:
            if key in entries:
                if behind_absent:
                    policy.on_access(key)
                continue
            behind_absent = True
            if free_slots and len(entries) < self.capacity_blocks:
                slot = free_slots.pop()
            else:
                victim = policy.victim(key, self._is_pinned)
                if victim is None:
                    break
                slot = entries.pop(victim).slot
                if admitted.pop(victim, None) is None:
                    self.evicted_blocks += 1
            admitted[key] = entries[key] = Entry(slot)
            policy.on_insert(key)
        return admitted

    def remove(self, key: Key) -> int:
        """Forgets a block that will never become visible; its slot."""
        self._policy.on_remove(key)
        return self.entries.pop(key).slot

    def evict(self, num_blocks: int) -> list[int]:
        """Lets go of up to so many blocks that nothing holds; their slots."""
        slots: list[int] = []
        while len(slots) < num_blocks:
            victim = self._policy.victim(None, self._is_pinned)
            if victim is None:
                break
            slots.append(self.entries.pop(victim).slot)
        self.evicted_blocks += len(slots)
        return slots

    def _is_pinned(self, key: Key) -> bool:
        return self.entries[key].pins > 0
