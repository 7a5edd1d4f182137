"""Some of the heads of a cache or a pool, for sides of a hand-over with different tensor-parallel sizes.

The blocks are those of the whole; of each only the bytes of these heads are moved. Where heads are the outermost
dimension of a block (HND, packed) they are one piece of it; in NHD they are a piece for each token.
"""

from __future__ import annotations

from typing import Any, NoReturn, overload

from ..ops import _arguments as arguments
from .device_cache import DeviceCache
from .exported import Exported
from .free_extents import FreeExtents
from .host_pool import HostPool


@overload
def heads_of(memory: DeviceCache, first: int, count: int) -> DeviceCache: ...
@overload
def heads_of(memory: HostPool, first: int, count: int) -> HostPool: ...
def heads_of(memory: Any, first: int, count: int) -> DeviceCache | HostPool:
    """Heads ``first`` to ``first + count - 1`` of a device cache, or of a pool of another process.

    Schedulers on it move these bytes of each block. It has the spec of a rank with ``count`` heads, the block ids of
    the whole, and no blocks or tensors of its own; the whole is kept alive. Block by block it is tracked as the whole
    is: transfers of different heads of one block follow each other.

    Args:
        memory: the whole: a cache of this process, or what it has attached: ``HostPool.attach``, or
            :class:`~paddle_kv.peers.PeerBlocks`.
        first, count: a range of its heads.

    Raises:
        TypeError: neither a cache nor a pool.
        ValueError: not heads that it has; a latent cache, a ring, a pool of this process, a part; a tensor of ``extra``
            that has no heads.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.peers import heads_of
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=4, block_size=3, dtype="float32")
        >>> pool = HostPool(spec, 8, shared=True)
        >>> rank = DeviceCache(spec.with_heads(1), 5, "cpu")  # of two
        >>> rank.tensor("key", 1)[4] = 1.5
        >>> upper = heads_of(HostPool.attach(spec, pool.export()), 1, 1)  # in another process
        >>> with LayerwiseScheduler(rank, upper) as scheduler:
        ...     scheduler.offload([4], [6]).wait(timeout_s=10)
        >>> pool.view("key", 1, 6).max(axis=(1, 2)).tolist()
        [0.0, 1.5]
        >>> pool.close()
    """
    if not isinstance(memory, (DeviceCache, HostPool)):
        raise TypeError(f"memory is {type(memory).__name__}; a DeviceCache or a HostPool is expected")
    first, count = arguments.integer(first, "first"), arguments.integer(count, "count")
    most = memory.spec.num_kv_heads
    if first < 0 or not 1 <= count <= most - first:
        raise ValueError(f"first = {first} and count = {count} must be at least one of {most} heads")
    if memory.is_part:
        raise ValueError("memory is a part; take the heads of the whole")
    if isinstance(memory, DeviceCache):
        return _CacheHeads(memory, first, count)
    return _PoolHeads(memory, first, count)


class _CacheHeads(DeviceCache):
    is_part = True

    def __init__(self, whole: DeviceCache, first: int, count: int) -> None:
        if whole.is_ring:
            raise ValueError("memory is a ring of layer buffers, which is not handed over")
        self.spec = whole.spec.with_heads(count)
        self._whole = whole
        self.num_blocks = whole.num_blocks
        self.device_id = whole.device_id
        self.layer_buffers, self.is_ring = whole.layer_buffers, False
        self.domain = whole.domain
        self._pointers = {name: _moved(whole, name, first) for name in whole.spec.tensor_names}

    def stride_bytes(self, name: str) -> int:
        return self._whole.stride_bytes(name)

    def piece_stride_bytes(self, name: str) -> int:
        return self._whole.piece_stride_bytes(name)

    @property
    def memory_id(self) -> str:
        return self._whole.memory_id

    def export(self) -> Exported:
        raise ValueError("these are some of the heads of a cache; export the whole")

    def tensor(self, name: str, layer: int) -> NoReturn:
        raise NotImplementedError("some of the heads of a cache are no Paddle tensor; take that of the whole")


class _PoolHeads(HostPool):
    is_part = True

    def __init__(self, whole: HostPool, first: int, count: int) -> None:
        if not whole._attached:
            raise ValueError("memory is a pool of this process; the heads of an attached one are expected")
        self._set_up(whole.spec.with_heads(count), whole.num_blocks)
        self._whole = whole
        self._heads = range(first, first + count)
        self.in_host_memory = whole.in_host_memory
        self.on_other_gpu = whole.on_other_gpu
        self.domain = whole.domain
        for name in whole.spec.tensor_names:
            self._pointers[name] = _moved(whole, name, first)
            self._strides[name] = whole.stride_bytes(name)
        self._free = FreeExtents(self.num_blocks)
        self._free.allocate(self.num_blocks)

    @property
    def heads(self) -> range:
        return self._heads

    def piece_stride_bytes(self, name: str) -> int:
        return self._whole.piece_stride_bytes(name)

    @property
    def memory_id(self) -> str:
        return self._whole.memory_id

    def export(self) -> Exported:
        raise ValueError("these are some of the heads of a pool; export the whole")

    def view(self, name: str, layer: int, block_id: int) -> NoReturn:
        raise NotImplementedError("some of the heads of a pool have no view; take that of the whole")

    def _detach(self) -> None:
        """The whole keeps its memory."""


def _moved(whole: DeviceCache | HostPool, name: str, first: int) -> list[int]:
    spec = whole.spec
    head_bytes = spec.tensor_block_bytes(name) // spec.head_pieces(name) // spec.num_kv_heads
    return [whole.pointer(name, layer) + first * head_bytes for layer in range(spec.num_layers)]
