"""What is read in which order: what was asked for first to its end, and the works of one call layer by layer."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar


class Work(Protocol):
    """Objects of a call that are read together.

    Attributes:
        call: its number.
        stage: the one that comes next.
    """

    call: int
    stage: int


_Work = TypeVar("_Work", bound=Work)


class CallOrder(Generic[_Work]):
    """Works that wait. Any thread may call; each call is one of C code."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, _Work]] = []
        self._numbers = itertools.count()
        self._calls = itertools.count(1)

    def new_call(self) -> int:
        """Its number."""
        return next(self._calls)

    def append(self, work: _Work) -> None:
        """It waits for its turn, or again for that of its next stage."""
        heapq.heappush(self._waiting, (work.call, work.stage, next(self._numbers), work))

    def popleft(self) -> _Work:
        """The next one.

        Raises:
            IndexError: none waits.
        """
        return heapq.heappop(self._waiting)[-1]

    def __len__(self) -> int:
        return len(self._waiting)
