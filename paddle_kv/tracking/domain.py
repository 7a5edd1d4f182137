"""Which transfer has to run after which: hazards per block of one memory.

The domain knows of each block the last transfer that writes it and the transfers that read it since. A new transfer
depends on

* the writer of a block that it reads (read after write),
* the writer and the readers of a block that it writes (write after write, write after read).

Blocks whose last writer failed or was cancelled are *poisoned*: reading them raises until they have been rewritten.
Leases keep transfers away from blocks that the host is using.

What is known of a block stands in arrays with one entry for each, so a call costs what its own blocks cost, whatever
else is in flight. A transfer that comes while no other one holds a block is written into them when somebody asks: most
that come alone end alone, and cost nothing then. Nothing here knows Paddle, CuPy or a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..checks import Ids
from ..errors import LeasedError, TransferError
from .group import MemoryGroup, Tracked

NOBODY = -1
SEVERAL = -2  # readers: look in ``_sharing``


class BlockDomain:
    """The blocks of one memory, shared by all pools that lie in it. Changes in a section of its group.

    Attributes:
        tensors: start, stride and layer of each tensor of the pools.
        group: see :mod:`paddle_kv.tracking.group`.
    """

    def __init__(self, tensors: Sequence[tuple[int, int, int]] = (), num_blocks: int = 0) -> None:
        self.tensors = tuple(tensors)
        self.group = MemoryGroup(self)
        # Of each block:
        self._writer = np.zeros(0, np.int64)  # number of the transfer
        self._reader = np.zeros(0, np.int64)  # of the only transfer that reads it
        self._num_readers = np.zeros(0, np.int32)
        self._leases = np.zeros(0, np.int32)
        self._write_leases = np.zeros(0, np.int32)
        self._poisoned = np.zeros(0, bool)
        self._num_leases = 0
        self._why_poisoned: dict[int, str] = {}
        self._transfers: dict[int, Tracked] = {}  # those that hold blocks
        self._writes: dict[int, Ids] = {}  # by number; ids that others have written since are still in there
        self._reads: dict[int, Ids] = {}  # and nobody has written since
        self._sharing: dict[int, None] = {}  # those of which a block has, or had, several readers
        self._unwritten: int | None = None  # the only one that holds blocks, if the arrays do not know of it yet

        self.grow(num_blocks)

    def grow(self, num_blocks: int) -> None:
        """Room for so many blocks: whoever names one has checked that it is one of them."""
        missing = max(0, num_blocks - self._writer.size)
        self._writer = np.append(self._writer, np.full(missing, NOBODY))
        self._reader = np.append(self._reader, np.full(missing, NOBODY))
        self._num_readers = np.append(self._num_readers, np.zeros(missing, np.int32))
        self._leases = np.append(self._leases, np.zeros(missing, np.int32))
        self._write_leases = np.append(self._write_leases, np.zeros(missing, np.int32))
        self._poisoned = np.append(self._poisoned, np.zeros(missing, bool))

    # ---- what is asked ----
    def is_quiet(self) -> bool:
        """Whether any access to any block may begin at once: nobody uses one, and none is poisoned."""
        return not (self._transfers or self._num_leases or self._why_poisoned)

    def busy(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that a transfer or a lease holds."""
        self._write_down()
        ids = np.fromiter(block_ids, np.int64)
        held = (self._writer[ids] != NOBODY) | (self._num_readers[ids] > 0) | (self._leases[ids] > 0)
        return ids[held].tolist()  # type: ignore[no-any-return]

    def is_busy(self, block_id: int) -> bool:
        """Whether a transfer or a lease holds the block."""
        return bool(self.busy([block_id]))

    def poisoned(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks whose content is not usable."""
        ids = np.fromiter(map(int, block_ids), np.int64)
        return ids[self._poisoned[ids]].tolist()  # type: ignore[no-any-return]

    def holders(self, block_ids: Sequence[int] | Ids, *, writing: bool = True) -> list[Tracked]:
        """The transfers that an access to the blocks has to do with, in order of submission: those that write them,
        and where it writes, those that read them."""
        if not self._transfers:
            return []
        self._write_down()
        ids = np.asarray(block_ids, np.int64)
        numbers = {*_numbers(self._writer[ids]), *(self._readers_of(ids) if writing else ())}
        return [self._transfers[number] for number in sorted(numbers)]

    def lone_holders(self, block_ids: Sequence[int] | Ids) -> list[Tracked]:
        """Those that write one of the blocks, or read it alone. The blocks may be free when these have been looked at;
        of one that several read, and there may be thousands, the last one will be heard of."""
        self._write_down()
        ids = np.asarray(block_ids, np.int64)
        return [self._transfers[one] for one in sorted({*_numbers(self._writer[ids]), *_numbers(self._reader[ids])})]

    def check(self, block_ids: Sequence[int] | Ids, pool: str, *, writing: bool) -> None:
        """Raises where a lease forbids the access, or a poisoned block would be read."""
        if self._num_leases:
            ids = np.asarray(block_ids, np.int64)
            leased = ids[(self._leases if writing else self._write_leases)[ids] > 0]
            if leased.size:
                raise LeasedError(
                    f"block {leased[0]} of the {pool} is leased; release the lease before moving the block",
                    leased.tolist(),
                )
        if writing or not self._why_poisoned:
            return
        self._write_down()
        ids = np.asarray(block_ids, np.int64)
        found = ids[self._poisoned[ids]]
        # A transfer that writes the block anew gives it its content back, if it does not fail.
        rewritten = [number for number in _numbers(self._writer[found]) if not self._transfers[number].spoiled]
        bad = found[~np.isin(self._writer[found], rewritten)]
        if bad.size:
            raise TransferError(
                f"block {bad[0]} of the {pool} holds no usable data ({self._why_poisoned[int(bad[0])]}); rewrite it "
                "first",
                block_ids=found.tolist(),
            )

    def users(self, block_ids: Iterable[int], *, writing: bool) -> Iterator[tuple[int, Tracked, bool]]:
        """Transfers that an access conflicts with: a block, who holds it, and whether that one writes it."""
        self._write_down()
        ids = np.fromiter(block_ids, np.int64)
        ids = ids[ids < self._writer.size]  # of an operator's tensor that goes beyond the pool
        for number in _numbers(self._writer[ids]):
            yield int(ids[self._writer[ids] == number][0]), self._transfers[number], True
        for number in self._readers_of(ids) if writing else ():
            yield int(ids[np.isin(ids, self._reads[number])][0]), self._transfers[number], False

    # ---- transfers ----
    def read(self, block_ids: Sequence[int] | Ids, transfer: Tracked) -> set[Tracked]:
        """Notes the reads; returns the transfers whose result is read."""
        ids: Ids = np.asarray(block_ids, np.int64)  # one may occur several times: one source may have many targets
        if not ids.size:
            return set()
        if self._comes_alone(transfer):
            self._reads[transfer.number] = ids
            return set()
        number = transfer.number
        shared = ids[self._num_readers[ids] > 0]
        if shared.size:
            self._sharing.update(dict.fromkeys([number, *_numbers(self._reader[shared])]))
        self._num_readers[ids] += 1  # once for each block
        self._reader[ids] = number
        self._reader[shared] = SEVERAL
        self._reads[number] = ids
        return {self._transfers[writer] for writer in _numbers(self._writer[ids])}

    def write(self, block_ids: Sequence[int] | Ids, transfer: Tracked) -> set[Tracked]:
        """Notes the writes; returns the transfers that must be over first."""
        ids: Ids = np.asarray(block_ids, np.int64)
        if not ids.size:
            return set()
        if self._comes_alone(transfer):
            self._writes[transfer.number] = ids
            return set()
        number = transfer.number
        readers = self._readers_of(ids)
        before = {self._transfers[other] for other in [*_numbers(self._writer[ids]), *readers]}
        asked = self._mask(ids) if readers else None
        self._writes[number] = ids  # before the readers give way: see ``rebuild``
        if asked is not None:
            for reader in readers:
                held = self._reads[reader]
                self._reads[reader] = held[~asked[held]]
            self._num_readers[ids] = 0
            self._reader[ids] = NOBODY
        self._writer[ids] = number
        return before

    def poison(self, block_ids: Sequence[int] | Ids, transfer: Tracked, why: str) -> None:
        """The transfer will not write these blocks. Blocks that a later transfer rewrites are left to that one."""
        self._write_down()
        ids = np.asarray(block_ids, np.int64)
        own = ids[self._writer[ids] == transfer.number]
        self._poisoned[own] = True
        self._why_poisoned.update(dict.fromkeys(own.tolist(), why))

    def release(self, transfer: Tracked, *, written: bool, lost: Sequence[int] | Ids = ()) -> None:
        """The transfer is over and holds nothing any more. ``written``: it has rewritten its targets, but for the
        ``lost`` ones."""
        number = transfer.number
        is_written_down = number != self._unwritten
        if not is_written_down:
            self._unwritten = None
        reads = self._reads.pop(number, None)
        if reads is not None and is_written_down:
            if len(self._transfers) == 1:
                self._num_readers[reads] = 0
                self._reader[reads] = NOBODY
            else:
                self._num_readers[reads] -= 1
                self._reader[reads[self._num_readers[reads] == 0]] = NOBODY
            self._sharing.pop(number, None)
        writes = self._writes.pop(number, None)
        if writes is not None:
            own = writes
            if is_written_down:
                own = writes[self._writer[writes] == number]
                self._writer[own] = NOBODY
            if written:
                self.mark_rewritten(own[~np.isin(own, np.asarray(lost, np.int64))] if len(lost) else own)
        self._transfers.pop(number, None)

    def rebuild(self) -> None:
        """Behind an error in the middle of :meth:`read` or :meth:`write`: what is known of each block, by what the
        transfers hold."""
        self._unwritten = None
        self._clear()
        for number in sorted(self._writes):
            self._writer[self._writes[number]] = number
        for number, ids in self._reads.items():
            self._num_readers[ids] += 1
            self._reader[ids] = number
        self._reader[self._num_readers > 1] = SEVERAL
        self._sharing = dict.fromkeys(self._reads)

    def mark_rewritten(self, block_ids: Sequence[int] | Ids) -> None:
        """The blocks hold usable data again."""
        if not self._why_poisoned:
            return
        ids = np.asarray(block_ids, np.int64)
        for block_id in ids[self._poisoned[ids]].tolist():
            self._why_poisoned.pop(block_id, None)
        self._poisoned[ids] = False

    # ---- leases ----
    def try_lease(self, block_ids: Sequence[int], *, write: bool) -> bool:
        """Takes the lease, unless a transfer or another lease conflicts with it."""
        self._write_down()
        ids = np.asarray(block_ids, np.int64)
        conflicts = self._writer[ids] != NOBODY
        conflicts |= (self._leases if write else self._write_leases)[ids] > 0
        if write:
            conflicts |= self._num_readers[ids] > 0
        if conflicts.any():
            return False
        self.add_lease(block_ids, write=write)
        return True

    def add_lease(self, block_ids: Sequence[int], *, write: bool) -> None:
        """Takes the lease beside whoever has the blocks: for who touches them already."""
        ids = np.asarray(block_ids, np.int64)
        self._leases[ids] += 1
        self._write_leases[ids] += write
        self._num_leases += ids.size

    def end_lease(self, block_ids: Sequence[int], *, write: bool) -> None:
        ids = np.asarray(block_ids, np.int64)
        self._leases[ids] -= 1
        self._write_leases[ids] -= write
        self._num_leases -= ids.size

    # ---- helpers ----
    def _comes_alone(self, transfer: Tracked) -> bool:
        """Whether nobody holds a block. Then it is enough to know which its blocks are, until somebody asks."""
        is_alone = not self._transfers
        if not is_alone:
            self._write_down()
        self._transfers[transfer.number] = transfer
        if is_alone:
            self._unwritten = transfer.number
        return is_alone

    def _write_down(self) -> None:
        """Before the arrays are asked who holds a block."""
        number = self._unwritten
        if number is None:
            return
        try:
            reads = self._reads.get(number)
            if reads is not None:
                self._num_readers[reads] = 1
                self._reader[reads] = number
            writes = self._writes.get(number)
            if writes is not None:
                self._writer[writes] = number
        except BaseException:
            self._clear()
            raise
        self._unwritten = None

    def _clear(self) -> None:
        self._writer[:] = self._reader[:] = NOBODY
        self._num_readers[:] = 0

    def _readers_of(self, ids: Ids) -> list[int]:
        """Numbers of all that read one of the blocks."""
        reader = self._reader[ids]
        found = dict.fromkeys(_numbers(reader))
        several = ids[reader == SEVERAL]
        if several.size:
            asked = self._mask(several)
            found.update((number, None) for number in self._sharing if asked[self._reads[number]].any())
        return list(found)

    def _mask(self, ids: Ids) -> np.ndarray:
        mask = np.zeros(self._writer.size, bool)
        mask[ids] = True
        return mask


def _numbers(of_blocks: Ids) -> list[int]:
    """The transfers among the entries, each once."""
    if not of_blocks.size:
        return []
    largest = int(of_blocks.max())
    if largest < 0:
        return []  # the rule: nobody
    found = of_blocks[of_blocks >= 0]
    if int(found.min()) == largest:
        return [largest]  # nearly always where there is somebody
    return np.unique(found).tolist()  # type: ignore[no-any-return]
