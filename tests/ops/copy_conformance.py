"""One call of copy_blocks, copy_single_block or swap_blocks, compared byte by byte with the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paddle_kv import ops
from tests.machine import GuardedCache, Machine, item_bytes, random_bits
from tests.reference.copy import copied, exchanged

Pairs = Sequence[tuple[int, int]]
OPS = ["copy_blocks", "swap_blocks"]


def make(machine: Machine, blocks: int, shape: tuple[int, ...], dtype: str, seed: int) -> GuardedCache:
    return GuardedCache(machine, random_bits(blocks, int(np.prod(shape)) * item_bytes(dtype), seed), shape, dtype)


def expected(op: str, cache: GuardedCache, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return (exchanged if op == "swap_blocks" else copied)(cache.bits, pairs)


def check(op: str, keys: list[GuardedCache], values: list[GuardedCache] | None, pairs: Pairs, mapping: Any) -> None:
    """Calls with lists of caches, and compares all of them."""
    key_tensors = [cache.tensor for cache in keys]
    value_tensors = None if values is None else [cache.tensor for cache in values]
    result = getattr(ops, op)(key_tensors, value_tensors, mapping)
    assert result[0] is key_tensors and result[1] is value_tensors
    keys[0].machine.synchronize()
    for cache in keys + (values or []):
        cache.check(expected(op, cache, pairs))


def check_one(op: str, keys: GuardedCache, values: GuardedCache | None, pairs: Pairs, mapping: Any) -> None:
    """The same with single tensors."""
    value_tensor = None if values is None else values.tensor
    result = getattr(ops, op)(keys.tensor, value_tensor, mapping)
    assert result[0] is keys.tensor and result[1] is value_tensor
    keys.machine.synchronize()
    for cache in (keys, values) if values is not None else (keys,):
        cache.check(expected(op, cache, pairs))


def check_untouched(*caches: GuardedCache) -> None:
    caches[0].machine.synchronize()
    for cache in caches:
        cache.check(cache.bits)


def shuffled_pairs(count: int, blocks: int, seed: int = 0) -> list[tuple[int, int]]:
    """Pairs in which each block occurs once."""
    ids = np.random.default_rng(seed).permutation(blocks)[: 2 * count].tolist()
    return list(zip(ids[:count], ids[count:], strict=True))
