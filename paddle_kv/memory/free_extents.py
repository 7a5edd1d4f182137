"""Free blocks as extents, so that what is allocated together lies together.

Best fit: a request takes the smallest extent that holds it, from its start. Where none does it takes the largest one
whole and asks again for the rest: the fewest pieces. What is given back merges with its neighbours. Each operation on
an extent searches a sorted list.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class FreeExtents:
    """The free ones of ``num_blocks`` blocks; all of them at first.

    Example:
        >>> free = FreeExtents(10)
        >>> free.allocate(4), free.allocate(2), len(free)
        ([0, 1, 2, 3], [4, 5], 4)
        >>> free.free([2, 1])
        >>> free.allocate(2)  # the hole that fits, not the large extent behind
        [1, 2]
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_free = num_blocks
        self._end_of = {0: num_blocks}  # start of an extent -> its end
        self._start_of = {num_blocks: 0}
        self._by_size = [(num_blocks, 0)]  # (blocks, start), sorted

    def __len__(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks, at most ``len(self)``, ascending."""
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            at = min(bisect.bisect_left(self._by_size, (wanted, 0)), len(self._by_size) - 1)
            size, start = self._by_size[at]
            self._remove(start, start + size)
            if size > wanted:
                self._add(start + wanted, start + size)
            taken.extend(range(start, start + min(size, wanted)))
        self._num_free -= count
        return sorted(taken)

    def free(self, block_ids: Iterable[int]) -> None:
        """Takes blocks back, none of which is free, each once."""
        for start, end in _runs(sorted(block_ids)):
            self._num_free += end - start
            before, behind = self._start_of.get(start), self._end_of.get(end)
            if before is not None:
                self._remove(before, start)
                start = before
            if behind is not None:
                self._remove(end, behind)
                end = behind
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        bisect.insort(self._by_size, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]


def _runs(ascending: list[int]) -> list[tuple[int, int]]:
    """Neighbours as (first, behind the last)."""
    edges = [i for i in range(1, len(ascending)) if ascending[i] != ascending[i - 1] + 1]
    return [
        (ascending[first], ascending[last - 1] + 1)
        for first, last in zip([0, *edges], [*edges, len(ascending)], strict=True)
        if first < last
    ]
