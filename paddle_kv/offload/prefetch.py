"""Blocks that come from a tier into host memory for a request that still waits its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..timeouts import check_timeout
from ..tracking.group import Grouped, wait_until


class Fetching(Protocol):
    """Blocks of it that are asked for together.

    Attributes:
        known: whether it is known which of them came.
    """

    num_blocks: int
    num_arrived: int
    known: bool

    def cancel(self) -> None: ...


class Prefetch:
    """What :meth:`KVOffloadManager.prefetch` has started. It goes on if nobody refers to it.

    Attributes:
        num_blocks: that were asked of the tier.
    """

    def __init__(self, books: Grouped, fetching: Sequence[Fetching]) -> None:
        self.fetching = fetching
        self.num_blocks = sum(one.num_blocks for one in fetching)
        self._books = books

    @property
    def num_arrived(self) -> int:
        """Blocks that have come so far."""
        return sum(one.num_arrived for one in self.fetching)

    @property
    def done(self) -> bool:
        """Whether it is known of all blocks whether they came."""
        return all(one.known for one in self.fetching)

    def cancel(self) -> None:
        """What the storage has not begun is not read any more; what has arrived stays. Behind :meth:`wait` the blocks
        that did not come are in the tier again."""
        for one in self.fetching:
            one.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until :attr:`done`; False if that takes longer than ``timeout_s``.

        Raises:
            TypeError, ValueError: a time that is none.
        """
        check_timeout(timeout_s)
        return bool(wait_until(self._books, lambda: self.done, timeout_s))
