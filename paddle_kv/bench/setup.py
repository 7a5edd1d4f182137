"""Memory, block ids and addresses of one benchmark case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..layout import KVCacheSpec
from ..memory import DeviceCache, HostPool
from ..memory.host_memory import HostMemory, has_gpu

Pattern = Literal["scattered", "contiguous_host", "lw_to_fc", "fc_to_fc"]
Way = Literal["h2d", "d2h", "d2d", "both"]
PATTERNS: tuple[Pattern, ...] = ("scattered", "contiguous_host", "lw_to_fc", "fc_to_fc")
WAYS: tuple[Way, ...] = ("h2d", "d2h", "d2d", "both")
SPARE = 2  # each side has this many times the blocks that move, so that scattered ids really are apart


class Side:
    """One memory in which pieces lie: rows of ``block_bytes`` at ``bases[i] + block * stride_bytes``."""

    def __init__(self, bases: list[int], strides: list[int], sizes: list[int], keep: Any) -> None:
        self.bases, self.strides, self.sizes, self.keep = bases, strides, sizes, keep

    def pieces(self, block_ids: list[int]) -> tuple[list[int], list[int]]:
        """Address and size of every piece: all blocks of the first tensor, of the second, and so on."""
        pointers = [base + i * stride for base, stride in zip(self.bases, self.strides, strict=True) for i in block_ids]
        sizes = [size for size in self.sizes for _ in block_ids]
        return pointers, sizes


@dataclass
class Case:
    """What one measurement moves."""

    spec: KVCacheSpec
    pattern: Pattern
    way: Way
    pinned: bool
    device: Side
    host: Side  # for d2d: a second memory on the device
    device_ids: list[int]
    host_ids: list[int]
    device_cache: DeviceCache | None  # None for full-block memory on the device
    host_pool: HostPool | None

    @property
    def num_blocks(self) -> int:
        return len(self.device_ids)

    @property
    def copy_bytes(self) -> int:
        """Bytes of one piece that is contiguous on both sides."""
        return self.device.sizes[0]

    @property
    def num_copies(self) -> int:
        return self.num_blocks * len(self.device.bases)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * sum(self.device.sizes)

    def close(self) -> None:
        if self.host_pool is not None:
            self.host_pool.close()


def make_case(spec: KVCacheSpec, pattern: Pattern, way: Way, num_blocks: int, *, pinned: bool, seed: int) -> Case:
    """Allocates both sides and draws the block ids."""
    rng = np.random.default_rng(seed)
    available = SPARE * num_blocks
    block_first = pattern in ("lw_to_fc", "fc_to_fc")
    device_ids = rng.permutation(available)[:num_blocks].tolist()
    host_ids = (
        list(range(num_blocks)) if pattern == "contiguous_host" else rng.permutation(available)[:num_blocks].tolist()
    )
    cache = pool = None
    if pattern == "fc_to_fc":
        device = _full_blocks(spec, available, on_device=True, pinned=pinned)
    else:
        cache = DeviceCache(spec, available)
        device = _cache_side(spec, cache)
    if way == "d2d":
        host = (
            _full_blocks(spec, available, on_device=True, pinned=pinned)
            if block_first
            else _cache_side(spec, DeviceCache(spec, available))
        )
        if block_first and pattern == "lw_to_fc":
            host = _split(spec, host)
    elif pinned:
        pool = HostPool(spec, available, layout="block_first" if block_first else "layer_first")
        host = _pool_side(spec, pool)
        if pattern == "fc_to_fc":
            whole = spec.num_layers * spec.block_bytes
            host = Side([host.bases[0]], [whole], [whole], pool)
    else:
        host = _full_blocks(spec, available, on_device=False, pinned=False)
        if pattern != "fc_to_fc":
            host = _split(spec, host) if block_first else _layers(spec, host, available)
    return Case(spec, pattern, way, pinned, device, host, device_ids, host_ids, cache, pool)


def _tensors(spec: KVCacheSpec) -> list[tuple[str, int]]:
    return [(name, layer) for layer in range(spec.num_layers) for name in spec.tensor_names]


def _cache_side(spec: KVCacheSpec, cache: DeviceCache) -> Side:
    sizes = [spec.tensor_block_bytes(name) for name, _ in _tensors(spec)]
    return Side([cache.tensor(name, layer).data_ptr() for name, layer in _tensors(spec)], sizes, sizes, cache)


def _pool_side(spec: KVCacheSpec, pool: HostPool) -> Side:
    tensors = _tensors(spec)
    return Side(
        [pool.pointer(name, layer) for name, layer in tensors],
        [pool.stride_bytes(name) for name, _ in tensors],
        [spec.tensor_block_bytes(name) for name, _ in tensors],
        pool,
    )


def _full_blocks(spec: KVCacheSpec, available: int, *, on_device: bool, pinned: bool) -> Side:
    whole = spec.num_layers * spec.block_bytes
    memory = buffer(available * whole, on_device=on_device, pinned=pinned)
    return Side([address_of(memory)], [whole], [whole], memory)


def _split(spec: KVCacheSpec, full: Side) -> Side:
    """Full blocks seen as the pieces of their layers."""
    tensors = _tensors(spec)
    bases = [full.bases[0] + layer * spec.block_bytes + spec.tensor_offset_bytes(name) for name, layer in tensors]
    return Side(
        bases, [full.strides[0]] * len(tensors), [spec.tensor_block_bytes(name) for name, _ in tensors], full.keep
    )


def _layers(spec: KVCacheSpec, memory: Side, available: int) -> Side:
    """The same memory, layer after layer."""
    sizes = [spec.tensor_block_bytes(name) for name, _ in _tensors(spec)]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * available + memory.bases[0]
    return Side(starts.tolist(), sizes, sizes, memory.keep)


def buffer(size_bytes: int, *, on_device: bool, pinned: bool) -> Any:
    """A contiguous buffer of bytes with undefined content."""
    if on_device and has_gpu():
        import cupy

        return cupy.empty(size_bytes, dtype="uint8")
    return HostMemory(size_bytes, pinned=pinned and has_gpu())


def address_of(memory: Any) -> int:
    return int(memory.address) if isinstance(memory, HostMemory) else int(memory.data.ptr)
