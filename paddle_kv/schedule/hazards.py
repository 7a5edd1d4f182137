"""Which transfer has to run after which: hazard tracking per block, over all pools of the process.

A pool is identified by the memory that it lies in, so two pools over the same tensors share one :class:`BlockDomain`,
and several schedulers on one cache are ordered against each other. For each block the domain keeps the last transfer
that writes it and the transfers that read it since; a new transfer depends on

* the writer of a block that it reads (read after write),
* the writer and the readers of a block that it writes (write after write, write after read).

Blocks whose last writer failed or was cancelled are *poisoned*: reading them raises until they have been rewritten.
Leases keep transfers away from blocks that the host is using.

One lock guards all of this (``lock``, with the condition ``changed``), because dependencies cross schedulers and
threads. Nothing here knows Paddle, CuPy or a device.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import TransferError

lock = threading.RLock()
changed = threading.Condition(lock)


class Tracked(Protocol):
    """What the tracker needs of a transfer."""

    @property
    def failed(self) -> bool:
        """Whether it is known that its targets are not written completely."""

    def poll(self) -> None:
        """Look at the device; release the blocks if the transfer is over."""

    def abandon(self) -> None:
        """The process has forked and this is the child: nothing moves here any more. Ends as failed."""

    def is_ordered_before(self, stream: int | None, layer: int) -> bool:
        """Whether work on the stream waits for this layer."""


@dataclass
class _Slot:
    writer: Tracked | None = None
    readers: list[Tracked] = field(default_factory=list)
    read_leases: int = 0
    write_lease: bool = False

    @property
    def in_flight(self) -> bool:
        return self.writer is not None or bool(self.readers)

    @property
    def unused(self) -> bool:
        return not self.in_flight and not self.read_leases and not self.write_lease


class BlockDomain:
    """The blocks of one memory, shared by all pools that lie in it.

    Attributes:
        tensors: start, stride and layer of each tensor of the pools.
    """

    def __init__(self, tensors: Sequence[tuple[int, int, int]] = ()) -> None:
        self.tensors = tuple(tensors)
        self._slots: dict[int, _Slot] = {}
        self._poison: dict[int, TransferError] = {}

    def is_busy(self, block_id: int) -> bool:
        """Whether a transfer or a lease holds the block."""
        return block_id in self._slots

    def poisoned(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks whose content is not usable."""
        return [block_id for block_id in block_ids if block_id in self._poison]

    def mark_rewritten(self, block_ids: Iterable[int]) -> None:
        """The blocks hold usable data again: somebody other than a transfer has rewritten them."""
        with lock:
            for block_id in block_ids:
                self._poison.pop(block_id, None)

    # ---- transfers ----
    def check(self, block_ids: Sequence[int], pool: str, *, writing: bool) -> None:
        """Raises where a lease forbids the access, or a poisoned block would be read."""
        for block_id in block_ids:
            slot = self._slots.get(block_id)
            if slot is not None and (slot.write_lease or (writing and slot.read_leases)):
                raise RuntimeError(
                    f"block {block_id} of the {pool} is leased; release the lease before moving the block"
                )
            rewriter = slot.writer if slot is not None else None
            if not writing and block_id in self._poison and (rewriter is None or rewriter.failed):
                raise TransferError(
                    f"block {block_id} of the {pool} holds no usable data ({self._poison[block_id]}); rewrite it first",
                    block_ids=self.poisoned(block_ids),
                )

    def read(self, block_ids: Sequence[int], transfer: Tracked) -> set[Tracked]:
        """Notes the reads; returns the transfers whose result is read."""
        writers: set[Tracked] = set()
        for block_id in block_ids:
            slot = self._slots.setdefault(block_id, _Slot())
            if slot.writer is not None:
                writers.add(slot.writer)
            if not slot.readers or slot.readers[-1] is not transfer:  # one source may have many targets
                slot.readers.append(transfer)
        return writers

    def write(self, block_ids: Sequence[int], transfer: Tracked) -> set[Tracked]:
        """Notes the writes; returns the transfers that must be over first."""
        before: set[Tracked] = set()
        for block_id in block_ids:
            slot = self._slots.setdefault(block_id, _Slot())
            if slot.writer is not None:
                before.add(slot.writer)
            before.update(slot.readers)
            slot.writer, slot.readers = transfer, []
        return before

    def poison(self, block_ids: Sequence[int], transfer: Tracked, error: TransferError) -> None:
        """The transfer will not write these blocks. Blocks that a later transfer rewrites are left to that one."""
        for block_id in block_ids:
            slot = self._slots.get(block_id)
            if slot is not None and slot.writer is transfer:
                self._poison[block_id] = error

    def release(self, block_ids: Sequence[int], transfer: Tracked, *, written: bool) -> None:
        """The transfer is over. ``written``: it has rewritten the blocks completely."""
        for block_id in block_ids:
            slot = self._slots.get(block_id)
            if slot is None:
                continue
            if slot.writer is transfer:
                slot.writer = None
                if written:
                    self._poison.pop(block_id, None)
            elif transfer in slot.readers:
                slot.readers.remove(transfer)
            if slot.unused:
                del self._slots[block_id]

    # ---- leases ----
    def try_lease(self, block_ids: Sequence[int], *, write: bool) -> bool:
        """Takes the lease, unless a transfer or another lease conflicts with it."""
        for block_id in block_ids:
            slot = self._slots.get(block_id)
            if slot is None:
                continue
            if slot.writer is not None or slot.write_lease or (write and (slot.readers or slot.read_leases)):
                return False
        for block_id in block_ids:
            slot = self._slots.setdefault(block_id, _Slot())
            if write:
                slot.write_lease = True
            else:
                slot.read_leases += 1
        return True

    def end_lease(self, block_ids: Sequence[int], *, write: bool) -> None:
        for block_id in block_ids:
            slot = self._slots[block_id]
            if write:
                slot.write_lease = False
            else:
                slot.read_leases -= 1
            if slot.unused:
                del self._slots[block_id]


@dataclass(frozen=True)
class Extent:
    """Memory of one tensor of a pool: block i starts at start + i * stride_bytes."""

    start: int
    end: int
    stride_bytes: int
    layer: int = -1  # -1: all layers of a block lie together


_in_flight: dict[Tracked, None] = {}  # in order of submission; also what keeps the memory of a transfer alive


@dataclass
class _Attached:
    domain: BlockDomain
    owners: int = 0


_attached: dict[Extent, _Attached] = {}


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
    tensors = [(extent.start, extent.stride_bytes, extent.layer) for extent in extents]
    with lock:
        domain = None
        for extent in extents:
            for known, attached in _attached.copy().items():  # list(): garbage collection half way may detach a pool
                if extent.start >= known.end or known.start >= extent.end:
                    continue
                domain = attached.domain
                # A transfer waits for the same layers of another one: both must number them alike.
                if domain.tensors != tuple(tensors):
                    raise ValueError(
                        f"the memory at {extent.start:#x} overlaps that of another pool at {known.start:#x}, which has "
                        "other blocks or layers; give both pools the same tensors"
                    )
        domain = domain or BlockDomain(tensors)
        for extent in extents:
            _attached.setdefault(extent, _Attached(domain)).owners += 1
    end = weakref.finalize(owner, _detach, tuple(extents))
    end.atexit = False
    return domain, end


def _detach(extents: Sequence[Extent]) -> None:
    with lock:
        for extent in extents:
            _attached[extent].owners -= 1
            if _attached[extent].owners == 0:
                del _attached[extent]


def check_access(address: int, block_ids: Sequence[int], writing: bool, stream: int | None) -> None:
    """Raises RuntimeError if work on ``stream`` touches blocks of a pool's tensor that a transfer is moving, without
    having waited for it (clause 5 of the contract; the debug mode asks)."""
    with lock:
        for extent, attached in _attached.copy().items():  # list(): garbage collection half way may detach a pool
            if not extent.start <= address < extent.end:
                continue
            first = (address - extent.start) // extent.stride_bytes
            for block_id in block_ids:
                slot = attached.domain._slots.get(first + block_id)
                if slot is None:
                    continue
                for transfer in [*([slot.writer] if slot.writer else []), *(slot.readers if writing else [])]:
                    transfer.poll()
                    if not transfer.is_ordered_before(stream, extent.layer):
                        verb = "writing" if transfer is slot.writer else "reading"
                        raise RuntimeError(
                            f"block {first + block_id} of layer {extent.layer} is used while a transfer is {verb} it; "
                            "call wait_layer, wait_on or wait of that transfer first"
                        )


def add_in_flight(transfer: Tracked) -> None:
    _in_flight[transfer] = None


def remove_in_flight(transfer: Tracked) -> None:
    _in_flight.pop(transfer, None)


def in_flight() -> list[Tracked]:
    """All transfers of the process that are not over, in order of submission."""
    return list(_in_flight)


def collect() -> None:
    """Looks at all transfers in flight and releases the blocks of those that are over."""
    with lock:
        for transfer in in_flight():
            transfer.poll()


def _after_fork_in_child() -> None:
    # Another thread may have held the lock, and the threads that would end the transfers are not here.
    global lock, changed
    lock = threading.RLock()
    changed = threading.Condition(lock)
    with lock:
        for transfer in reversed(in_flight()):  # none must be seen as ready by an earlier one that ends
            transfer.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
