"""In which order those who share a link or a tier come: earliest need first, urgent before bulk, saves where nothing
else waits. A plain queue: whoever owns the link takes the next piece from it when the link is free.

A piece is what one call of an engine moves, so a load is held up by no more than the one piece that is under way.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T")


class Urgency(enum.IntEnum):
    """``URGENT``: the model comes to it next; ``BULK``: it is for a request that waits its turn, or asks how quick a
    source is; ``SAVE``: nobody waits for it."""

    URGENT = 0
    BULK = 1
    SAVE = 2


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """What one call of an engine moves; ``what`` is the caller's."""

    what: T
    num_bytes: int
    urgency: Urgency
    needed_s: float


class LinkQueue(Generic[T]):
    """
    Args:
        most_bytes: that wait at the same time. Saves are dropped for loads that have no room, the latest ones first,
            and a save that has none is not taken; a load always is.

    Example:
        >>> from paddle_kv.testing.prefixes.link_queue import LinkQueue, Urgency
        >>> queue = LinkQueue(most_bytes=100)
        >>> queue.add("save", 60, Urgency.SAVE)
        []
        >>> queue.add("layer 1", 20, Urgency.URGENT, needed_s=2.0)
        []
        >>> queue.add("layer 0", 40, Urgency.URGENT, needed_s=1.0)
        ['save']
        >>> queue.take(), queue.take(), queue.take()
        ('layer 0', 'layer 1', None)
    """

    def __init__(self, most_bytes: int) -> None:
        if not isinstance(most_bytes, int) or most_bytes < 1:
            raise ValueError(f"most_bytes = {most_bytes!r} must be an integer of at least 1")
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._loads: list[tuple[Urgency, float, int, Piece[T]]] = []
        self._saves: deque[Piece[T]] = deque()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._loads) + len(self._saves)

    def add(self, what: T, num_bytes: int, urgency: Urgency, needed_s: float = 0.0) -> list[T]:
        """Takes a piece in; returns what was dropped for it, itself perhaps. ``needed_s``: when the model comes to it;
        of equal ones the one that came first is first."""
        piece = Piece(what, num_bytes, urgency, needed_s)
        if urgency is Urgency.SAVE:
            if self.num_bytes + num_bytes > self.most_bytes:
                return [what]
            self._saves.append(piece)
        else:
            heapq.heappush(self._loads, (urgency, needed_s, next(self._numbers), piece))
        self.num_bytes += num_bytes
        dropped = []
        while self.num_bytes > self.most_bytes and self._saves:
            save = self._saves.pop()
            self.num_bytes -= save.num_bytes
            dropped.append(save.what)
        return dropped

    def hurry(self, wanted: Callable[[T], bool]) -> None:
        """Loads in bulk for which this is true are urgent from now on."""
        self._loads = [
            (Urgency.URGENT, needed_s, number, replace(piece, urgency=Urgency.URGENT))
            if urgency is Urgency.BULK and wanted(piece.what)
            else (urgency, needed_s, number, piece)
            for urgency, needed_s, number, piece in self._loads
        ]
        heapq.heapify(self._loads)

    def loads(self) -> list[T]:
        """As they go, if none is added."""
        return [piece.what for *_, piece in sorted(self._loads)]

    def take(self) -> T | None:
        """What goes next; None if nothing waits."""
        if self._loads:
            piece = heapq.heappop(self._loads)[3]
        elif self._saves:
            piece = self._saves.popleft()
        else:
            return None
        self.num_bytes -= piece.num_bytes
        return piece.what
