"""What gather_cache, scatter_cache and convert_layout do, in NumPy (convert_fp8: see float_formats).

Caches are HND, [blocks, heads, block size, head size]; the other layouts are permutations of it. A latent one is one
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

LAYOUTS = ["HND", "NHD", "packed"]


def to_layout(hnd: np.ndarray, layout: str, kind: str) -> np.ndarray:
    blocks, heads, block_size, head_size = hnd.shape
    if layout == "HND":
        permuted = hnd
    elif layout == "latent":
        permuted = hnd.reshape(blocks, block_size, heads * head_size)
    elif layout == "NHD":
        permuted = hnd.transpose(0, 2, 1, 3)
    elif kind == "value":
        permuted = hnd.transpose(0, 1, 3, 2)
    else:
        x = 16 // hnd.itemsize
        permuted = hnd.reshape(blocks, heads, block_size, head_size // x, x).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(permuted)


def from_layout(cache: np.ndarray, layout: str) -> np.ndarray:
    if layout == "HND":
        permuted = cache
    elif layout == "NHD":
        permuted = cache.transpose(0, 2, 1, 3)
    elif cache.ndim == 4:
        permuted = cache.transpose(0, 1, 3, 2)
    else:
        blocks, heads, groups, block_size, x = cache.shape
        permuted = cache.transpose(0, 1, 3, 2, 4).reshape(blocks, heads, block_size, groups * x)
    return np.ascontiguousarray(permuted)


def slots(
    table: np.ndarray, lengths: np.ndarray, tokens: int, blocks: int, block_size: int, starts: Any = None
) -> Iterator[tuple[int, int, int]]:
    """(token, block, position in the block) of each token that has a block."""
    for sequence in range(len(table)):
        start, end = int(lengths[sequence]), int(lengths[sequence + 1])
        offset = 0 if starts is None else int(starts[sequence])
        for token in range(max(start, 0), min(end, tokens)):
            if offset < 0:
                break
            entry, position = divmod(offset + token - start, block_size)
            if entry < table.shape[1] and 0 <= table[sequence, entry] < blocks:
                yield token, int(table[sequence, entry]), position


def gathered(hnd: np.ndarray, table: np.ndarray, lengths: np.ndarray, tokens: int, starts: Any = None) -> np.ndarray:
    rows = np.zeros((tokens, hnd.shape[1], hnd.shape[3]), hnd.dtype)
    for token, block, position in slots(table, lengths, tokens, len(hnd), hnd.shape[2], starts):
        rows[token] = hnd[block, :, position]
    return rows


def scattered(
    rows: np.ndarray, hnd: np.ndarray, table: np.ndarray, lengths: np.ndarray, starts: Any = None
) -> np.ndarray:
    cache = hnd.copy()
    for token, block, position in slots(table, lengths, len(rows), len(hnd), hnd.shape[2], starts):
        cache[block, :, position] = rows[token]
    return cache
