"""Which transfer has to run after which: hazard tracking per block, over all pools of the process.

A pool is identified by the memory that it lies in, so two pools over the same tensors share one :class:`BlockDomain`,
and several schedulers on one cache are ordered against each other. The domain knows of each block the last transfer
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from ..errors import TransferError

Ids: TypeAlias = np.ndarray  # int64

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


@dataclass(eq=False)
class _Lease:
    ids: Ids
    write: bool


class BlockDomain:
    """The blocks of one memory, shared by all pools that lie in it.

    Each transfer and each lease holds blocks. How many hold a block is also counted, in an array: where nobody holds
    any block of a call, which is the rule, nobody's blocks are looked at.

    Attributes:
        tensors: start, stride and layer of each tensor of the pools.
    """

    def __init__(self, tensors: Sequence[tuple[int, int, int]] = ()) -> None:
        self.tensors = tuple(tensors)
        self._holders = np.zeros(0, np.int32)  # of each block up to the largest that was ever held
        self._writes: dict[Tracked, Ids] = {}  # those of which it is the last writer
        self._reads: dict[Tracked, Ids] = {}  # those that it reads and nobody has written since
        self._leases: list[_Lease] = []
        self._poison: dict[int, TransferError] = {}

    def busy(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that a transfer or a lease holds."""
        ids = np.fromiter(block_ids, np.int64)
        known = ids[ids < self._holders.size]
        return known[self._holders[known] > 0].tolist()  # type: ignore[no-any-return]

    def is_busy(self, block_id: int) -> bool:
        """Whether a transfer or a lease holds the block."""
        return block_id < self._holders.size and bool(self._holders[block_id])

    def poisoned(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks whose content is not usable."""
        return [block_id for block_id in map(int, block_ids) if block_id in self._poison]

    def mark_rewritten(self, block_ids: Iterable[int]) -> None:
        """The blocks hold usable data again: somebody other than a transfer has rewritten them."""
        with lock:
            for block_id in block_ids:
                self._poison.pop(block_id, None)

    # ---- transfers ----
    def check(self, block_ids: Sequence[int] | Ids, pool: str, *, writing: bool) -> None:
        """Raises where a lease forbids the access, or a poisoned block would be read."""
        poison = {} if writing else self._poison
        leases = [lease.ids.tolist() for lease in self._leases if writing or lease.write]
        if not leases and not poison:
            return
        leased = set(itertools.chain.from_iterable(leases))
        for block_id in _array(block_ids).tolist():
            if block_id in leased:
                raise RuntimeError(
                    f"block {block_id} of the {pool} is leased; release the lease before moving the block"
                )
            if block_id not in poison:
                continue
            rewriter = next((writer for writer, held in self._writes.items() if block_id in held), None)
            if rewriter is None or rewriter.failed:
                raise TransferError(
                    f"block {block_id} of the {pool} holds no usable data ({self._poison[block_id]}); rewrite it first",
                    block_ids=self.poisoned(block_ids),
                )

    def read(self, block_ids: Sequence[int] | Ids, transfer: Tracked) -> set[Tracked]:
        """Notes the reads; returns the transfers whose result is read."""
        ids = _array(block_ids)
        writers: set[Tracked] = set()
        if self._any_held(ids):
            asked = self._mask(ids)
            writers = {writer for writer, held in self._writes.items() if asked[held].any()}
        self._note(self._reads, transfer, ids)
        return writers

    def write(self, block_ids: Sequence[int] | Ids, transfer: Tracked) -> set[Tracked]:
        """Notes the writes; returns the transfers that must be over first."""
        ids = _array(block_ids)
        before: set[Tracked] = set()
        if self._any_held(ids):
            asked = self._mask(ids)
            for holders in (self._writes, self._reads):
                for other, held in holders.items():
                    taken = asked[held]
                    if taken.any():
                        before.add(other)
                        self._holders[held[taken]] -= 1
                        holders[other] = held[~taken]
        self._note(self._writes, transfer, ids)
        return before

    def poison(self, block_ids: Sequence[int] | Ids, transfer: Tracked, error: TransferError) -> None:
        """The transfer will not write these blocks. Blocks that a later transfer rewrites are left to that one."""
        if transfer in self._writes:
            own = set(self._writes[transfer].tolist())
            self._poison.update(dict.fromkeys(own.intersection(_array(block_ids).tolist()), error))

    def release(self, block_ids: Sequence[int] | Ids, transfer: Tracked, *, written: bool) -> None:
        """The transfer is over and holds nothing any more. ``written``: it has rewritten the blocks completely."""
        for holders in (self._writes, self._reads):
            held = holders.pop(transfer, None)
            if held is None:
                continue
            self._holders[held] -= 1
            if written and self._poison and holders is self._writes:
                self.mark_rewritten(set(held.tolist()).intersection(_array(block_ids).tolist()))

    def users(self, block_ids: Iterable[int], *, writing: bool) -> Iterator[tuple[int, Tracked, bool]]:
        """Transfers that an access conflicts with: a block, who holds it, and whether that one writes it."""
        asked = list(block_ids)
        for is_writer, holders in ((True, self._writes), (False, self._reads if writing else {})):
            for transfer, held in list(holders.items()):
                own = set(held.tolist())
                block_id = next((block_id for block_id in asked if block_id in own), None)
                if block_id is not None:
                    yield block_id, transfer, is_writer

    # ---- leases ----
    def try_lease(self, block_ids: Sequence[int], *, write: bool) -> bool:
        """Takes the lease, unless a transfer or another lease conflicts with it."""
        ids = _array(block_ids)
        if self._any_held(ids):
            asked = self._mask(ids)
            conflicting = [*self._writes.values(), *(self._reads.values() if write else ())]
            conflicting += [lease.ids for lease in self._leases if write or lease.write]
            if any(asked[held].any() for held in conflicting):
                return False
        self._holders[ids] += 1
        self._leases.append(_Lease(ids, write))
        return True

    def end_lease(self, block_ids: Sequence[int], *, write: bool) -> None:
        ended = set(block_ids)
        lease = next(lease for lease in self._leases if lease.write == write and ended == set(lease.ids.tolist()))
        self._leases.remove(lease)
        self._holders[lease.ids] -= 1

    # ---- counts; an id that a list names twice counts once in both ----
    def _any_held(self, ids: Ids) -> bool:
        try:
            return bool(np.count_nonzero(self._holders[ids]))
        except IndexError:
            self._holders = np.append(self._holders, np.zeros(ids.max() + 1 - self._holders.size, np.int32))
            return bool(np.count_nonzero(self._holders[ids]))

    def _mask(self, ids: Ids) -> np.ndarray:
        mask = np.zeros(self._holders.size, bool)
        mask[ids] = True
        return mask

    def _note(self, holders: dict[Tracked, Ids], transfer: Tracked, ids: Ids) -> None:
        if transfer in holders:
            earlier = holders[transfer]
            self._holders[earlier] -= 1
            ids = np.concatenate([earlier, ids])
        self._holders[ids] += 1
        holders[transfer] = ids


def _array(block_ids: Sequence[int] | Ids) -> Ids:
    return np.asarray(block_ids, np.int64)


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
            asked = [first + block_id for block_id in block_ids]
            for block_id, transfer, is_writer in attached.domain.users(asked, writing=writing):
                transfer.poll()
                if not transfer.is_ordered_before(stream, extent.layer):
                    verb = "writing" if is_writer else "reading"
                    raise RuntimeError(
                        f"block {block_id} of layer {extent.layer} is used while a transfer is {verb} it; "
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
