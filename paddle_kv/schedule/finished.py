"""Which transfers have ended since somebody last asked, with a descriptor that says that there are some."""

from __future__ import annotations

import contextlib
import os

from ..tracking.group import Grouped, OnItsWay
from .movement import Movement
from .transfer import Transfer


class Finished:
    """Collects from the first question on: until then nobody would take what it keeps. In sections only."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] | None = None
        self._descriptor: int | None = None

    @property
    def collects(self) -> bool:
        """Whether somebody has asked."""
        return self._transfers is not None

    def add(self, movement: Movement) -> None:
        if self._transfers is not None:
            self._transfers.append(movement.handle() or Transfer(movement))
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)

    def take(self, member: Grouped) -> OnItsWay:
        taken, self._transfers = self._transfers or [], []
        if self._descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)
        return OnItsWay(taken, member, self._take_back)

    def _take_back(self, taken: list[Transfer]) -> None:
        self._transfers = [*taken, *(self._transfers or [])]
        if taken and self._descriptor is not None:
            os.eventfd_write(self._descriptor, 1)

    def open_descriptor(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._transfers = self._transfers or []
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
