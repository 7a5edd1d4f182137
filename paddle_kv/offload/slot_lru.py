"""Least recently used, by slot: a list linked through two arrays, 16 bytes a block beside the index."""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping
from typing import Any, Generic

from .policy import Key


class SlotLru(Generic[Key]):
    """As :class:`~paddle_kv.offload.Lru`, for an index of which the slots are numbered from 0 to the capacity."""

    by_order = True

    def __init__(self, capacity_blocks: int) -> None:
        self._end = capacity_blocks  # a slot that is none: behind the youngest, in front of the oldest
        self._older = array("i", range(capacity_blocks + 1))
        self._younger = array("i", self._older)
        self._keys: list[Any] = [None] * capacity_blocks
        self._slots: Mapping[Key, int] = {}

    def attach(self, slots: Mapping[Key, int]) -> None:
        """The index says where it keeps its slots; it has that of a block before it tells of it."""
        self._slots = slots

    def on_insert(self, key: Key) -> None:
        slot = self._slots[key]
        if self._keys[slot] is not None:  # of a block that the index gave up without a word
            self._unlink(slot)
        self._keys[slot] = key
        older, younger, end = self._older, self._younger, self._end
        last = older[end]
        younger[last] = older[end] = slot
        older[slot], younger[slot] = last, end

    def on_access(self, key: Key) -> None:
        slot = self._slots[key]
        older, younger, end = self._older, self._younger, self._end
        behind = younger[slot]
        if behind == end:
            return
        before = older[slot]
        younger[before], older[behind] = behind, before
        last = older[end]
        younger[last] = older[end] = slot
        older[slot], younger[slot] = last, end

    def on_remove(self, key: Key) -> None:
        slot = self._slots[key]
        if self._keys[slot] is not None:
            self._unlink(slot)

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        slot = self._oldest(pinned)
        if slot is None:
            return None
        found: Key = self._keys[slot]
        self._unlink(slot)
        return found

    def replace(self, incoming: Key, pinned: Container[Key]) -> Key | None:
        keys, older, younger, end = self._keys, self._older, self._younger, self._end
        slot = younger[end]
        while slot != end and keys[slot] in pinned:  # as _oldest(), without a call a block
            slot = younger[slot]
        if slot == end:
            return None
        found: Key = keys[slot]
        keys[slot] = incoming
        behind = younger[slot]
        if behind != end:
            before = older[slot]
            younger[before], older[behind] = behind, before
            last = older[end]
            younger[last] = older[end] = slot
            older[slot], younger[slot] = last, end
        return found

    def _oldest(self, pinned: Container[Key]) -> int | None:
        keys, younger, end = self._keys, self._younger, self._end
        slot = younger[end]
        while slot != end:
            if keys[slot] not in pinned:
                return slot
            slot = younger[slot]
        return None

    def _unlink(self, slot: int) -> None:
        before, behind = self._older[slot], self._younger[slot]
        self._younger[before], self._older[behind] = behind, before
        self._keys[slot] = None
