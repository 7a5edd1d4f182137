"""What a lookup has found, held against eviction."""

from __future__ import annotations

import functools
from types import TracebackType

from ..ops import _arguments as arguments
from ..tracking.group import Guard, change
from .books import Books
from .found import BlockState


class Lease:
    """Blocks that :meth:`KVOffloadManager.lookup` has found. They are not evicted until it is released: by
    :meth:`release`, at the end of a ``with`` block, or when nobody refers to it any more.

    Attributes:
        hashes: of the blocks, the longest prefix that can be loaded.
        num_blocks: how many.
        states: where each of them was then: ``PRESENT`` in host memory, in the ``TIER`` below, or ``ARRIVING`` from
            there, so that a load follows layer by layer. Without a tier all are present.
        num_arriving: so many more, right behind them, are there once the saves and prefetches are over that bring them
            now. They are not held.

    Any thread may call. It stays valid after :meth:`KVOffloadManager.close`, and then holds nothing.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.offload import KVOffloadManager
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> manager = KVOffloadManager(scheduler)
        >>> hashes = manager.block_hashes(range(9))
        >>> manager.save(hashes, [0, 3, 1]).wait()
        >>> lease = manager.lookup(hashes)
        >>> lease.keep_first(2); lease.num_blocks, manager.evict(3)  # what it holds stays
        (2, 1)
        >>> lease.release(); manager.evict(3), manager.stats()["evicted_blocks"]
        (2, 3)
        >>> manager.close(); scheduler.close()
    """

    def __init__(self, books: Books, hashes: list[bytes], states: list[BlockState], num_arriving: int) -> None:
        """In a section."""
        self.hashes = hashes
        self.states = states
        self.num_arriving = num_arriving
        self._books = books
        self._held = True
        self._guard = Guard.over(self, books, functools.partial(books.unpin, hashes))

    @property
    def num_blocks(self) -> int:
        """How many blocks it has, after :meth:`keep_first` those that it kept."""
        return len(self.hashes)

    @property
    def num_below(self) -> int:
        """How many of the blocks lie in the tier: a hint, since it may lose them at any time. What does not come ends
        in :meth:`KVOffloadManager.blocks_to_recompute`."""
        return self.states.count(BlockState.TIER)

    @property
    def load_s(self) -> float:
        """Estimate of the seconds until these have come into host memory, if they are asked for now: by the loads
        before. :meth:`keep_first` leaves out what takes longer than computing it."""
        return self._books.load_s(self.num_below)

    def keep_first(self, num_blocks: int) -> None:
        """Releases all but the first so many, for a server that uses only those.

        Raises:
            TypeError: not an integer.
            ValueError: it does not hold so many.
        """
        change(self._books, functools.partial(self._keep_here, arguments.integer(num_blocks, "num_blocks")))

    def _keep_here(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= len(self.hashes):
            raise ValueError(f"num_blocks = {num_blocks} must be in [0, {len(self.hashes)}]")
        self.hashes, dropped = self.hashes[:num_blocks], self.hashes[num_blocks:]
        self.states = self.states[:num_blocks]
        if self._held:
            self._books.unpin(dropped)
            self._guard.cancel()
            self._guard = Guard.over(self, self._books, functools.partial(self._books.unpin, self.hashes))

    def release(self) -> None:
        """The blocks may be evicted again. Again: does nothing."""
        change(self._books, self._release_here)

    def _release_here(self) -> None:
        if self._held:
            self._held = False
            self._guard.cancel()
            self._books.unpin(self.hashes)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
