"""What a server calls to keep prompt prefixes in host memory: find, load, save."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..memory import DeviceCache
from ..ops import _arguments as arguments
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer, transfer_list
from ..timeouts import check_time
from ..tracking.group import change
from ..values import check_bool
from .books import Books
from .checks import checked_hashes
from .chunks import How, checked_targets, make_request
from .found import BlockState
from .hashing import BlockHasher, PrefixHasher, spec_salt
from .keeping import Keeping
from .lease import Lease
from .look_ahead import LookAhead
from .policies import DEFAULT_POLICY
from .policy import Policy
from .rates import Rates
from .request import Request

if TYPE_CHECKING:
    from ..tiers import Saver, Tier
    from ..tiers.neighbours import Lender
    from .prefetch import Prefetch


class KVOffloadManager(Keeping, LookAhead):
    """Blocks in host memory, found by the hash of their tokens and of all tokens before them.

    Args:
        scheduler: moves the blocks; its host pool is where they are kept. The manager takes blocks of the pool and
            gives them back when they are evicted, when a save fails, and by :meth:`close`; it closes neither of both.
        policy: which block goes when room is needed: "survival", "lru", "arc", "s3fifo", or a fresh object with the
            methods of :class:`~paddle_kv.offload.Policy`.
        write_through: what :meth:`blocks_full` and :meth:`blocks_evicted` do.
        salt: what the content of a block depends on besides its tokens and the cache's spec (always part of the hash):
            the model and its revision, the LoRA adapter, the tensor-parallel rank; see :func:`cache_salt`.
        capacity_bytes: how much of the pool to use at most; None: all of it.
        tier: what keeps blocks below host memory: a :class:`~paddle_kv.tiers.Tier` over the pool of the scheduler; it
            gets each block as soon as it is saved. Or a :class:`~paddle_kv.tiers.Saver`, which says what it gets and
            when. It stays its owner's: close the manager first.
        tier_timeout_s: what a load has not got from the tier by then is to be computed.
        max_events: events kept for :meth:`take_events`; 0: none are collected.
        lender: lets other processes read what is in host memory: a :class:`~paddle_kv.tiers.neighbours.Lender` over the
            pool of the scheduler. It stays its owner's: close the manager first.

    Raises:
        TypeError: not a scheduler, a policy, a tier, a lender, a salt, a bool or a time.
        ValueError: an unknown policy, ``capacity_bytes`` below one block (all layers), a tier or a lender over another
            pool, or one that another manager has until that is closed, a tier by whatever Saver. Nothing has changed.

    Any thread may call; calls are serialised, and whole whatever a signal handler raises. What is promised is in
    ``docs/offload.md``. A ``with`` block closes it.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.offload import KVOffloadManager
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
        >>> manager = KVOffloadManager(scheduler, salt=b"my-model")
        >>> hashes = manager.block_hashes([11, 12, 13, 14, 15, 16, 17])
        >>> manager.save(hashes, [0, 3]).wait()
        >>> with manager.lookup(hashes + [b"something else"]) as lease:
        ...     load = manager.onload(lease.hashes, [1, 2])
        >>> load.wait(), lease.num_blocks
        (None, 2)
        >>> manager.close(); scheduler.close()
    """

    def __init__(
        self,
        scheduler: LayerwiseScheduler,
        *,
        policy: str | Policy[bytes] = DEFAULT_POLICY,
        write_through: bool = True,
        salt: bytes = b"",
        capacity_bytes: int | None = None,
        tier: Tier | Saver | None = None,
        tier_timeout_s: float = 30.0,
        max_events: int = 0,
        lender: Lender | None = None,
    ) -> None:
        check_scheduler(scheduler)
        spec = scheduler.device_cache.spec
        self._scheduler = scheduler
        self._block_bytes = spec.block_bytes * spec.num_layers
        capacity_blocks = scheduler.host_pool.num_blocks
        if capacity_bytes is not None:
            capacity_blocks = min(
                capacity_blocks, arguments.integer(capacity_bytes, "capacity_bytes") // self._block_bytes
            )
        if capacity_blocks < 1:
            raise ValueError(f"capacity_bytes = {capacity_bytes} must be at least one block, {self._block_bytes}")
        if not isinstance(salt, (bytes, bytearray)):
            raise TypeError(f"salt is {type(salt).__name__}; bytes are expected")
        check_bool(write_through, "write_through")
        tier_timeout_s = check_time(tier_timeout_s, "tier_timeout_s")
        self.write_through = write_through
        self._block_size = spec.block_size
        self._hasher = BlockHasher(spec.block_size, spec_salt(spec) + salt)
        max_events = arguments.integer(max_events, "max_events")
        if lender is not None:
            from ..tiers.neighbours.lender import check_lender  # needs packages that not everybody has

            check_lender(lender, scheduler.host_pool)
        if tier is None:
            self._books = Books(scheduler, policy, capacity_blocks, max_events)
        else:
            from .tiered import make_books  # needs packages that not everybody has

            self._books = make_books(scheduler, policy, capacity_blocks, max_events, tier, tier_timeout_s)
        if lender is not None:
            try:
                change(self._books, functools.partial(self._books.lend, lender))
            except BaseException:
                self.close()  # or the tier would be that of a manager that nobody has
                raise

    # ---- what is there ----
    def block_hashes(self, token_ids: Sequence[int], *, request_salt: bytes = b"") -> list[bytes]:
        """One hash per full block of the prompt, chained: each stands for all tokens up to the end of its block.

        Stable across processes and machines.

        Args:
            token_ids: 1-D integers: a list, tuple, range, NumPy array or Paddle tensor (one on a GPU is copied to the
                host). Tokens that do not fill a block have no hash.
            request_salt: what differs between the requests of one server, such as the LoRA adapter.

        Returns:
            ``len(token_ids) // block_size`` hashes of 32 bytes.

        Raises:
            TypeError: not integers, or a salt that is not bytes.
            ValueError: not 1-D.
        """
        return self._hasher(token_ids, request_salt)

    def prefix(self, *, request_salt: bytes = b"") -> PrefixHasher:
        """The same hashes for a prompt that grows: its ``append(token_ids)`` costs the blocks that these tokens fill.

        Raises:
            TypeError: a salt that is not bytes.
        """
        return self._hasher.prefix(request_salt)

    def lookup(self, hashes: Sequence[bytes], *, num_tokens: int | None = None) -> Lease:
        """The longest prefix of ``hashes`` that is present, held against eviction until the lease is released.

        Counts as a use of these blocks, so call it once per request. Waits for no transfer.

        Args:
            hashes: of :meth:`block_hashes`, from the first block on.
            num_tokens: of the prompt. Its last token has to be computed in any case, since its result is the first one
                of the answer: a block that holds it is not asked for. None: all are.

        Raises:
            TypeError: not a list of bytes, not an integer.
            ValueError: so many tokens do not have so many full blocks.
            ClosedError: closed.
        """
        return self._lookup(hashes, num_tokens)

    def _lookup(self, hashes: Sequence[bytes], num_tokens: int | None, *, joins: bool = False) -> Lease:
        """``joins``: for who can wait for what is just being read from the tier for others."""
        keys = self._reusable(checked_hashes(hashes), num_tokens)
        below = self._books.ask(keys)
        found: Lease = change(self._books, lambda: Lease(self._books, *self._books.lookup(keys, below, joins=joins)))
        return found

    def peek(self, hashes: Sequence[bytes]) -> int:
        """How many blocks :meth:`lookup` would find. Counts as no use, and holds nothing.

        Raises:
            As :meth:`lookup`.
        """
        keys = checked_hashes(hashes)
        return int(change(self._books, functools.partial(self._books.peek, keys, self._books.ask(keys))))

    def states(self, hashes: Sequence[bytes]) -> list[BlockState]:
        """Where each of the blocks is; the tier is asked up to the first blocks that it has not. Counts as no use, and
        holds nothing."""
        keys = checked_hashes(hashes)
        below = self._books.ask(keys)
        found: list[BlockState] = change(self._books, lambda: self._books.states(keys, below))
        return found

    # ---- one prompt ----
    def prefetch(self, hashes: Sequence[bytes], *, timeout_s: float) -> Prefetch:
        """For a request that waits its turn: brings what of its prefix lies in the tier into host memory, as far as
        there is room beside what is held. What has arrived is found by :meth:`lookup`, and may be evicted again as any
        block that was just used. It is asked of the tier in small parts, in turns with what is expected, and behind
        what running requests need; a part on its way is ``num_arriving``, and what waits its turn is in the tier.
        Behind ``prefetch.cancel()`` and ``prefetch.wait()``, which is one part later, all that has not come is there,
        from where :meth:`onload` takes it layer by layer. A request in chunks takes it over as it is.

        Args:
            hashes: of :meth:`block_hashes`, from the first block on.
            timeout_s: from now on; what has not come by then stays in the tier.

        Raises:
            TypeError, ValueError, ClosedError: as :meth:`lookup`, and a time that is none; with a tier also a hash that
                is not of 1 to 64 bytes.
        """
        keys = checked_hashes(hashes)
        self._books.check_names(keys)
        return self._books.prefetch(keys, check_time(timeout_s))

    def request(
        self,
        token_ids: Sequence[int] | PrefixHasher,
        device_block_ids: Any,
        *,
        request_salt: bytes = b"",
        chunk_tokens: int | None = None,
        how: How | None = None,
    ) -> Request:
        """Looks a prompt up, starts the load of what is found and the layerwise save of the rest; see
        :class:`Request`, which also says what to do when the load fails.

        Args:
            token_ids: of the prompt; or what :meth:`prefix` has made, with its tokens.
            device_block_ids: the blocks of the prompt, one for each ``block_size`` tokens and one for the rest.
            request_salt: see :meth:`block_hashes`.
            chunk_tokens: the prompt is computed in chunks of so many tokens (of whole blocks), which begin at
                multiples of it: ask :meth:`Request.next_chunk`. None: in one pass, as it has to be on a ring of layer
                buffers.
            how: what becomes of the prefix that is found: ``"load"`` all of it; ``"compute"`` all of it; ``"sooner"``:
                what is there sooner by the rates that were measured so far, with ``chunk_tokens`` part by part, loads
                from the back and computation from the front. None: "sooner" with ``chunk_tokens``, else "load".

        Raises:
            ValueError: a token without a block, a block twice, chunks that are not whole blocks, or chunks on a ring of
                layer buffers, another ``how``, a ``request_salt`` beside what :meth:`prefix` has made.
            As :meth:`block_hashes`, :meth:`onload` and :meth:`save`.
        """
        return make_request(self, token_ids, device_block_ids, request_salt, chunk_tokens, how)

    def observe_prefill(self, tokens: range, seconds: float) -> None:
        """The model has computed these tokens of a prompt in so many seconds: for servers that do not ask
        :meth:`Request.next_chunk`, which measures it itself, or that know it better.

        Raises:
            TypeError: not a range, or not a number.
            ValueError: no tokens, some left out, or no time.
        """
        if not isinstance(tokens, range):
            raise TypeError(f"tokens is {type(tokens).__name__}; a range is expected")
        if tokens.step != 1 or not 0 <= tokens.start < tokens.stop < 2**63:
            raise ValueError(f"tokens = {tokens} must be a range of one token or more, from 0 on and in steps of 1")
        self._books.rates.observe_prefill(tokens.start, len(tokens), seconds)

    @property
    def device_cache(self) -> DeviceCache:
        """Of the scheduler."""
        return self._scheduler.device_cache

    @property
    def rates(self) -> Rates:
        """What transfers and computing were measured to take: ``rates.stats()``."""
        return self._books.rates

    @property
    def tier(self) -> Tier | None:
        """What keeps blocks below host memory, if there is one."""
        return self._books.tier

    # ---- transfers ----
    def onload(self, hashes: Sequence[bytes], device_block_ids: Any) -> Transfer:
        """Loads blocks: that of ``hashes[i]`` to ``device_block_ids[i]``. Ordering and lifetime as for
        :meth:`LayerwiseScheduler.onload`.

        The blocks are held until the transfer is over; a lease on them may be released as soon as this has returned. If
        the transfer fails, :meth:`blocks_to_recompute` says what the server has to compute instead; the blocks in host
        memory stay, except such as a checksum has found damaged: they are dropped.

        Args:
            hashes: ``lease.hashes``, or some of them; none at all is a transfer that is over at once.
            device_block_ids: as many targets, each once, in the forms that :meth:`LayerwiseScheduler.offload` takes.

        Raises:
            KeyError: a block is not present. Nothing has moved.
            ValueError: as many ids as hashes are expected.
            TypeError: not a list of bytes.
            ClosedError: closed.
            TransferError: a block is damaged, or was dropped while a lease held it and is not there again: nothing has
                moved, compute instead.
            As :meth:`LayerwiseScheduler.onload`.
        """
        keys = checked_hashes(hashes)
        device_ids = checked_targets(device_block_ids, len(keys), self.device_cache.num_blocks)
        compute = self._scheduler.compute_stream(None)  # of this thread
        return self._scheduler.check_started(self._books.start_load(keys, device_ids, compute))

    def save(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Any,
        *,
        layerwise: bool = False,
        computed_from: Sequence[Transfer] = (),
    ) -> Transfer:
        """Saves blocks: ``device_block_ids[i]`` becomes that of ``hashes[i]``. Ordering and lifetime as for
        :meth:`LayerwiseScheduler.offload`.

        Blocks that are present, or that another save is already bringing, are not moved again; the transfer carries the
        others. It is over when also the other transfers are that touch these device blocks now: behind its ``wait``,
        ``wait_on`` or ``wait_layer`` the blocks may be written again. Room is made by evicting others. What finds no
        room (the prompt is longer than the pool, or leases and transfers hold everything) is left out, from the end of
        the prompt: see :meth:`left_out`.

        Args:
            hashes: of :meth:`block_hashes`, also from the middle of a prompt.
            device_block_ids: as many sources.
            layerwise: see :meth:`LayerwiseScheduler.offload`.
            computed_from: the loads of the prefix that the model reads to compute these blocks. The blocks become
                visible when these are over too, and never if one of them fails: what was computed from it is not what
                the hashes promise.

        Raises:
            ValueError: as many ids as hashes are expected.
            TypeError: not a list of bytes, or of transfers, or not a bool.
            ClosedError: closed.
            As :meth:`LayerwiseScheduler.offload`, and what the policy raises. Then none of the blocks becomes visible.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> from paddle_kv.offload import KVOffloadManager
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
            >>> manager = KVOffloadManager(scheduler)
            >>> hashes = manager.block_hashes(range(9))
            >>> save = manager.save(hashes, [4, 0, 3], layerwise=True)
            >>> manager.lookup(hashes).num_blocks  # nothing is there before all of its bytes are
            0
            >>> for layer in range(2):
            ...     save.mark_layer_written(layer)
            >>> save.wait(); manager.lookup(hashes).num_blocks
            3
            >>> again = manager.save(hashes, [4, 0, 3])  # present: nothing moves
            >>> again.bytes, manager.stats()["deduplicated_blocks"]
            (0, 3)
            >>> manager.close(); scheduler.close()
        """
        keys = checked_hashes(hashes)
        device_ids = checked_targets(device_block_ids, len(keys), self.device_cache.num_blocks)
        check_bool(layerwise, "layerwise")
        loads = transfer_list(computed_from, "computed_from")
        compute = self._scheduler.compute_stream(None)  # of this thread
        start = functools.partial(self._books.save, keys, device_ids, loads, layerwise, compute)
        return self._scheduler.check_started(change(self._books, start))

    def blocks_full(
        self,
        hashes: Sequence[bytes],
        device_block_ids: Any,
        *,
        layerwise: bool = False,
        computed_from: Sequence[Transfer] = (),
    ) -> Transfer | None:
        """The server has filled these blocks. Write-through: :meth:`save`, with its arguments and errors. Write-back:
        nothing, and None."""
        if not self.write_through:
            return None
        return self.save(hashes, device_block_ids, layerwise=layerwise, computed_from=computed_from)

    def blocks_evicted(
        self, hashes: Sequence[bytes], device_block_ids: Any, *, computed_from: Sequence[Transfer] = ()
    ) -> Transfer:
        """The server is about to give these device blocks to somebody else: :meth:`save`, which with write-through
        finds most of them present. The blocks may be written again after ``wait_on`` or ``wait`` of the transfer.

        Args:
            hashes: of the blocks.
            device_block_ids: as many.
            computed_from: loads that nobody has waited for yet, see :meth:`save`.

        Raises:
            As :meth:`save`.
        """
        return self.save(hashes, device_block_ids, computed_from=computed_from)

    def blocks_to_recompute(self, load: Transfer) -> list[int]:
        """Positions in the ``hashes`` of that :meth:`onload` whose device blocks hold no usable data because it failed
        or was cancelled; empty for one that did not fail (so far: ask after it is over).

        Call ``mark_rewritten`` of the device cache on these blocks when the model writes them.

        Raises:
            ValueError: ``load`` is not a transfer of this manager's :meth:`onload`.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> from paddle_kv.offload import KVOffloadManager
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8))
            >>> manager = KVOffloadManager(scheduler, capacity_bytes=4 * 2 * spec.block_bytes)
            >>> hashes = manager.block_hashes(range(6))
            >>> manager.save(hashes, [0, 1]).wait()
            >>> hold = scheduler.offload([3], scheduler.host_pool.allocate(1), layerwise=True)  # device block 3 is busy
            >>> load = manager.onload(hashes, [2, 3])
            >>> load.cancel(); hold.cancel()
            >>> manager.blocks_to_recompute(load)
            [0, 1]
            >>> manager.close(); scheduler.close()
        """
        if not isinstance(load, Transfer) or load._movement not in self._books.loads:
            raise ValueError("load is not a transfer that this manager's onload has returned")
        return [] if load.error is None else load._movement.lost_positions

    def left_out(self, save: Transfer) -> list[int]:
        """Positions in the ``hashes`` of that :meth:`save` for which there was no room.

        Raises:
            ValueError: ``save`` is not a transfer of this manager's :meth:`save`.
        """
        found = self._books.left_out.get(save._movement) if isinstance(save, Transfer) else None
        if found is None:
            raise ValueError("save is not a transfer that this manager's save has returned")
        return list(found)

    def in_flight(self) -> list[Transfer]:
        """Its loads and saves that are not over, in order."""
        return [movement.handle() or Transfer(movement) for movement in change(self._books, self._books.in_flight)]

    def cancel_all(self) -> None:
        """:meth:`Transfer.cancel` of all of them."""
        change(self._books, self._books.cancel_all)

    # ---- the end ----
    def close(self) -> None:
        """Drops what its saves have not submitted yet, forgets all blocks and gives them back to the pool, which hands
        them out again once no transfer holds them. Again: does nothing."""
        change(self._books, self._books.close)
        self._books.end()

    def __enter__(self) -> KVOffloadManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reusable(self, keys: list[bytes], num_tokens: int | None) -> list[bytes]:
        if num_tokens is None:
            return keys
        num_tokens, full = arguments.integer(num_tokens, "num_tokens"), len(keys) * self._block_size
        if num_tokens < full:
            raise ValueError(f"num_tokens = {num_tokens} must be at least {full}, the tokens of {len(keys)} blocks")
        return keys[: max(0, num_tokens - 1) // self._block_size]
