"""The transfer calls of FastDeploy's cache manager (``fastdeploy/cache_manager/v1``) under their names, on a scheduler.

What differs: the data moves on streams of its own, in order with the model and with every other transfer; a failure
raises (there: False, and the layer counts as done); an event stands for the layer that it was recorded for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CancelledError, TransferError
from ..memory import HostPool
from ..ops import _arguments as arguments
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..tiers import Tier
from ..tracking.group import change
from ..values import check_callable
from .fastdeploy_maps import adopt
from .fastdeploy_storage import CLOSE_S, StorageTask, TierStorage, part_of


class LayerEvent:
    """Stands for one layer of a load, where FastDeploy keeps a CUDA event."""

    def __init__(self, load: Transfer, layer: int) -> None:
        self._load = load
        self._layer = layer

    def synchronize(self) -> None:
        """What the model does from now on sees the layer: :meth:`Transfer.wait_layer`, so on a GPU the host goes on.

        Raises:
            TransferError: the load failed.
        """
        self._load.wait_layer(self._layer)


class CacheTransferManager:
    """``evict_to_host_async``, ``load_layers_to_device_async`` and ``record_input_stream_event``.

    Args:
        scheduler: of the device cache and the host pool whose block ids are passed. Closing it stays with its owner;
            :meth:`from_maps` makes one.
        tier: over the scheduler's host pool, serves the calls of storage; None: they raise. It stays its owner's.

    Any thread may call. Calls of several threads happen in some order: where one gives away what another reads, the
    server has to order them (docs/guides/fastdeploy.md).

    Raises:
        TypeError: not a scheduler, or not a tier.
        ValueError: the tier has another host pool, or layers of the device cache share buffers.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import CacheTransferManager
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> with LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)) as scheduler:
        ...     manager, events = CacheTransferManager(scheduler), []
        ...     save = manager.evict_to_host_async([3], [6])
        ...     load = manager.load_layers_to_device_async(
        ...         range(2), [6], [0], lambda layer: events.append(manager.record_input_stream_event()))
        ...     for event in events:
        ...         event.synchronize()  # then the layer
        ...     manager.sync_input_stream(), manager.sync_output_stream()
        (None, None)
    """

    def __init__(self, scheduler: LayerwiseScheduler, *, tier: Tier | None = None) -> None:
        check_scheduler(scheduler)
        cache = scheduler.device_cache
        if cache.is_ring:  # FastDeploy says of no layer that it was read: the next one would never come
            raise ValueError(
                f"the device cache has layer_buffers = {cache.layer_buffers} for {cache.spec.num_layers} layers; "
                "a cache in which each layer has its own memory is expected"
            )
        self._scheduler = scheduler
        self._storage = None if tier is None else TierStorage(tier)
        if tier is not None and tier.pool is not scheduler.host_pool:
            raise ValueError("the scheduler and the tier have different host pools")
        self._owns_scheduler = False
        self._local_rank, self._device_id = 0, scheduler.device_cache.device_id or 0
        self._loads, self._saves = _Unfinished(scheduler), _Unfinished(scheduler)
        self._of_thread = threading.local()  # the event of the layer that is being submitted

    @classmethod
    def from_maps(
        cls,
        cache_kvs_map: Mapping[str, Any],
        host_cache_kvs_map: Mapping[str, int] | None = None,
        *,
        num_host_blocks: int,
        local_rank: int = 0,
        device_id: int = 0,
        host_strides_bytes: Mapping[str, int] | None = None,
        make_tier: Callable[[HostPool], Tier] | None = None,
        **scheduler_options: Any,
    ) -> CacheTransferManager:
        """A manager over what FastDeploy's controller has: maps ``key_caches_{layer}_rank{rank}.device{device}`` ->
        tensor or address, in the same way ``value_caches`` (none, or None, for MLA), ``key_cache_scales``,
        ``value_cache_scales``, ``indexer_caches``, and whatever else belongs to a block under such a name. All of it is
        moved with the block, draft (MTP) layers too, whose tensors may have more blocks.

        Args:
            cache_kvs_map: the tensors, kept alive. Keys are ``[blocks, heads, tokens, size]``; without values
                ``[blocks, 1, tokens, width]`` or ``[blocks, tokens, width]``.
            host_cache_kvs_map: the addresses of host memory, each of ``num_host_blocks`` blocks; it has to live until
                :meth:`close`. None: it is allocated here.
            num_host_blocks: FastDeploy's ``num_cpu_blocks``.
            local_rank: the rank in the names.
            device_id: the device in the names.
            host_strides_bytes: where the layers of a block lie together, see :meth:`HostPool.adopt`; the names are
                ``key`` (``latent`` without values), ``value``, and the others as above.
            make_tier: makes the tier that serves the calls of storage, over the host pool that it is given;
                :meth:`close` closes it. Memory that is allocated here is block-first then, as tiers need it.
            scheduler_options: of :class:`LayerwiseScheduler`.

        Raises:
            TypeError: no mappings, no tensors, a rank or a device that is no integer, or ``make_tier`` is no function.
            ValueError: a name of another form, a layer or a role that one of the maps lacks, shapes that differ between
                layers, and as :meth:`DeviceCache.adopt` and :meth:`HostPool.adopt`.

        Example:
            >>> import paddle
            >>> from paddle_kv.integrations import CacheTransferManager
            >>> names = [f"{role}_{layer}_rank0.device0" for layer in (0, 1) for role in ("key_caches", "value_caches")]
            >>> caches = {name: paddle.zeros([4, 2, 3, 8]) for name in names}
            >>> with CacheTransferManager.from_maps(caches, num_host_blocks=6) as manager:
            ...     save = manager.evict_to_host_async([3], [5])
            ...     [manager.get_stats()[name] for name in ("num_layers", "num_host_blocks", "offload_transfers")]
            [2, 6, 1]
        """
        if make_tier is not None:
            check_callable(make_tier, "make_tier", "a function of the host pool, or None,")
        local_rank = arguments.integer(local_rank, "local_rank")
        device_id = arguments.integer(device_id, "device_id")
        cache, pool = adopt(
            cache_kvs_map,
            host_cache_kvs_map,
            num_host_blocks,
            (local_rank, device_id),
            host_strides_bytes,
            layout=None if make_tier is None else "block_first",
        )
        with contextlib.ExitStack() as failed:  # closes what was made, in the other order
            failed.enter_context(pool)
            scheduler = failed.enter_context(LayerwiseScheduler(cache, pool, **scheduler_options))
            made = cls(scheduler, tier=None if make_tier is None else make_tier(pool))
            failed.pop_all()
        made._owns_scheduler = True
        made._local_rank, made._device_id = local_rank, device_id
        return made

    @property
    def scheduler(self) -> LayerwiseScheduler:
        """What moves the blocks."""
        return self._scheduler

    @property
    def num_layers(self) -> int:
        """Of the model and of its draft: what a load loads."""
        return self._scheduler.device_cache.spec.num_layers

    def close(self) -> None:
        """Waits for its transfers and for its calls of storage; then, of a manager of :meth:`from_maps`, closes tier,
        scheduler and pool. Host memory may be freed, and tensors of the same memory be adopted again, only behind it.
        Again: does nothing.

        Raises:
            TimeoutError: the engine of the tier still has host blocks. Close the engine, then call again.
        """
        self._loads.wait_over()
        self._saves.wait_over()
        if self._storage is not None:
            self._storage.close()
        if self._owns_scheduler:
            if self._storage is not None:
                self._storage.tier.close(CLOSE_S)
                self._storage.tier.drain(0.0)  # what the engine may still touch is not freed
            self._scheduler.close()
            self._scheduler.host_pool.close()

    def __enter__(self) -> CacheTransferManager:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def get_stats(self) -> dict[str, Any]:
        """What FastDeploy's class tells under the names that it uses, and :meth:`LayerwiseScheduler.stats`."""
        spec = self._scheduler.device_cache.spec
        return {
            "num_layers": spec.num_layers,
            "local_rank": self._local_rank,
            "device_id": self._device_id,
            "cache_dtype": spec.dtype,
            "num_host_blocks": self._scheduler.host_pool.num_blocks,
            "has_device_cache": True,
            "has_host_cache": True,
            "is_fp8": "key_cache_scales" in spec.extra,
            **self._scheduler.stats(),
        }

    def evict_to_host_async(
        self, device_block_ids: Any, host_block_ids: Any, *, order_compute: bool = True
    ) -> Transfer:
        """Saves all layers. The transfer that it returns is true, as the bool there, and need not be kept: loads, and
        what the model does from now on, come behind it. On a GPU the host is held until the copies have come near.

        Args:
            order_compute: False: the call returns at once, and the device blocks may be written again only after
                ``wait_on()`` of the transfer.

        Raises:
            TransferError: it has failed already; nothing of it runs any more.
            As :meth:`LayerwiseScheduler.offload`.
        """
        save = self._saves.add(self._scheduler.offload(device_block_ids, host_block_ids))
        if order_compute:
            try:
                save.wait_on()
            except (TransferError, CancelledError):
                save.wait_over()
                self._saves.forget(save)  # told here
                raise
        return save

    def load_layers_to_device_async(
        self,
        layer_indices: Any,
        host_block_ids: Any,
        device_block_ids: Any,
        on_layer_complete: Callable[[int], object] | None = None,
    ) -> Transfer:
        """Loads these layers; ``on_layer_complete(layer)`` is called for each, in their order, when the load has been
        submitted, and may call :meth:`record_input_stream_event` for the event of that layer. Returns the transfer
        (true). Layers that are left out stay as they are: a block that was not loaded before needs all of
        :attr:`num_layers`.

        Raises:
            TypeError: ``on_layer_complete`` cannot be called.
            IndexError: there is no such layer.
            ValueError: a layer is named twice. Nothing has moved.
            As :meth:`LayerwiseScheduler.onload`, and what ``on_layer_complete`` raises.
        """
        if on_layer_complete is not None:
            check_callable(on_layer_complete, "on_layer_complete", "a function of the layer, or None,")
        layers = arguments.checked_block_ids(layer_indices, "layer_indices", self.num_layers, distinct=True)
        some = None if set(layers) == set(range(self.num_layers)) else layers
        load = self._loads.add(self._scheduler.onload(host_block_ids, device_block_ids, layers=some))
        if on_layer_complete is not None:
            try:
                for layer in layers:
                    self._of_thread.event = LayerEvent(load, layer)
                    on_layer_complete(layer)
            finally:
                self._of_thread.event = None
        return load

    def record_input_stream_event(self) -> Any:
        """In ``on_layer_complete``, in its thread: a :class:`LayerEvent` of that layer. Elsewhere an event behind all
        loads so far, as :meth:`LayerwiseScheduler.record_event`."""
        return getattr(self._of_thread, "event", None) or self._scheduler.record_event("onload")

    def sync_input_stream(self) -> None:
        """Blocks the host until all loads so far are over.

        Raises:
            TransferError: one of them failed.
        """
        self._loads.wait()

    def sync_output_stream(self) -> None:
        """Blocks the host until all saves so far are over.

        Raises:
            TransferError: one of them failed.
        """
        self._saves.wait()

    # ---- storage ----
    def prefetch_from_storage(self, metadata: Any) -> StorageTask:
        """Brings blocks from the tier into host memory: ``metadata.hash_values`` into ``metadata.block_ids``, within
        ``metadata.timeout`` seconds. Returns at once. Until the task is completed nobody may touch these host blocks;
        those that did not come hold no usable data.

        Raises:
            TypeError: not such a metadata, or what it has is no list of hashes or no list of ids.
            IndexError: a host block is outside the pool.
            ValueError: another number of blocks than of hashes, or a block named twice. Nothing has moved.
            NotImplementedError: there is no tier.
            ClosedError, ForkedError: the manager is closed, or of the process before a fork.
        """
        storage = self._of_storage("prefetch_from_storage")
        return storage.begin(storage.plan(metadata, part_of(metadata, "block_ids"), write=True))

    def backup_device_to_storage(self, device_block_ids: Any, metadata: Any) -> StorageTask:
        """Saves blocks of the device as ``metadata.hash_values``, through the host blocks ``metadata.block_ids``:
        :meth:`evict_to_host_async`, then :meth:`backup_host_to_storage`.

        Raises:
            As these two. Nothing has moved, unless it is a TransferError.
        """
        storage = self._of_storage("backup_device_to_storage")
        task = storage.plan(metadata, part_of(metadata, "block_ids"), write=False)
        self.evict_to_host_async(device_block_ids, metadata.block_ids)
        return storage.begin(task)

    def backup_host_to_storage(self, host_block_ids: Any, metadata: Any) -> StorageTask:
        """Stores host blocks in the tier as ``metadata.hash_values``, behind the saves that bring them, within
        ``metadata.timeout`` seconds. Returns at once. Until the task is completed nobody may write these host blocks.

        Raises:
            TypeError: not such a metadata, or what it has is no list of hashes or no list of ids.
            IndexError: a host block is outside the pool.
            ValueError: another number of blocks than of hashes, or a block named twice. Nothing has moved.
            NotImplementedError: there is no tier.
            ClosedError, ForkedError: the manager is closed, or of the process before a fork.
        """
        storage = self._of_storage("backup_host_to_storage")
        return storage.begin(storage.plan(metadata, host_block_ids, write=False))

    def _of_storage(self, call: str) -> TierStorage:
        if self._storage is None:
            raise NotImplementedError(
                f"{call} needs a storage below host memory, and this manager has none: give it a paddle_kv.tiers.Tier "
                "of its host pool (tier=, or make_tier= of from_maps)"
            )
        return self._storage


class _Unfinished:
    """Transfers of one direction that nobody has waited for; of those that failed the first. Changes in sections."""

    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        self._scheduler = scheduler
        self._transfers: list[Transfer] = []
        self._failed: Transfer | None = None

    def add(self, transfer: Transfer) -> Transfer:
        change(self._scheduler, functools.partial(self._add, transfer))
        return transfer

    def _add(self, transfer: Transfer) -> None:
        self._failed = self._failed or next((one for one in self._transfers if _ended(one) and one.failed), None)
        self._transfers = [*(one for one in self._transfers if not _ended(one)), transfer]

    def wait_over(self) -> tuple[Transfer | None, list[Transfer]]:
        """Returns the failed one, and those that were waited for."""
        failed, waited = change(self._scheduler, lambda: (self._failed, self._transfers))
        for transfer in waited:
            transfer.wait_over()
        return failed, waited

    def wait(self) -> None:
        failed, waited = self.wait_over()
        change(self._scheduler, functools.partial(self._forget, failed, waited))
        for told in (failed, *waited):
            error = None if told is None else told.error
            if error is not None:
                raise error

    def forget(self, transfer: Transfer) -> None:
        change(self._scheduler, functools.partial(self._forget, transfer, [transfer]))

    def _forget(self, failed: Transfer | None, waited: list[Transfer]) -> None:
        self._transfers = [one for one in self._transfers if one not in waited]
        self._failed = None if self._failed is failed else self._failed


def _ended(transfer: Transfer) -> bool:
    return transfer.state.is_end
