"""S3-FIFO: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", ACM SOSP
2023, algorithm 1.

A block enters the small queue (a tenth of the capacity), or the main queue if the ghost queue remembers it. A block at
the end of the small queue moves to the main queue if it was used more than once, else it leaves and is remembered. A
block at the end of the main queue goes round again while its counter (two bits) is above zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
        self._small: OrderedDict[Key, None] = OrderedDict()  # oldest first
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._counts: dict[Key, int] = {}  # of the resident blocks

    def on_insert(self, key: Key) -> None:
        self._counts[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def on_access(self, key: Key) -> None:
        if self._counts[key] < COUNT_MAX:
            self._counts[key] += 1

    def on_remove(self, key: Key) -> None:
        del self._counts[key]
        del (self._small if key in self._small else self._main)[key]

    def victim(self, incoming: Key | None, is_pinned: Callable[[Key], bool]) -> Key | None:
        queues = [self._from_small, self._from_main]
        if len(self._small) < self._small_size:
            queues.reverse()
        for take in queues:
            key = take(is_pinned)
            if key is not None:
                del self._counts[key]
                return key
        return None

    def _from_small(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        for _ in range(len(self._small)):
            key, _ = self._small.popitem(last=False)
            if self._counts[key] > MOVE_ABOVE:
                self._main[key] = None
                self._counts[key] = 0
            elif is_pinned(key):
                self._small[key] = None
            else:
                self._remember(key)
                return key
        return None

    def _from_main(self, is_pinned: Callable[[Key], bool]) -> Key | None:
        for _ in range((COUNT_MAX + 1) * len(self._main)):
            key, _ = self._main.popitem(last=False)
            if self._counts[key] > 0:
                self._counts[key] -= 1
            elif not is_pinned(key):
                return key
            self._main[key] = None
        return None

    def _remember(self, key: Key) -> None:
        if not self._ghost_size:
            return
        if len(self._ghosts) >= self._ghost_size:
            self._ghosts.popitem(last=False)
        self._ghosts[key] = None
