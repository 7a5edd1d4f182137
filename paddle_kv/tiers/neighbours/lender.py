"""The side that has the blocks."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import islice
from typing import Any

from ...checks import check_distinct, check_ids, check_process
from ...errors import ClosedError
from ...memory import HostPool
from ...memory.shared_memory import host_identity
from ...peers.connection import Line
from ...peers.unix_socket import Listening
from ...timeouts import check_timeout
from ...tracking.group import change
from ..job import check_blocks, check_keys
from ..object_format import ObjectFormat
from .lent import Leased, Lent, Pins
from .messages import BUSY, MOST_NAMES, TO_LENDER, VERSION, encode, heard

LONGEST_LEASE_S = 10.0  # whatever a reader asks for: one that is stopped holds blocks no longer
MOST_READS = 1024  # of a reader at once


@dataclass(eq=False)
class _Reader:
    """A process that is connected.

    Attributes:
        told: names that it knows.
        changed: names of which it has to hear, in order.
        asked: whether it waits for names.
        behind: whether it has never been told of all of them.
        reads: what it reads now, by its number.
    """

    told: set[bytes] = field(default_factory=set)
    changed: dict[bytes, None] = field(default_factory=dict)
    asked: bool = False
    behind: bool = True
    reads: dict[int, Leased] = field(default_factory=dict)


class Lender:
    """Lets other processes of this user and host read blocks of a pool, by their keys: see :class:`NeighbourEngine`.

    A manager that is given it, ``KVOffloadManager(scheduler, lender=lender)``, lends all that is in host memory. A
    server that keeps its own books calls :meth:`lend` and :meth:`take_back`. Any thread may call.

    A block that a neighbour reads is leased for reading, for ten seconds at most; half of the pool at most (one block,
    if it has no more) is leased at a time. A read copies: nothing of the neighbour's touches the block behind that.

    Args:
        pool: ``HostPool(..., layout="block_first", shared=True)``.
        model, rank, group: as of the :class:`~paddle_kv.tiers.Tier` of the neighbours: what differs in one of them is
            not found.
        path: of the socket by which neighbours come; its folder must be private to the user (``0700``). None: in a
            temporary folder. A socket there to which nobody listens any more is replaced.

    Attributes:
        path: for :class:`NeighbourEngine`.

    Raises:
        TypeError: not a pool, not bytes, or not a path.
        ValueError: a pool that is not block-first or not shared, or a path or number that is out of its range.
        MemoryError: there is no room for the headers, 4 KiB or more for each block of the pool.
        PermissionError: the folder is not the user's, or others may enter it.
        OSError: the socket cannot be made, for example because a process listens there.

    Example:
        >>> from paddle_kv import HostPool, KVCacheSpec
        >>> from paddle_kv.tiers import Job, Tier
        >>> from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> theirs = HostPool(spec, 4, layout="block_first", shared=True)
        >>> theirs.view("key", 1, 2)[...] = 2.5
        >>> lender = Lender(theirs, model=b"m")
        >>> lender.lend([b"hash"], [2])
        >>> pool = HostPool(spec, 4, layout="block_first")  # in another process
        >>> engine = NeighbourEngine([lender.path])
        >>> with lender, engine, Tier(engine, pool, model=b"m") as tier:
        ...     engine.wait_connected(timeout_s=10)
        ...     load = Job([b"hash"], [3])
        ...     tier.load([load])
        ...     tier.drain(timeout_s=10)
        ...     load.done, pool.view("key", 1, 3).max().item()
        (True, 2.5)
    """

    def __init__(
        self,
        pool: HostPool,
        *,
        model: bytes,
        rank: int = 0,
        group: int = 0,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(pool, HostPool):
            raise TypeError(f"pool is {type(pool).__name__}; a HostPool is expected")
        if not isinstance(model, bytes):
            raise TypeError(f"model is {type(model).__name__}; bytes are expected")
        self.pool = pool
        form = ObjectFormat(pool.spec, model, group=group, rank=rank)
        self._exported = pool.export()
        self._lent = Lent(pool, form, self._changed)
        self._form = form
        self._readers: dict[Line, _Reader] = {}
        self._changes: deque[tuple[bytes, bool]] = deque()  # that no reader was told of
        self._counts = dict.fromkeys(("read_blocks", "expired_blocks", "refused_messages"), 0)
        self._process_id = os.getpid()
        self._closed = False
        self._listening = Listening(self, "lender", path)
        self.path = self._listening.path

    # ---- calls ----
    def lend(self, keys: Sequence[bytes], block_ids: Any) -> None:
        """These blocks can be read from now on: of ``keys[i]`` it is ``block_ids[i]``. They hold their content already,
        and nobody writes them before :meth:`take_back` of their keys, and while a neighbour reads them: a lease or
        transfer that would write is refused or waits, as with every lease of the pool.

        Args:
            keys: 1 to 64 bytes each.
            block_ids: as many blocks of the pool, each once. What was lent of one before is taken back.

        Raises:
            TypeError, ValueError, IndexError: not such keys, or not such blocks.
            ClosedError: closed.
        """
        keys, ids = check_blocks(keys, block_ids)
        check_ids(ids, "block_ids", self.pool.num_blocks)
        check_distinct("block_ids", ids)
        self._change(functools.partial(self._lent.lend, keys, ids))

    def take_back(self, keys: Sequence[bytes]) -> None:
        """These are not lent any more; such as were not lent are passed over. A neighbour that reads one goes on: the
        pool gives a block out again, and lets it be written, when that is over.

        Raises:
            TypeError, ValueError: not keys.
            ClosedError: closed.
        """
        self._change(functools.partial(self._lent.take_back, check_keys(keys)))

    def stats(self) -> dict[str, int]:
        """``lent_blocks``, ``leased_blocks`` and ``readers`` now; since it was made ``read_blocks``, ``expired_blocks``
        (of reads that had not ended when their time was over), ``refused_messages``."""
        now = {"lent_blocks": len(self._lent.objects), "leased_blocks": self._lent.num_leased}
        return {**now, "readers": len(self._readers), **self._counts}

    def close(self, timeout_s: float | None = None) -> None:
        """Ends all connections and leases. Close it behind the manager and before the pool. Again: does nothing.

        Raises:
            TypeError, ValueError: a time that is none.
        """
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        self._closed = True
        self._listening.post(self._end_all)
        self._listening.close(timeout_s)

    def __enter__(self) -> Lender:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(30.0)

    def _change(self, section: Any) -> None:
        check_process(self._process_id, "lender")
        if self._closed:
            raise ClosedError("the lender is closed")
        change(self.pool.domain, section)

    # ---- for a manager, in sections ----
    def begin(self, pins: Pins) -> None:
        """The books of a manager, of which all that follows is said, until :meth:`end`.

        Raises:
            ValueError: another manager has it.
        """
        self.check_unused()
        self._lent.pins = pins

    def check_unused(self) -> None:
        """ValueError if another manager has it."""
        if self._lent.pins is not None:
            raise ValueError("lender is one that another manager has")

    def stored(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self._lent.lend(keys, block_ids)

    def removed(self, keys: Iterable[bytes]) -> None:
        self._lent.take_back(keys)

    def cleared(self) -> None:
        self._lent.take_back_all()

    def end(self) -> None:
        self._lent.take_back_all()
        self._lent.pins = None

    def _changed(self, name: bytes, is_lent: bool) -> None:
        if self._closed:  # nobody is there who would take them out
            return
        self._changes.append((name, is_lent))
        if len(self._changes) == 1:  # else it was asked for already
            self._listening.post(self._tell_all)

    # ---- in the thread of the channel ----
    def _end_all(self) -> None:
        change(self.pool.domain, self._lent.take_back_all)
        for line in list(self._readers):
            self.gone(line)

    def received(self, line: Line, data: bytes) -> None:
        message = heard(data, TO_LENDER)
        if message is None or not self._take(line, message):
            self._counts["refused_messages"] += 1

    def holds(self, line: Line) -> bool:
        return False  # it only reads: what it still copies its own tier finds to be damaged

    def gone(self, line: Line) -> None:
        reader = self._readers.pop(line, None)
        if reader is not None:
            reads, reader.reads = list(reader.reads.values()), {}
            change(self.pool.domain, functools.partial(self._lent.end, reads))

    lost = gone  # of one that holds, which none does

    def _take(self, line: Line, message: dict[str, Any]) -> bool:
        """Whether it makes sense now."""
        kind, reader = message["kind"], self._readers.get(line)
        if kind == "join":
            fits = message["version"] == VERSION and reader is None and not self._closed
            return fits and self._join(line)
        if reader is None:
            return False
        if kind == "more":
            if reader.asked:
                return False
            reader.asked = True
            self._tell(line, reader)
            return True
        if kind == "read":
            return self._read(line, reader, message["number"], message["names"], message["timeout_ms"] / 1000)
        self._end(reader, message["number"])  # unless its time was over, or it was too much
        return True

    def _join(self, line: Line) -> bool:
        self._readers[line] = _Reader(changed=dict.fromkeys(list(self._lent.objects)))
        sizes = {"block_bytes": self._form.payload_bytes, "header_bytes": self._form.header_bytes}
        memory = {
            "blocks": astuple(self._exported.allocations[0]),
            "headers": astuple(self._lent.headers.handle()),
        }
        hello = {"version": VERSION, "host": host_identity(), "num_blocks": self.pool.num_blocks}
        line.send(encode("hello", **hello, **sizes, **memory))
        return True

    def _read(self, line: Line, reader: _Reader, number: int, names: list[bytes], timeout_s: float) -> bool:
        if number in reader.reads:
            return False
        if len(reader.reads) >= MOST_READS:  # what is not answered would make this lender one that is stopped
            line.send(encode("lent", number=number, blocks=[BUSY] * len(names)))
            return True
        answers, leased = change(self.pool.domain, functools.partial(self._lent.lease, names))
        reader.reads[number] = leased
        self._lent.write_headers(leased)
        self._counts["read_blocks"] += len(leased.objects)
        self._listening.later(min(timeout_s, LONGEST_LEASE_S), functools.partial(self._expire, reader, number, leased))
        line.send(encode("lent", number=number, blocks=answers))
        return True

    def _expire(self, reader: _Reader, number: int, leased: Leased) -> None:
        if reader.reads.get(number) is leased:
            self._counts["expired_blocks"] += len(leased.objects)
            self._end(reader, number)

    def _end(self, reader: _Reader, number: int) -> None:
        leased = reader.reads.pop(number, None)
        if leased is not None:
            change(self.pool.domain, functools.partial(self._lent.end, [leased]))

    def _tell_all(self) -> None:
        changes = []
        while self._changes:  # until it is empty: who adds to what is not does not ask again
            changes.append(self._changes.popleft())
        for line, reader in self._readers.items():
            for name, is_lent in changes:
                # Also what it knows is told when it is lent anew: it may have forgotten it.
                if is_lent or (name in self._lent.objects) != (name in reader.told):
                    reader.changed[name] = None
                else:
                    reader.changed.pop(name, None)
            self._tell(line, reader)

    def _tell(self, line: Line, reader: _Reader) -> None:
        """What there is, if it waits for that."""
        if not (reader.asked and (reader.changed or reader.behind)):
            return
        names = list(islice(reader.changed, MOST_NAMES))
        for name in names:
            del reader.changed[name]
        added = [name for name in names if name in self._lent.objects]
        removed = [name for name in names if name not in self._lent.objects]
        reader.told.update(added)
        reader.told.difference_update(removed)
        reader.asked = False
        reader.behind = reader.behind and bool(reader.changed)
        line.send(encode("news", added=added, removed=removed, is_all=not reader.changed))


def check_lender(lender: Any, pool: HostPool) -> None:
    """TypeError or ValueError unless it is one over this pool, and no manager's."""
    if not isinstance(lender, Lender):
        raise TypeError(f"lender is {type(lender).__name__}; a Lender is expected")
    if lender.pool is not pool:
        raise ValueError("lender is over another host pool than that of the scheduler")
    lender.check_unused()
