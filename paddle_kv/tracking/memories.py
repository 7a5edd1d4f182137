"""Which memory is whose: a pool is identified by the memory that it lies in.

Two pools over the same tensors share one :class:`~paddle_kv.tracking.domain.BlockDomain`, and several schedulers on one
cache are ordered against each other.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .domain import BlockDomain
from .group import change, registry
from .keeper import keeper


@dataclass(frozen=True)
class Extent:
    """Memory of one tensor of a pool: block i starts at start + i * stride_bytes."""

    start: int
    end: int
    stride_bytes: int
    layer: int = -1  # -1: all layers of a block lie together; below: see buffer_as_layer

    @property
    def num_blocks(self) -> int:
        return -(-(self.end - self.start) // self.stride_bytes)


def buffer_as_layer(buffer: int) -> int:
    """How an extent names a buffer that several layers use in turn."""
    return -2 - buffer


def interleaved(extents: Sequence[Extent]) -> list[Extent]:
    """Extents whose blocks lie between each other's, at one stride, as the one that all of them are. Those that share a
    byte stay as they are: :func:`attach` refuses them."""
    found: list[Extent] = []
    for extent in sorted(extents, key=lambda extent: extent.start):
        before = found[-1] if found else None
        if before is not None and extent.start < before.end and extent.stride_bytes == before.stride_bytes:
            blocks_before = (before.end - before.start - 1) // before.stride_bytes  # but the last one
            last = extent.end - blocks_before * extent.stride_bytes
            behind_first = before.end - blocks_before * before.stride_bytes
            if behind_first <= extent.start and last <= before.start + before.stride_bytes:
                found[-1] = Extent(before.start, extent.end, before.stride_bytes)
                continue
        found.append(extent)
    return found


@dataclass
class _Attached:
    domain: BlockDomain
    owners: int = 0


_attached: dict[Extent, _Attached] = {}
_ended: deque[tuple[Extent, ...]] = deque()  # of pools that are gone: garbage collection must not wait for the lock


def attach(owner: object, extents: Sequence[Extent]) -> tuple[BlockDomain, Callable[[], object]]:
    """The domain of the memory that ``owner`` (a pool) lies in, and a call that ends the tie (as the owner's end does).

    Raises:
        ValueError: the memory overlaps that of another pool without having the same blocks and layers, or itself.
    """
    ordered = sorted(extents, key=lambda extent: extent.start)
    for before, after in itertools.pairwise(ordered):
        if before.end > after.start:
            raise ValueError(
                f"the tensors at {before.start:#x} and {after.start:#x} overlap; "
                "each name and layer needs memory of its own"
            )
    attached: tuple[BlockDomain, Callable[[], object]] = keeper.call_here(
        functools.partial(_attach, owner, tuple(extents))
    )
    return attached


def _attach(owner: object, extents: tuple[Extent, ...]) -> tuple[BlockDomain, Callable[[], object]]:
    tensors = tuple(sorted((extent.start, extent.stride_bytes, extent.layer) for extent in extents))
    with registry:
        _forget_the_ended()
        domain = None
        for extent in extents:
            for known, attached in _attached.items():
                if extent.start >= known.end or known.start >= extent.end:
                    continue
                domain = attached.domain
                # A transfer waits for the same layers of another one: both must number them alike.
                if domain.tensors != tensors:
                    raise ValueError(
                        f"the memory at {extent.start:#x} overlaps that of another pool at {known.start:#x}, which has "
                        "other blocks or layers; give both pools the same tensors"
                    )
        domain = domain or BlockDomain(tensors)
        with domain.group.lock:  # it cannot be united with another one meanwhile
            domain.grow(max(extent.num_blocks for extent in extents))
        for extent in extents:
            _attached.setdefault(extent, _Attached(domain)).owners += 1
        end = weakref.finalize(owner, _ended.append, extents)
        end.atexit = False
    return domain, end


def _forget_the_ended() -> None:
    while _ended:
        for extent in _ended.popleft():
            _attached[extent].owners -= 1
            if _attached[extent].owners == 0:
                del _attached[extent]


def check_access(address: int, block_ids: Sequence[int], writing: bool, stream: int | None) -> None:
    """Raises RuntimeError if work on ``stream`` touches blocks of a pool's tensor that a transfer is moving, without
    having waited for it (clause 5 of the contract; the debug mode asks)."""
    for extent, attached in keeper.call_here(_known_memories):
        if extent.start <= address < extent.end:
            first = (address - extent.start) // extent.stride_bytes
            asked = [first + block_id for block_id in block_ids]
            change(attached.domain, functools.partial(_check, attached.domain, extent, asked, writing, stream))


def _known_memories() -> list[tuple[Extent, _Attached]]:
    with registry:
        return list(_attached.items())


def _check(domain: BlockDomain, extent: Extent, asked: Sequence[int], writing: bool, stream: int | None) -> None:
    for block_id, transfer, is_writer in list(domain.users(asked, writing=writing)):
        transfer.look()
        if not transfer.is_ordered_before(stream, extent.layer):
            verb = "writing" if is_writer else "reading"
            where = f"layer {extent.layer}" if extent.layer >= -1 else f"layer buffer {-2 - extent.layer}"
            raise RuntimeError(
                f"block {block_id} of {where} is used while a transfer is {verb} it; "
                "call wait_layer, wait_on or wait of that transfer first"
            )
