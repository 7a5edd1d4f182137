"""Which host blocks are free."""

from __future__ import annotations

from typing import Protocol


class Slots(Protocol):
    """Gives out host blocks."""

    def take(self, count: int) -> list[int]:
        """Up to so many."""

    def give_back(self, slots: list[int]) -> None:
        """They hold nothing any more."""


class NumberedSlots:
    """The host blocks from 0 on, the same on all ranks; neighbours as long as there are fresh ones."""

    def __init__(self, capacity_blocks: int) -> None:
        self._fresh, self._end = 0, capacity_blocks
        self._used: list[int] = []

    def take(self, count: int) -> list[int]:
        fresh = min(count, self._end - self._fresh)
        self._fresh += fresh
        again = min(count - fresh, len(self._used))
        found = list(range(self._fresh - fresh, self._fresh)) + sorted(self._used[len(self._used) - again :])
        del self._used[len(self._used) - again :]
        return found

    def give_back(self, slots: list[int]) -> None:
        self._used += slots
