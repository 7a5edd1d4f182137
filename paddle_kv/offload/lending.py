"""Keeps a lender told of what is in the host memory of a manager. In sections."""

from __future__ import annotations

from collections.abc import Sequence

from ..tiers.neighbours import Lender
from ..tiers.neighbours.lent import Pins
from ..tiers.object_format import MOST_KEY_BYTES
from .index import BlockIndex
from .jobs import HOST


class Lending:
    """Args:
    lender: of nobody else.
    index: of the blocks.
    pins: keeps those of them that are read.
    """

    def __init__(self, lender: Lender, index: BlockIndex[bytes], pins: Pins) -> None:
        self._lender, self._index = lender, index
        lender.begin(pins)

    def heard(self, kind: str, tier: str, keys: Sequence[bytes]) -> None:
        """What has come or gone."""
        if tier != HOST:
            return
        if kind == "stored":
            slots = self._index.slots
            named = [key for key in keys if 0 < len(key) <= MOST_KEY_BYTES]  # others fit into no header
            self._lender.stored(named, [slots[key] for key in named])
        elif kind == "removed":
            self._lender.removed(keys)
        else:
            self._lender.cleared()

    def end(self) -> None:
        """Nothing is there any more."""
        self._lender.end()
