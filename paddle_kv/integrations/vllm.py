"""The calls of vLLM's ``CacheEngine`` under their names, on a scheduler: ``swap_out``, ``swap_in``, ``copy``."""

from __future__ import annotations

import functools
import math
from typing import Any

from .. import ops
from ..checks import check_ids
from ..errors import CancelledError, TransferError
from ..ops import _arguments as arguments
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..tracking.group import change


class CacheEngine:
    """Moves blocks of all layers by mappings of block ids.

    Mappings are as for :func:`paddle_kv.ops.transfer_blocks`: ``{source: target}``, ``{source: [targets]}``, pairs, or
    an ``[n, 2]`` array or tensor. The transfers run in order with the model, and with each other where they share
    blocks; nothing has to be synchronised between ``swap_out`` and a ``swap_in`` of the same blocks.

    Args:
        scheduler: of the device cache and the host pool. Closing it stays with its owner.

    Raises:
        TypeError: not a scheduler.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import CacheEngine
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache = DeviceCache(spec, 5, "cpu")
        >>> cache.tensor("key", 1)[3] = 1.5
        >>> with LayerwiseScheduler(cache, HostPool(spec, 8)) as scheduler:
        ...     engine = CacheEngine(scheduler)
        ...     save, load = engine.swap_out({3: 6}), engine.swap_in([(6, 0)])
        ...     for layer in range(spec.num_layers):
        ...         load.wait_layer(layer)
        ...     engine.copy({0: [1, 2]})
        >>> cache.tensor("key", 1).numpy()[:, 0, 0, 0].tolist()
        [1.5, 1.5, 1.5, 1.5, 0.0]
    """

    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        check_scheduler(scheduler)
        self._scheduler = scheduler

    def swap_out(self, src_to_dst: Any) -> Transfer:
        """Device to host. The device blocks may be written again after ``wait_on()`` of the transfer.

        Raises:
            As :meth:`LayerwiseScheduler.offload`.
        """
        device_ids, host_ids = arguments.block_pairs(src_to_dst, "src_to_dst")
        return self._scheduler.offload(device_ids, host_ids)

    def swap_in(self, src_to_dst: Any) -> Transfer:
        """Host to device. The model may touch the device blocks of a layer after ``wait_layer`` of the transfer.

        Raises:
            As :meth:`LayerwiseScheduler.onload`.
        """
        host_ids, device_ids = arguments.block_pairs(src_to_dst, "src_to_dst")
        return self._scheduler.onload(host_ids, device_ids)

    def copy(self, src_to_dsts: Any) -> None:
        """Blocks to other blocks of the device cache, all layers and tensors, on the compute stream, after the
        transfers in flight that write its sources or touch its targets, whoever has started them.

        Raises:
            TransferError: a source holds no usable data after a transfer that failed.
            As :func:`paddle_kv.ops.copy_blocks`.
        """
        cache, stream = self._scheduler.device_cache, self._scheduler._default_stream
        sources, targets = arguments.block_pairs(src_to_dsts, "src_to_dsts")
        for ids in (sources, targets):
            check_ids(ids, "src_to_dsts", cache.num_blocks)
        for transfer in change(cache.domain, functools.partial(_conflicts, cache.domain, sources, targets)):
            try:
                transfer.wait_on(stream)
            except (TransferError, CancelledError):
                transfer.wait_over()
        change(cache.domain, functools.partial(cache.domain.check, sources, "device cache", writing=False))
        layers = range(cache.spec.num_layers)
        tensors = [_as_cache(cache.tensor(name, layer)) for name in cache.spec.tensor_names for layer in layers]
        ops.copy_blocks(tensors, None, src_to_dsts, stream=stream)
        cache.mark_rewritten(targets)


def _conflicts(domain: Any, sources: list[int], targets: list[int]) -> list[Transfer]:
    found = [*domain.users(sources, writing=False), *domain.users(targets, writing=True)]
    movements = dict.fromkeys(movement for _, movement, _ in found)
    return [movement.handle() or Transfer(movement) for movement in movements]


def _as_cache(tensor: Any) -> Any:
    """The same memory with a rank that operators take for a cache: scales may have one value per block."""
    if 3 <= tensor.ndim <= 5:
        return tensor
    return tensor.view([tensor.shape[0], 1, math.prod(tensor.shape[1:])])
