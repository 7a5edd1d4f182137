"""What a directory answers: where blocks are, and those that a look-up has found, held against eviction."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from types import TracebackType
from typing import NoReturn

from .index import BlockIndex


class BlockState(enum.Enum):
    """Where a block is: all of it in host memory on all ranks; on its way there; in a tier below; nowhere."""

    PRESENT = "present"
    ARRIVING = "arriving"
    TIER = "tier"
    ABSENT = "absent"


class Found:
    """The prefix that :meth:`Directory.lookup` has found, held against eviction until :meth:`release`, or until nobody
    refers to it any more. It cannot be pickled or copied: send its keys.

    Attributes:
        keys: of it.
        num_arriving: so many more, right behind them, are there when the jobs that bring them are over.
    """

    def __init__(self, holds: Holds, keys: list[bytes], num_arriving: int) -> None:
        self.keys = keys
        self.num_arriving = num_arriving
        self._holds = holds
        self._hold = holds.begin(self, keys) if keys else None

    def release(self) -> None:
        """The blocks may be evicted again. Again: does nothing."""
        hold, self._hold = self._hold, None  # so that it does not say later that nobody refers to the look-up
        if hold is not None:
            self._holds.end(hold)

    def hand_over(self) -> list[bytes]:
        """The keys; to let go of the blocks is the caller's from now on."""
        hold, self._hold = self._hold, None
        if hold is not None:
            self._holds.forget(hold)
        return self.keys

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Found cannot be pickled or copied: it holds blocks in this process; send its keys")

    def __enter__(self) -> Found:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hold is not None:
            self.release()


class _Hold(weakref.ref):  # type: ignore[type-arg]
    """Says that nobody refers to a look-up any more: by C code alone, whatever thread it happens in."""

    __slots__ = ("keys",)
    keys: tuple[bytes, ...]  # not the list, which is the caller's

    __hash__ = object.__hash__  # that of what it referred to is gone with it


class Holds:
    """What look-ups hold. The thread of the index gives back what was lost, when it comes by.

    Attributes:
        lost: of look-ups to which nobody refers any more.
    """

    def __init__(self, index: BlockIndex[bytes]) -> None:
        self._index = index
        self._all: set[_Hold] = set()
        self.lost: deque[_Hold] = deque()

    def begin(self, found: Found, keys: list[bytes]) -> _Hold:
        hold = _Hold(found, self.lost.append)
        hold.keys = tuple(keys)
        self._index.pin(keys)
        self._all.add(hold)
        return hold

    def end(self, hold: _Hold) -> None:
        """Again: does nothing."""
        if hold in self._all:
            self._all.discard(hold)
            self._index.unpin(hold.keys)

    def forget(self, hold: _Hold) -> None:
        self._all.discard(hold)

    def end_lost(self) -> None:
        while self.lost:
            self.end(self.lost.popleft())
