"""Memory, block ids and addresses of one benchmark case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from .._paddle import private
from ..devices import has_gpu
from ..layout import KVCacheSpec
from ..memory import DeviceCache, HostPool
from ..memory.host_memory import HostMemory

Operation = Literal[
    "swap",
    "copy_blocks",
    "universal_from_cache",
    "cache_from_universal",
    "operational_from_block",
    "block_from_operational",
    "reshape_and_cache",
    "gather_cache",
    "scatter_cache",
]
Pattern = Literal["scattered", "contiguous_host", "lw_to_fc", "fc_to_fc"]
Way = Literal["h2d", "d2h", "d2d", "both"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
WAYS: tuple[Way, ...] = get_args(Way)
ALIGNMENTS = (1, 2, 4, 8, 16)
_empty = private("_C_ops", "empty")
SPARE = 2  # each side has this many times the blocks that move, so that scattered ids really are apart


class Side:
    """One memory in which pieces lie: rows of ``block_bytes`` at ``bases[i] + block * stride_bytes``."""

    def __init__(self, bases: list[int], strides: list[int], sizes: list[int], keep: Any) -> None:
        self.bases, self.strides, self.sizes, self.keep = bases, strides, sizes, keep

    def add(self, base: int, stride_bytes: int, size_bytes: int) -> None:
        self.bases.append(base)
        self.strides.append(stride_bytes)
        self.sizes.append(size_bytes)

    def pieces(self, block_ids: list[int]) -> tuple[list[int], list[int]]:
        """Address and size of every piece: all blocks of the first tensor, of the second, and so on."""
        pointers = [base + i * stride for base, stride in zip(self.bases, self.strides, strict=True) for i in block_ids]
        sizes = [size for size in self.sizes for _ in block_ids]
        return pointers, sizes


@dataclass
class Case:
    """What one measurement moves."""

    spec: KVCacheSpec
    op: Operation
    pattern: Pattern
    pinned: bool
    alignment: int
    device: Side
    host: Side  # for d2d: the target, on the device too
    device_ids: list[int]
    host_ids: list[int]
    device_cache: DeviceCache | None = None  # None for full-block memory on the device
    host_pool: HostPool | None = None
    dense: Any = None  # the universal or operational tensor of a permutation; the tokens of each cache tensor

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


def make_case(
    spec: KVCacheSpec,
    pattern: Pattern,
    way: Way,
    num_blocks: int,
    *,
    pinned: bool,
    seed: int,
    op: Operation = "swap",
    alignment: int = 16,
) -> Case:
    """Allocates both sides and draws the block ids.

    Raises:
        ValueError: the operation has no such pattern, way or alignment.
    """
    rng = np.random.default_rng(seed)
    available = SPARE * num_blocks
    ids, other_ids = rng.permutation(available)[:num_blocks].tolist(), rng.permutation(available)[:num_blocks].tolist()
    if op == "swap":
        return _swap(spec, pattern, way, ids, other_ids, available, pinned=pinned, alignment=alignment)
    for name, value, only in (
        ("pattern", pattern, "scattered"),
        ("direction", way, "d2d"),
        ("alignment", alignment, 16),
    ):
        if value != only:
            raise ValueError(f"{name} = {value}: {op} works inside the device on aligned caches, with {name} = {only}")
    if op in ("reshape_and_cache", "gather_cache", "scatter_cache"):
        return _tokens(spec, op, ids, available, pinned=pinned)
    cache = DeviceCache(spec, available)
    if op == "copy_blocks":
        unused = rng.permutation(sorted(set(range(available)) - set(ids))).tolist()
        side = cache_side(spec, cache)
        return Case(spec, op, pattern, pinned, alignment, side, side, ids, unused, cache)
    return _permutation(spec, op, cache, ids, pinned=pinned)


def _permutation(spec: KVCacheSpec, op: Operation, cache: DeviceCache, ids: list[int], *, pinned: bool) -> Case:
    """Pieces of one cache and of a dense tensor: whole blocks (operational) or the heads of blocks (universal)."""
    first = cache.tensor(spec.tensor_names[0], 0)
    layers, outer = spec.num_layers, len(spec.tensor_names)
    tokens, width = spec.block_size, spec.head_dim
    universal = op in ("universal_from_cache", "cache_from_universal")
    heads = spec.num_kv_heads if universal else 1
    piece = spec.tensor_block_bytes(spec.tensor_names[0]) // heads
    inner = [tokens, width] if universal else [piece // first.element_size()]
    shape = [len(ids), *([heads] if universal else []), layers, outer, *inner]
    dense = _empty(shape, first.dtype, first.place)
    blocks = cache_side(spec, cache)
    in_cache = Side([], [], [], cache)
    in_dense = Side([], [], [], dense)
    for i, (base, stride) in enumerate(zip(blocks.bases, blocks.strides, strict=True)):
        for head in range(heads):
            in_cache.add(base + head * piece, stride, piece)
            in_dense.add(dense.data_ptr() + (head * layers * outer + i) * piece, heads * layers * outer * piece, piece)
    sides = [(in_cache, ids), (in_dense, list(range(len(ids))))]
    if op in ("cache_from_universal", "block_from_operational"):
        sides.reverse()
    (source, source_ids), (target, target_ids) = sides
    return Case(spec, op, "scattered", pinned, 16, source, target, source_ids, target_ids, cache, dense=dense)


def _tokens(spec: KVCacheSpec, op: Operation, ids: list[int], available: int, *, pinned: bool) -> Case:
    """Blocks of token rows (NHD), and as many tokens of one contiguous tensor for each tensor of the cache."""
    if spec.latent and op == "reshape_and_cache":
        raise ValueError(f"op = {op}: it writes keys and values, and this model keeps one latent tensor")
    if not spec.latent:
        spec = replace(spec, layout="NHD")
    cache = DeviceCache(spec, available)
    blocks, dense = cache_side(spec, cache), []
    for name, layer in _tensors(spec):
        tensor = cache.tensor(name, layer)
        shape = [len(ids) * spec.block_size, spec.num_kv_heads, spec.head_dim]
        dense.append(_empty(shape, tensor.dtype, tensor.place))
    rows = Side([tensor.data_ptr() for tensor in dense], blocks.sizes, blocks.sizes, dense)
    in_order = list(range(len(ids)))
    if op == "gather_cache":
        return Case(spec, op, "scattered", pinned, 16, blocks, rows, ids, in_order, cache, dense=dense)
    return Case(spec, op, "scattered", pinned, 16, rows, blocks, in_order, ids, cache, dense=dense)


def in_one_piece(case: Case, way: Way) -> Case:
    """As many bytes, contiguous on both sides: the most that the case can reach."""
    size = case.total_bytes
    memory = [buffer(size, on_device=on_device, pinned=case.pinned) for on_device in (True, way == "d2d")]
    device, host = (Side([address_of(one)], [size], [size], one) for one in memory)
    return Case(case.spec, case.op, case.pattern, case.pinned, 16, device, host, [0], [0])


def _swap(
    spec: KVCacheSpec,
    pattern: Pattern,
    way: Way,
    device_ids: list[int],
    host_ids: list[int],
    available: int,
    *,
    pinned: bool,
    alignment: int,
) -> Case:
    block_first = pattern in ("lw_to_fc", "fc_to_fc")
    if pattern == "contiguous_host":
        host_ids = list(range(len(host_ids)))
    cache = pool = None
    if pattern == "fc_to_fc":
        device = _full_blocks(spec, available, on_device=True, pinned=pinned)
    else:
        cache = DeviceCache(spec, available)
        device = cache_side(spec, cache)
    if way != "d2d" and pinned and alignment == 16:
        pool = HostPool(spec, available, layout="block_first" if block_first else "layer_first")
        host = _pool_side(spec, pool)
        if pattern == "fc_to_fc":
            whole = spec.num_layers * spec.block_bytes
            host = Side([host.bases[0]], [whole], [whole], pool)
    else:
        host = _full_blocks(spec, available, on_device=way == "d2d", pinned=pinned)
        host.bases = [base + alignment % 16 for base in host.bases]
        if pattern != "fc_to_fc":
            host = _split(spec, host) if block_first else _layers(spec, host, available)
    return Case(spec, "swap", pattern, pinned, alignment, device, host, device_ids, host_ids, cache, pool)


def _tensors(spec: KVCacheSpec) -> list[tuple[str, int]]:
    return [(name, layer) for layer in range(spec.num_layers) for name in spec.tensor_names]


def cache_side(spec: KVCacheSpec, cache: DeviceCache) -> Side:
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
    memory = buffer(available * whole + max(ALIGNMENTS), on_device=on_device, pinned=pinned)
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
