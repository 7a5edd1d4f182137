"""Who is in a call for which a scheduler has to stay as it is, told by references: an exception ends a use too."""

from __future__ import annotations

from ..tracking.domain import BlockDomain
from ..tracking.group import MemoryGroup


def notify(domain: BlockDomain) -> None:
    domain.group.notify()


class Use:
    """One thread in a call that needs the scheduler open, or that closes it; ends with the call, however that ends."""

    _group: MemoryGroup | None = None  # a signal may come before there is one

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group

    def __del__(self) -> None:
        if self._group is not None:
            self._group.notify()
