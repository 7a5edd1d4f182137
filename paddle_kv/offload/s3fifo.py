"""S3-FIFO: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", ACM SOSP
2023, algorithm 1.

A block enters the small queue (a tenth of the capacity), or the main queue if the ghost queue remembers it. A block at
the end of the small queue moves to the main queue if it was used more than once, else it leaves and is remembered. A
block at the end of the main queue goes round again while its counter (two bits) is above zero.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from typing import Generic

from .policy import Key

SMALL_PART = 10  # the small queue has one part in so many
COUNT_MAX = 3
MOVE_ABOVE = 1  # uses in the small queue that are not yet enough for the main one


class S3Fifo(Generic[Key]):
    """Small, main and ghost FIFO queue for ``capacity_blocks`` resident blocks; the ghost queue is as large as main.

    As in the authors' simulator, a move that makes the main queue too long is made up for by the next eviction, which
    then is from the main queue: each call takes out one block. A pinned block at the end of a queue goes round.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._small_size = max(1, capacity_blocks // SMALL_PART)
        self._ghost_size = capacity_blocks - self._small_size
        self._small: deque[Key] = deque()  # oldest first
        self._main: deque[Key] = deque()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._counts: dict[Key, int] = {}  # of the resident blocks

    def on_insert(self, key: Key) -> None:
        self._counts[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)

    def on_access(self, key: Key) -> None:
        if self._counts[key] < COUNT_MAX:
            self._counts[key] += 1

    def on_remove(self, key: Key) -> None:
        del self._counts[key]
        (self._small if key in self._small else self._main).remove(key)  # linear, and only after a failure

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        if len(self._small) >= self._small_size:
            key = self._from_small(pinned)
            return self._from_main(pinned) if key is None else key
        key = self._from_main(pinned)
        return self._from_small(pinned) if key is None else key

    def _from_small(self, pinned: Container[Key]) -> Key | None:
        for _ in range(len(self._small)):
            key = self._small.popleft()
            if self._counts[key] > MOVE_ABOVE:
                self._main.append(key)
                self._counts[key] = 0
            elif key in pinned:
                self._small.append(key)
            else:
                del self._counts[key]
                self._ghosts[key] = None
                if len(self._ghosts) > self._ghost_size:
                    self._ghosts.popitem(last=False)
                return key
        return None

    def _from_main(self, pinned: Container[Key]) -> Key | None:
        for _ in range((COUNT_MAX + 1) * len(self._main)):
            key = self._main.popleft()
            if self._counts[key] > 0:
                self._counts[key] -= 1
            elif key not in pinned:
                del self._counts[key]
                return key
            self._main.append(key)
        return None
