"""Checksums of host blocks: what a block held when the save that wrote it was over. Changes in a section."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from .domain import BlockDomain

# For each memory: the checksum of a block, or the save in flight that will make it.
stamps: weakref.WeakKeyDictionary[BlockDomain, dict[int, Any]] = weakref.WeakKeyDictionary()


def forget(domain: BlockDomain, block_ids: Iterable[int]) -> None:
    """Somebody else than a transfer may write these blocks of a host pool from now on."""
    of_blocks = stamps.get(domain)
    if of_blocks:
        for block_id in block_ids:
            of_blocks.pop(int(block_id), None)
