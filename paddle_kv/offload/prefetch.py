"""Blocks that come from a tier into host memory, ahead of the request that needs them, or for one that runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from ..timeouts import check_timeout
from ..tracking.group import Grouped, wait_until
from ..tracking.keeper import Deadline
from .hints import Expectation


class Fetching(Protocol):
    """Blocks of it that are asked for together.

    Attributes:
        known: whether it is known which of them came.
    """

    num_blocks: int
    num_arrived: int
    known: bool

    def leave(self, user: Prefetch) -> None: ...


class Prefetch:
    """What :meth:`KVOffloadManager.prefetch` has started. It goes on if nobody refers to it.

    Attributes:
        num_blocks: that were asked of the tier, or are to be.
    """

    def __init__(
        self,
        books: Grouped,
        fetching: Sequence[Fetching] = (),
        waiting: Sequence[bytes] = (),
        timeout_s: float = 0.0,
        deadline: Deadline | None = None,
        prefix: Sequence[bytes] = (),
        expectation: Expectation[bytes] | None = None,
    ) -> None:
        """``waiting``: keys of what is not asked for yet, in order; ``timeout_s``: of each part, from when it is;
        ``deadline``: of all, instead; ``prefix``: all keys, in order: one is of use only behind those before it;
        ``expectation``: it is read for that, the last blocks first."""
        self.fetching = list(fetching)
        self.waiting = list(waiting)  # changed in sections only, and never in place
        self.prefix, self.expectation = list(prefix), expectation
        self.beside: list[Fetching] = []  # what others had asked the tier for of it; changed in sections only
        self.num_blocks = sum(one.num_blocks for one in fetching) + len(waiting)
        self.num_found = 0  # that somebody else had brought when their turn came
        self.blocks_until = 0  # that the tier reads until all is there, with those before
        self.cancelled = False
        self._books = books
        self._timeout_s, self._deadline = timeout_s, deadline or Deadline(None)
        self._process_id = os.getpid()

    @property
    def num_arrived(self) -> int:
        """Blocks that have come so far."""
        return self.num_found + sum(one.num_arrived for one in self.fetching)

    @property
    def done(self) -> bool:
        """Whether it is known of all blocks whether they came: also of those that others had asked the tier for,
        unless it was cancelled, or its time is over."""
        over = self.cancelled or self._deadline.over
        asked = self.fetching if over else [*self.fetching, *self.beside]
        return not self.waits and all(one.known for one in asked)

    @property
    def waits(self) -> bool:
        """Whether more of it is to be asked of the tier. A forked child asks nothing."""
        return bool(self.waiting and not self.cancelled and not self._deadline.over and self._process_id == os.getpid())

    @property
    def is_expected(self) -> bool:
        """Whether it is read for a prompt that may still come, and waits for room as long as it has to."""
        return self.expectation is not None and (self.expectation.released or not self.expectation.over)

    def first_of(self, keys: list[bytes], most: int) -> list[bytes]:
        """Those of the blocks that are asked for first, at most so many; in order."""
        return keys[:most] if self.expectation is None else keys[max(0, len(keys) - most) :]

    def left_behind(self, part: Sequence[bytes]) -> list[bytes]:
        """What waits, without a part of it that was asked for first."""
        waiting, count = self.waiting, len(part)
        return waiting[count:] if self.expectation is None else waiting[: len(waiting) - count]

    @property
    def left_s(self) -> float:
        """For a part that is asked for now."""
        left_s = self._deadline.left_s()
        return self._timeout_s if left_s is None else left_s

    def cancel(self) -> None:
        """What the tier was not asked for yet is not read any more, and stays there. What it was asked for is a small
        part, which comes: behind :meth:`wait` all that did not come is in the tier again."""
        self.cancelled = True
        for one in list(self.fetching):
            one.leave(self)
        self._books.group.notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until :attr:`done`; False if that takes longer than ``timeout_s``.

        Raises:
            TypeError, ValueError: a time that is none.
        """
        check_timeout(timeout_s)
        deadline, own_s = Deadline(timeout_s), self._deadline.left_s()
        if own_s is not None:  # nobody is told when the time of what waits is over
            first_s = own_s if timeout_s is None else min(own_s, timeout_s)
            if wait_until(self._books, lambda: self.done, first_s):
                return True
        return bool(wait_until(self._books, lambda: self.done, deadline.left_s()))
