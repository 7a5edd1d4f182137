"""Which run each block is of, by the slot of the block: 4 bytes a block."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Generic

from .policy import Key
from .run import Run

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

    def of(self, keys: Iterable[Key]) -> Iterator[Run[Key] | None]:
        """:meth:`get` of each, up to the first one that is not there."""
        slots = map(self.slots.__getitem__, takewhile(self.slots.__contains__, keys))
        return map(self._runs.__getitem__, map(self.numbers.__getitem__, slots))

    def give(self, keys: Sequence[Key], run: Run[Key]) -> None:
        """These, which are there, are of this run."""
        self.give_slots(list(map(self.slots.__getitem__, keys)), run)

    def give_slots(self, slots: Collection[int], run: Run[Key]) -> None:
        count = len(self.numbers)
        if (end := 1 + max(slots)) > count:
            end = max(end, min(2 * count, self._capacity))
            self.numbers.extend(array("i", [NOBODY]) * (end - count))
        if run.number == NOBODY:
            if self._free:
                run.number = self._free.pop()
                self._runs[run.number] = run
            else:
                run.number = len(self._runs)
                self._runs.append(run)
        numbers, number = self.numbers, run.number
        for slot in slots:
            numbers[slot] = number

    def pop(self, key: Key) -> Run[Key]:
        """KeyError where the block is nobody's."""
        run = self.get(key)
        if run is None:
            raise KeyError(key)
        self.numbers[self.slots[key]] = NOBODY
        return run

    def release(self, run: Run[Key]) -> None:
        """None of the blocks is its own any more, or those that are become another's next."""
        self._free.append(run.number)
        self._runs[run.number] = None
        run.number = NOBODY
