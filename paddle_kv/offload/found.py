"""What a directory answers: where blocks are, and those that a look-up has found, held against eviction."""

from __future__ import annotations

import enum
from types import TracebackType

from .index import BlockIndex


class BlockState(enum.Enum):
    """Where a block is: all of it in host memory on all ranks; on its way there; in a tier below; nowhere."""

    PRESENT = "present"
    ARRIVING = "arriving"
    TIER = "tier"
    ABSENT = "absent"


class Found:
    """The prefix that :meth:`Directory.lookup` has found, held against eviction until :meth:`release`.

    Attributes:
        keys: of it.
        num_arriving: so many more, right behind them, are there when the jobs that bring them are over.
    """

    def __init__(self, index: BlockIndex[bytes], keys: list[bytes], num_arriving: int) -> None:
        self.keys = keys
        self.num_arriving = num_arriving
        self._index: BlockIndex[bytes] | None = index

    def release(self) -> None:
        """The blocks may be evicted again. Again: does nothing."""
        if self._index is not None:
            index, self._index = self._index, None
            index.unpin(self.keys)

    def __enter__(self) -> Found:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
