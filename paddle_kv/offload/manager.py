"""What a server calls to keep prompt prefixes in host memory: find, load, save."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from ..checks import check_ids
from ..memory import HostPool
from ..ops import _arguments as arguments
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer, transfer_list
from .hashing import BlockHasher, spec_salt
from .index import BlockIndex
from .policies import make_policy
from .policy import Policy

_COUNTERS = (
    "lookups",
    "looked_up_blocks",
    "hit_blocks",
    "saved_blocks",
    "deduplicated_blocks",
    "left_out_blocks",
    "loaded_blocks",
    "failed_saves",
    "failed_loads",
)


class Lease:
    """Blocks that :meth:`KVOffloadManager.lookup` has found. They are not evicted until it is released: by
    :meth:`release`, at the end of a ``with`` block, or when nobody refers to it any more.

    Attributes:
        hashes: of the blocks, the longest prefix that is present.
        num_blocks: how many.

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

    _held = False  # so for one whose construction was interrupted

    def __init__(self, manager: KVOffloadManager, hashes: list[bytes]) -> None:
        self.hashes = hashes
        self._manager = manager
        self._held = True

    @property
    def num_blocks(self) -> int:
        """How many blocks it has, after :meth:`keep_first` those that it kept."""
        return len(self.hashes)

    def keep_first(self, num_blocks: int) -> None:
        """Releases all but the first so many, for a server that uses only those.

        Raises:
            TypeError: not an integer.
            ValueError: it does not hold so many.
        """
        num_blocks = arguments.integer(num_blocks, "num_blocks")
        if not 0 <= num_blocks <= len(self.hashes):
            raise ValueError(f"num_blocks = {num_blocks} must be in [0, {len(self.hashes)}]")
        self._manager._release_behind(self, num_blocks)

    def release(self) -> None:
        """The blocks may be evicted again. Again: does nothing."""
        self._manager._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # May run in the middle of anything, also of a call of this manager: it only leaves a note.
        if self._held:
            self._manager._lost.append(self.hashes)


class _Moving:
    """A transfer in flight, and the blocks that it holds. A save fails with the loads that it was computed from."""

    def __init__(
        self, transfer: Transfer, keys: Sequence[bytes], *, saving: bool, computed_from: Sequence[Transfer] = ()
    ) -> None:
        self.transfer = transfer
        self.keys = keys
        self.saving = saving
        self._computed_from = computed_from

    def done(self) -> bool:
        return self.transfer.done() and all(load.done() for load in self._computed_from)

    @property
    def failed(self) -> bool:
        return any(transfer.error is not None for transfer in (self.transfer, *self._computed_from))


class KVOffloadManager:
    """Blocks in host memory, found by the hash of their tokens and of all tokens before them.

    Args:
        scheduler: moves the blocks; its host pool is where they are kept. The manager takes blocks of the pool as it
            needs them and gives them back when they are evicted, when a save fails, and by :meth:`close`. It neither
            closes the scheduler nor the pool.
        policy: which block goes when room is needed: "lru", "arc", "s3fifo", or a fresh object with the methods of
            :class:`~paddle_kv.offload.Policy`.
        write_through: what :meth:`blocks_full` and :meth:`blocks_evicted` do.
        salt: what the content of a block depends on besides its tokens and the cache's spec (always part of the hash):
            the model and its revision, the LoRA adapter, the tensor-parallel rank; see :func:`cache_salt`.
        capacity_bytes: how much of the pool to use at most; None: all of it.

    Raises:
        TypeError: not a scheduler, a policy or a salt.
        ValueError: an unknown policy, or ``capacity_bytes`` below one block (all layers).

    Any thread may call; calls are serialised.

    A block is found from the moment on at which its bytes have arrived in host memory: not before its save is over, and
    never if that failed or was cancelled. While a transfer or a lease holds a block, it is not evicted.

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
        policy: str | Policy[bytes] = "lru",
        write_through: bool = True,
        salt: bytes = b"",
        capacity_bytes: int | None = None,
    ) -> None:
        check_scheduler(scheduler)
        spec = scheduler.device_cache.spec
        self._scheduler = scheduler
        self._pool: HostPool = scheduler.host_pool
        self._block_bytes = spec.block_bytes * spec.num_layers
        capacity_blocks = self._pool.num_blocks
        if capacity_bytes is not None:
            capacity_blocks = min(
                capacity_blocks, arguments.integer(capacity_bytes, "capacity_bytes") // self._block_bytes
            )
        if capacity_blocks < 1:
            raise ValueError(f"capacity_bytes = {capacity_bytes} must be at least one block, {self._block_bytes}")
        if isinstance(policy, str):
            policy = make_policy(policy, capacity_blocks)
        elif isinstance(policy, type) or not callable(getattr(policy, "victim", None)):
            raise TypeError(f"policy is {policy!r}; a name or an object with the methods of Policy is expected")
        if not isinstance(salt, (bytes, bytearray)):
            raise TypeError(f"salt is {type(salt).__name__}; bytes are expected")
        self.write_through = write_through
        self._hasher = BlockHasher(spec.block_size, spec_salt(spec) + salt)
        self._index: BlockIndex[bytes] = BlockIndex(policy, capacity_blocks)
        self._taken: set[int] = set()  # blocks of the pool that are the manager's, also between two places
        self._lock = threading.RLock()
        self._moving: list[_Moving] = []
        self._targets: weakref.WeakKeyDictionary[Transfer, list[int]] = weakref.WeakKeyDictionary()
        self._lost: list[list[bytes]] = []  # of leases that nobody released; appended without the lock
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._closed = False

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

    def lookup(self, hashes: Sequence[bytes]) -> Lease:
        """The longest prefix of ``hashes`` that is present, held against eviction until the lease is released.

        Counts as a use of these blocks, so call it once per request. Looks at the transfers in flight and waits for
        none.

        Args:
            hashes: of :meth:`block_hashes`, from the first block on.

        Raises:
            TypeError: not a list of bytes.
            RuntimeError: closed.
        """
        keys = _checked_hashes(hashes)
        with self._lock:
            self._settle()
            found = keys[: self._index.lookup(keys)]
            self._index.pin(found)
            self._counters["lookups"] += 1
            self._counters["looked_up_blocks"] += len(keys)
            self._counters["hit_blocks"] += len(found)
            return Lease(self, found)

    # ---- transfers ----
    def onload(self, hashes: Sequence[bytes], device_block_ids: Any) -> Transfer:
        """Loads blocks: that of ``hashes[i]`` to ``device_block_ids[i]``. Ordering and lifetime as for
        :meth:`LayerwiseScheduler.onload`.

        The blocks are held until the transfer is over; a lease on them may be released as soon as this has returned. If
        the transfer fails, :meth:`blocks_to_recompute` says what the server has to compute instead; the blocks in host
        memory stay.

        Args:
            hashes: ``lease.hashes``, or some of them; none at all is a transfer that is over at once.
            device_block_ids: as many targets, each once, in the forms that :meth:`LayerwiseScheduler.offload` takes.

        Raises:
            KeyError: a block is not present. Nothing has moved.
            ValueError: as many ids as hashes are expected.
            TypeError: not a list of bytes.
            RuntimeError: closed.
            As :meth:`LayerwiseScheduler.onload`.
        """
        keys = _checked_hashes(hashes)
        device_ids = self._device_ids(device_block_ids, len(keys))
        with self._lock:
            self._settle()
            slots, arriving = self._index.slots, self._index.arriving
            for position, key in enumerate(keys):
                if key not in slots or key in arriving:
                    raise KeyError(f"hashes[{position}] = {key.hex()} is not present; load what lookup() has found")
            transfer = self._scheduler.onload([slots[key] for key in keys], device_ids)
            self._index.pin(keys)
            self._moving.append(_Moving(transfer, keys, saving=False))
            self._targets[transfer] = device_ids
            self._counters["loaded_blocks"] += len(keys)
            return transfer

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
        others (none of them: it is over at once). Room is made by evicting. What finds no room (the prompt is longer
        than the pool, or leases and transfers hold everything) is left out: the cache may always forget, and
        :meth:`lookup` tells what it has.

        Args:
            hashes: of :meth:`block_hashes`, also from the middle of a prompt.
            device_block_ids: as many sources.
            layerwise: see :meth:`LayerwiseScheduler.offload`.
            computed_from: the loads of the prefix that the model reads to compute these blocks. The blocks become
                visible when these are over too, and never if one of them fails: what was computed from it is not what
                the hashes promise.

        Raises:
            ValueError: as many ids as hashes are expected.
            TypeError: not a list of bytes, or of transfers.
            RuntimeError: closed.
            As :meth:`LayerwiseScheduler.offload`. Then none of the blocks becomes visible.

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
        keys = _checked_hashes(hashes)
        device_ids = self._device_ids(device_block_ids, len(keys))
        loads = transfer_list(computed_from, "computed_from")
        with self._lock:
            self._settle()
            source = dict(zip(keys, device_ids, strict=True))
            index = self._index
            before = {key: index.slots[key] for key in source if key in index.slots}
            free_slots = self._take_slots(len(source) - len(before))
            admitted: dict[bytes, int] | None = None
            try:
                admitted = index.admit(list(source), free_slots)  # takes all: as many blocks at least are absent
                index.arriving.update(admitted)
                transfer = self._scheduler.offload(
                    [source[key] for key in admitted], list(admitted.values()), layerwise=layerwise
                )
                index.pin(admitted)
                self._moving.append(_Moving(transfer, list(admitted), saving=True, computed_from=loads))
            except BaseException:  # also from a policy of the user, or a signal handler: nothing may seem to be there
                new = [key for key in source if key in index.slots and index.slots[key] != before.get(key)]
                self._give_back([*free_slots, *index.undo(new if admitted is None else admitted)])
                raise
            left_out = sum(key not in index.slots for key in source) if len(admitted) < len(source) else 0
            self._counters["saved_blocks"] += len(admitted)
            self._counters["deduplicated_blocks"] += len(source) - len(admitted) - left_out
            self._counters["left_out_blocks"] += left_out
            return transfer

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
        if load not in self._targets:
            raise ValueError("load is not a transfer that this manager's onload has returned")
        device_ids = self._targets[load]
        return [] if load.error is None else list(range(len(device_ids)))

    # ---- room ----
    def evict(self, num_blocks: int) -> int:
        """Lets go of up to ``num_blocks`` blocks, in the order of the policy, and gives them back to the pool. Returns
        how many; blocks that leases or transfers hold stay.

        Raises:
            TypeError: not an integer.
            ValueError: negative.
            RuntimeError: closed.
        """
        num_blocks = arguments.integer(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks = {num_blocks} must not be negative")
        with self._lock:
            self._settle()
            slots = self._index.evict(num_blocks)
            self._give_back(slots)
            return len(slots)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can be kept at the same time."""
        return self._index.capacity_blocks

    @property
    def capacity_bytes(self) -> int:
        """Bytes of host memory that they take."""
        return self._index.capacity_blocks * self._block_bytes

    def stats(self) -> dict[str, int | float]:
        """Counts since the manager was made (blocks, calls, bytes), and what it holds now: the names are in
        ``docs/offload.md``. Works after :meth:`close`."""
        with self._lock:
            if not self._closed:
                self._settle()
            index = self._index
            counters = self._counters
            return {
                **counters,
                "hit_rate": counters["hit_blocks"] / max(1, counters["looked_up_blocks"]),
                "saved_bytes": counters["saved_blocks"] * self._block_bytes,
                "loaded_bytes": counters["loaded_blocks"] * self._block_bytes,
                "evicted_blocks": index.evicted_blocks,
                "blocks": len(index.slots) - len(index.arriving),
                "saving_blocks": len(index.arriving),
                "pinned_blocks": len(index.pins),
                "used_bytes": len(index.slots) * self._block_bytes,
                "capacity_blocks": self.capacity_blocks,
                "capacity_bytes": self.capacity_bytes,
            }

    def close(self) -> None:
        """Drops what its saves have not submitted yet, forgets all blocks and gives them back to the pool, which hands
        them out again once no transfer holds them. Again: does nothing."""
        with self._lock:
            self._closed = True
            try:
                for moving in self._moving:
                    if moving.saving:
                        moving.transfer.cancel()
            finally:
                self._moving.clear()
                for blocks in (self._index.slots, self._index.arriving, self._index.pins):
                    blocks.clear()
                self._give_back(list(self._taken))

    # ---- under the lock ----
    def _settle(self) -> None:
        """Looks at the transfers in flight: what has arrived becomes visible, what failed is forgotten."""
        if self._closed:
            raise RuntimeError("the offload manager is closed")
        while self._lost:
            self._index.unpin(self._lost.pop())
        running = []
        for moving in self._moving:
            if not moving.done():
                running.append(moving)
                continue
            self._index.unpin(moving.keys)
            failed = moving.failed
            if not moving.saving:
                self._counters["failed_loads"] += failed
                continue
            self._index.arriving.difference_update(moving.keys)
            if failed:
                self._counters["failed_saves"] += 1
                self._forget(moving.keys)
        self._moving = running

    def _release_behind(self, lease: Lease, num_blocks: int) -> None:
        with self._lock:
            kept, dropped = lease.hashes[:num_blocks], lease.hashes[num_blocks:]
            lease.hashes = kept
            if lease._held and not self._closed:
                self._index.unpin(dropped)

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease._held and not self._closed:
                self._index.unpin(lease.hashes)
            lease._held = False

    def _forget(self, keys: Iterable[bytes]) -> None:
        self._give_back([self._index.remove(key) for key in keys])

    def _take_slots(self, num_absent: int) -> list[int]:
        room = self._index.capacity_blocks - len(self._index.slots)
        slots = self._pool.allocate(max(0, min(num_absent, room, self._pool.num_free_blocks)))
        self._taken.update(slots)
        return slots[::-1]  # taken from the end: neighbours of a prompt become neighbours here, in the same order

    def _give_back(self, slots: list[int]) -> None:
        self._taken.difference_update(slots)
        if slots and not self._pool.closed:
            self._pool.free(slots)

    def _device_ids(self, device_block_ids: Any, num_hashes: int) -> list[int]:
        ids = arguments.block_ids(device_block_ids, "device_block_ids")
        if len(ids) != num_hashes:
            raise ValueError(
                f"hashes has {num_hashes} blocks, device_block_ids has {len(ids)}; both need the same number"
            )
        check_ids(ids, "device_block_ids", self._scheduler.device_cache.num_blocks)
        return ids


def _checked_hashes(hashes: Sequence[bytes]) -> list[bytes]:
    if isinstance(hashes, (bytes, str)) or not isinstance(hashes, Sequence):
        raise TypeError(f"hashes is {type(hashes).__name__}; a list of bytes is expected")
    if not set(map(type, hashes)) <= {bytes}:
        position = next(i for i, key in enumerate(hashes) if type(key) is not bytes)
        raise TypeError(f"hashes[{position}] is {type(hashes[position]).__name__}; bytes are expected")
    return list(hashes)
