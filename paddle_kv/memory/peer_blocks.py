"""The device cache of another process, in the place of a host pool."""

from __future__ import annotations

from typing import Any, NoReturn

from .device_cache import DeviceCache
from .exported import Exported
from .host_pool import HostPool


class PeerBlocks(HostPool):
    """The blocks of a cache that another process has exported: a scheduler saves straight into them, from the own
    device to the other one's memory, with nothing in between.

    It is what a :class:`~paddle_kv.peers.Sender` needs of a receiver that takes blocks in its device cache. The blocks
    are the other process's: :meth:`allocate` finds none. Uses of a block are tracked in each process for itself.

    Args:
        cache: of :meth:`DeviceCache.attach`. It is kept, and with it the memory, until nothing refers to this object:
            transfers in flight do.

    Raises:
        TypeError: not a device cache.

    Example:
        >>> from paddle_kv import DeviceCache, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.peers import PeerBlocks
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> theirs = DeviceCache(spec, 5, "cpu", shared=True)
        >>> blocks = PeerBlocks(DeviceCache.attach(spec, theirs.export()))  # in another process
        >>> own = DeviceCache(spec, 8, "cpu")
        >>> own.tensor("key", 1)[7] = 1.5
        >>> with LayerwiseScheduler(own, blocks) as scheduler:
        ...     scheduler.offload([7], [2]).wait(timeout_s=10)
        >>> theirs.tensor("key", 1)[2].numpy().max()
        np.float32(1.5)
    """

    def __init__(self, cache: DeviceCache) -> None:
        if not isinstance(cache, DeviceCache):
            raise TypeError(f"cache is {type(cache).__name__}; a DeviceCache is expected")
        self._set_up(cache.spec, cache.num_blocks)
        self._cache = cache
        self.in_host_memory = cache.device_id is None
        self.on_other_gpu = cache.on_other_gpu
        for name in cache.spec.tensor_names:
            self._pointers[name] = [cache.pointer(name, layer) for layer in range(cache.spec.num_layers)]
            self._strides[name] = cache.stride_bytes(name)
        self._attach(cache.extents())
        self._free.allocate(self.num_blocks)
        self._attached = True

    @property
    def memory_id(self) -> str:
        """Names the memory, the same in each process that has it."""
        return self._cache.memory_id

    def export(self) -> Exported:
        """That of the cache. Raises as :meth:`DeviceCache.export`."""
        return self._cache.export()

    def bytes_at(self, address: int, size_bytes: int) -> Any:
        """As that of a pool, where the cache is in memory of the CPU."""
        return super().bytes_at(address, size_bytes) if self.in_host_memory else self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("the host cannot look into device memory")
