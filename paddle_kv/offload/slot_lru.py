"""Least recently used, by slot: a list linked through two arrays, 16 bytes a block beside the index."""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping, Sequence
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
        self._make_youngest(slot, slot)

    def on_use(self, keys: Sequence[Key]) -> None:
        """:meth:`on_access` of each, the last one first."""
        self._make_all_youngest([*map(self._slots.__getitem__, reversed(keys))])

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

    def replace_all(self, incoming: Sequence[Key], pinned: Container[Key]) -> list[Key]:
        """:meth:`victim` and :meth:`on_insert` for as many of the first of these as there are victims. A block gets the
        slot of its victim."""
        keys, younger, end = self._keys, self._younger, self._end
        found: list[int] = []
        slot = younger[end]
        for _ in incoming:
            while slot != end and keys[slot] in pinned:
                slot = younger[slot]
            if slot == end:
                break
            found.append(slot)
            slot = younger[slot]
        victims = [*map(keys.__getitem__, found)]
        for slot, key in zip(found, incoming, strict=False):
            keys[slot] = key
        self._make_all_youngest(found)
        return victims

    def _oldest(self, pinned: Container[Key]) -> int | None:
        keys, younger, end = self._keys, self._younger, self._end
        slot = younger[end]
        while slot != end:
            if keys[slot] not in pinned:
                return slot
            slot = younger[slot]
        return None

    def _make_all_youngest(self, slots: list[int]) -> None:
        """One after the other; those that are neighbours already stay so."""
        if not slots:
            return
        younger = self._younger
        first = last = slots[0]
        for slot in slots[1:]:
            if younger[last] != slot:
                self._make_youngest(first, last)
                first = slot
            last = slot
        self._make_youngest(first, last)

    def _make_youngest(self, first: int, last: int) -> None:
        """These neighbours."""
        older, younger, end = self._older, self._younger, self._end
        behind = younger[last]
        if behind == end:
            return
        before = older[first]
        younger[before], older[behind] = behind, before
        youngest = older[end]
        younger[youngest], older[first] = first, youngest
        younger[last], older[end] = end, last

    def _unlink(self, slot: int) -> None:
        before, behind = self._older[slot], self._younger[slot]
        self._younger[before], self._older[behind] = behind, before
        self._keys[slot] = None
