"""Which run each block is of, by the slot of the block: 4 bytes a block."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Generic

from .policy import Key
from .run import Run
from .slot_numbers import with_room

NOBODY = 0


class Owners(Generic[Key]):
    """Of the blocks that are there. A block that leaves its slot is taken out before, or its slot is another's next.

    Args:
        capacity_blocks: how many there can be.

    Attributes:
        slots: block -> slot, of the index.
        numbers: slot -> that of the run, or ``NOBODY``.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self.slots: Mapping[Key, int] = {}
        self.numbers = array("i")
        self._runs: list[Run[Key] | None] = [None]  # by number
        self._free: list[int] = []  # numbers

    def attach(self, slots: Mapping[Key, int]) -> None:
        """The index says where it keeps its slots."""
        self.slots = slots

    def get(self, key: Key) -> Run[Key] | None:
        slot = self.slots.get(key)
        return None if slot is None or slot >= len(self.numbers) else self._runs[self.numbers[slot]]

    def along(self, path: Sequence[Key]) -> tuple[list[int], list[tuple[Run[Key], int]]]:
        """The slots of its blocks up to the first one that is not there, or is nobody's; and whose the blocks are, one
        run after the other: so many each."""
        there = self.slots
        if path[0] not in there:
            return [], []
        slots = list(map(there.__getitem__, takewhile(there.__contains__, path)))
        parts: list[tuple[Run[Key], int]] = []
        for number, same in groupby(map(self.numbers.__getitem__, slots)):
            run = self._runs[number]
            if run is None:
                del slots[sum(count for _, count in parts) :]
                break
            parts.append((run, len(list(same))))
        return slots, parts

    def of_slots(self, slots: Iterable[int]) -> Iterator[Run[Key] | None]:
        return map(self._runs.__getitem__, map(self.numbers.__getitem__, slots))

    def slots_of(self, keys: Iterable[Key]) -> list[int]:
        """Up to the first one that is not there."""
        slots = self.slots
        return list(map(slots.__getitem__, takewhile(slots.__contains__, keys)))

    def last(self, run: Run[Key]) -> Key:
        """Of its blocks that are there, the last one."""
        keys, end, number = run.keys, run.end, run.number
        slot_of, numbers = self.slots.get, self.numbers
        while (slot := slot_of(keys[end - 1])) is None or numbers[slot] != number:
            end -= 1
        run.end = end
        return keys[end - 1]

    def give(self, slots: Collection[int], run: Run[Key]) -> None:
        """The blocks there, which were of others, are of this run."""
        numbers, number = self.numbers, run.number or self._number(run)
        for slot in slots:
            numbers[slot] = number

    def put(self, slot: int, run: Run[Key]) -> None:
        """The block there is of this run."""
        if slot >= len(self.numbers):  # was never used before
            self.numbers = with_room(self.numbers, slot, self._capacity, NOBODY)
        self.numbers[slot] = run.number or self._number(run)

    def _number(self, run: Run[Key]) -> int:
        """One for a run that has none."""
        if self._free:
            run.number = self._free.pop()
            self._runs[run.number] = run
        else:
            run.number = len(self._runs)
            self._runs.append(run)
        return run.number

    def release(self, run: Run[Key]) -> None:
        """None of the blocks is its own any more, or those that are become another's next."""
        self._free.append(run.number)
        self._runs[run.number] = None
        run.number = NOBODY
