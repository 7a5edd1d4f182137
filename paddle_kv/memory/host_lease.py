"""A hold of the host on blocks of a pool, which ends once."""

from __future__ import annotations

import functools
import os
import threading
import weakref

from ..tracking import stamps
from ..tracking.domain import BlockDomain
from ..tracking.group import Guard


class Lease:
    """Ends once, at the latest with the last reference to it: an exception of a signal handler may come at any time."""

    def __init__(self, domain: BlockDomain, ids: list[int], write: bool, thread: int) -> None:
        self.thread = thread  # whose it is
        self._domain = domain
        self._ids = ids
        self._write = write
        self._ended = False
        _leases.add(self)
        self.guard()

    def guard(self) -> None:
        end = functools.partial(_end, self._domain, self._ids, self._write)
        self._guard = Guard.over(self, self._domain, end)

    def end(self) -> None:
        """In a section."""
        if not self._ended:
            self._ended = True
            self._guard.cancel()
            _end(self._domain, self._ids, self._write)


def _end(domain: BlockDomain, ids: list[int], write: bool) -> None:
    domain.end_lease(ids, write=write)
    if write:
        stamps.forget(domain, ids)
    domain.group.notify()


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _end_those_of_lost_threads() -> None:
    """In a forked child, where only the forking thread goes on: nobody would end the leases of the others."""
    for lease in list(_leases):
        if lease.thread != threading.get_ident():
            lease.end()
        else:
            lease.guard()  # its own was cancelled


os.register_at_fork(after_in_child=_end_those_of_lost_threads)
