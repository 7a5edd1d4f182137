"""Which run each block is of, by the slot of the block: 4 bytes a block."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
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

    def of_slots(self, slots: Iterable[int]) -> Iterator[Run[Key] | None]:
        return map(self._runs.__getitem__, map(self.numbers.__getitem__, slots))

    def slots_of(self, keys: Iterable[Key]) -> list[int]:
        """Up to the first one that is not there."""
        slots = self.slots
        return list(map(slots.__getitem__, takewhile(slots.__contains__, keys)))

    def give(self, slots: Collection[int], run: Run[Key]) -> None:
        """The blocks there, which were of others, are of this run."""
        numbers, number = self.numbers, run.number or self._number(run)
        for slot in slots:
            numbers[slot] = number

    def put(self, key: Key, run: Run[Key]) -> None:
        """It is of this run."""
        slot = self.slots[key]
        self._make_room(slot)
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

    def _make_room(self, slot: int) -> None:
        """For a slot, which may never have been used before."""
        if slot >= len(self.numbers):
            self.numbers = with_room(self.numbers, slot, self._capacity, NOBODY)

    def pop(self, key: Key) -> Run[Key]:
        """KeyError where the block is nobody's."""
        slot = self.slots[key]
        run = self._runs[self.numbers[slot]] if slot < len(self.numbers) else None
        if run is None:
            raise KeyError(key)
        self.numbers[slot] = NOBODY
        return run

    def release(self, run: Run[Key]) -> None:
        """None of the blocks is its own any more, or those that are become another's next."""
        self._free.append(run.number)
        self._runs[run.number] = None
        run.number = NOBODY
