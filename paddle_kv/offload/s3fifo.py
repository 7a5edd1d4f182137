"""S3-FIFO: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", ACM SOSP
2023, algorithm 1.

A block enters the small queue (a tenth of the capacity), or the main queue if the ghost queue remembers it. A block at
the end of the small queue moves to the main queue if it was used more than once, else it leaves and is remembered. A
block at the end of the main queue goes round again while its counter (two bits) is above zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Generic

from .policy import Key

SMALL_PART = 10  # the small queue has one part in so many
COUNT_MAX = 3
MOVE_ABOVE = 1  # uses in the small queue that are not yet enough for the main one
GHOST = -1  # in the place of a count: not resident, but remembered


class S3Fifo(Generic[Key]):
    """Small, main and ghost FIFO queue for ``capacity_blocks`` resident blocks; the ghost queue is as large as main.

    As in the authors' simulator, a move that makes the main queue too long is made up for by the next eviction, which
    then is from the main queue: each call takes out one block. A pinned block at the end of a queue goes round.

    A ghost that comes back leaves the ghost queue from its middle. Its entry stays there and is void: a deque with a
    few void entries takes half the time of an OrderedDict.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._small_size = max(1, capacity_blocks // SMALL_PART)
        self._ghost_size = capacity_blocks - self._small_size
        self._small: deque[Key] = deque()  # oldest first
        self._main: deque[Key] = deque()
        self._ghosts: deque[Key] = deque()
        self._void: dict[Key, int] = {}  # how many entries of a block in the ghost queue, the first ones, are void
        self._num_ghosts = 0  # entries that are not
        self._counts: dict[Key, int] = {}  # uses of the resident blocks; GHOST

    def on_insert(self, key: Key) -> None:
        if key in self._counts:
            self._main.append(key)
            self._leave_ghosts(key)
        else:
            self._small.append(key)
        self._counts[key] = 0

    def on_access(self, key: Key) -> None:
        count = self._counts[key]
        if count < COUNT_MAX:
            self._counts[key] = count + 1

    def on_remove(self, key: Key) -> None:
        if self._counts[key] == GHOST:
            raise KeyError(key)
        del self._counts[key]
        (self._small if key in self._small else self._main).remove(key)  # linear, and only after a failure

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        if len(self._small) >= self._small_size:
            key = self._from_small(pinned)
            return self._from_main(pinned) if key is None else key
        key = self._from_main(pinned)
        return self._from_small(pinned) if key is None else key

    def replace(self, incoming: Key, pinned: Container[Key]) -> Key | None:
        if len(self._small) < self._small_size or incoming in self._counts:
            key = self.victim(incoming, pinned)
            if key is not None:
                self.on_insert(incoming)
            return key
        # Most blocks of a busy cache: one that nothing remembers comes into the small queue for one of that queue.
        key = self._from_small(pinned)
        if key is None:
            key = self._from_main(pinned)
        if key is not None:
            self._small.append(incoming)
            self._counts[incoming] = 0
        return key

    def _from_small(self, pinned: Container[Key]) -> Key | None:
        small, counts = self._small, self._counts
        for _ in range(len(small)):
            key = small.popleft()
            if counts[key] > MOVE_ABOVE:
                self._main.append(key)
                counts[key] = 0
            elif key in pinned:
                small.append(key)
            else:
                counts[key] = GHOST
                ghosts = self._ghosts
                ghosts.append(key)
                if self._num_ghosts < self._ghost_size:
                    self._num_ghosts += 1
                    return key
                oldest, void = ghosts.popleft(), self._void
                while oldest in void:
                    self._drop_void(oldest)
                    oldest = ghosts.popleft()
                del counts[oldest]
                return key
        return None

    def _from_main(self, pinned: Container[Key]) -> Key | None:
        main, counts = self._main, self._counts
        for _ in range((COUNT_MAX + 1) * len(main)):
            key = main.popleft()
            count = counts[key]
            if count > 0:
                counts[key] = count - 1
            elif key not in pinned:
                del counts[key]
                return key
            main.append(key)
        return None

    def _leave_ghosts(self, key: Key) -> None:
        self._num_ghosts -= 1
        self._void[key] = self._void.get(key, 0) + 1
        if len(self._ghosts) > 2 * self._ghost_size:  # more void entries than others
            entries, self._ghosts = self._ghosts, deque()
            for entry in entries:
                if entry in self._void:
                    self._drop_void(entry)
                else:
                    self._ghosts.append(entry)

    def _drop_void(self, key: Key) -> None:
        if self._void[key] == 1:
            del self._void[key]
        else:
            self._void[key] -= 1
