"""What the swap operators do, in NumPy: one block after the other, on arrays of bytes [blocks, bytes of a block]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

TO_HOST = 0
TO_DEVICE = 1


def swapped(
    cache: np.ndarray, host: np.ndarray, device_ids: Sequence[int], host_ids: Sequence[int], mode: int
) -> tuple[np.ndarray, np.ndarray]:
    """(cache, host) after swap_cache_*."""
    cache, host = cache.copy(), host.copy()
    for device_id, host_id in zip(device_ids, host_ids, strict=True):
        if mode == TO_HOST:
            host[host_id] = cache[device_id]
        else:
            cache[device_id] = host[host_id]
    return cache, host


def transferred(source: np.ndarray, target: np.ndarray, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """The target after transfer_blocks."""
    target = target.copy()
    for source_id, target_id in pairs:
        target[target_id] = source[source_id]
    return target


def swapped_layout(
    caches: Sequence[np.ndarray], host: np.ndarray, device_ids: Sequence[int], positions: Sequence[int], mode: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """(caches, host) after swap_cache_layout; the host is [positions x layers, bytes of a block]."""
    caches, host = [cache.copy() for cache in caches], host.copy()
    for device_id, position in zip(device_ids, positions, strict=True):
        for layer, cache in enumerate(caches):
            row = position * len(caches) + layer
            if mode == TO_HOST:
                host[row] = cache[device_id]
            else:
                cache[device_id] = host[row]
    return caches, host
