"""One call of a swap operator, compared byte by byte with the reference: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_kv import ops
from tests.machine import GuardedCache, GuardedHost, Machine, item_bytes, random_bits
from tests.reference import swap as reference

PER_LAYER = ["swap_cache_per_layer", "swap_cache_per_layer_async"]
ALL_LAYERS = ["swap_cache_all_layers", "swap_cache_all_layers_async"]


@dataclass
class Layer:
    """One cache tensor and its host memory."""

    machine: Machine
    device_blocks: int
    host_blocks: int
    block_shape: tuple[int, ...]
    dtype: str
    misalignment: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        block_bytes = int(np.prod(self.block_shape)) * item_bytes(self.dtype)
        self.cache_bits = random_bits(self.device_blocks, block_bytes, 2 * self.seed)
        self.host_bits = random_bits(self.host_blocks, block_bytes, 2 * self.seed + 1)
        self.cache = GuardedCache(self.machine, self.cache_bits, self.block_shape, self.dtype)
        self.host = GuardedHost(self.machine, self.host_bits, self.misalignment)

    def check(self, device_ids: Sequence[int], host_ids: Sequence[int], mode: int) -> None:
        """The swap has been done on both memories, and nothing else."""
        cache, host = reference.swapped(self.cache_bits, self.host_bits, device_ids, host_ids, mode)
        self.cache.check(cache)
        self.host.check(host)

    def check_untouched(self) -> None:
        self.check([], [], reference.TO_HOST)


def call(op: str, layers: Sequence[Layer], device_ids: Any, host_ids: Any, mode: Any, **changed: Any) -> Any:
    """Calls ``op`` on the layers; ``changed`` replaces single arguments (caches, pointers, count) or adds stream=."""
    caches = changed.pop("caches", [layer.cache.tensor for layer in layers])
    pointers = changed.pop("pointers", [layer.host.address for layer in layers])
    count = changed.pop("count", layers[0].host_blocks)
    function = getattr(ops, op)
    if op in ALL_LAYERS:
        result = function(caches, pointers, count, device_ids, host_ids, 0, mode, **changed)
        assert result is caches
        return result
    for cache, pointer in zip(caches, pointers, strict=True):
        result = function(cache, pointer, count, device_ids, host_ids, 0, mode, **changed)
        assert result is cache
    return caches


def check_swap(
    op: str, layers: Sequence[Layer], device_ids: Sequence[int], host_ids: Sequence[int], mode: int, **changed: Any
) -> None:
    call(op, layers, device_ids, host_ids, mode, **changed)
    if op.endswith("_async"):
        layers[0].machine.synchronize()
    for layer in layers:
        layer.check(device_ids, host_ids, mode)


def shuffled_ids(count: int, device_blocks: int, host_blocks: int, seed: int = 0) -> tuple[list[int], list[int]]:
    random = np.random.default_rng(seed)
    return (
        random.permutation(device_blocks)[:count].tolist(),
        random.permutation(host_blocks)[:count].tolist(),
    )
