"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic

from .policy import Key


class Lru(Generic[Key]):
    """The block whose last use is longest ago goes first."""

    by_order = True

    def __init__(self, capacity_blocks: int = 0) -> None:
        """``capacity_blocks`` is for the other policies' sake: this one needs no capacity."""
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first

    def on_insert(self, key: Key) -> None:
        self._order[key] = None

    def on_access(self, key: Key) -> None:
        self._order.move_to_end(key)

    def on_remove(self, key: Key) -> None:
        del self._order[key]

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        for key in self._order:
            if key not in pinned:
                del self._order[key]
                return key
        return None

    def replace(self, incoming: Key, pinned: Container[Key]) -> Key | None:
        order = self._order
        for key in order:
            if key not in pinned:
                del order[key]
                order[incoming] = None
                return key
        return None
