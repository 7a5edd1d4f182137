"""New tokens into caches, in NumPy: reshape_and_cache and concat_and_cache_mla are `inserted`,
reshape_and_cache_dynamic is `scales_of_rows` and `inserted`. Caches are in HND, [blocks, heads, block size, head size];
see cache_convert for the other layouts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.reference.float_formats import LARGEST


def placed(slots: np.ndarray, cache: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(token, block, position in the block) of each token that is written."""
    blocks, _, block_size, _ = cache.shape
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            yield token, *divmod(slot, block_size)


def inserted(rows: np.ndarray, cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The cache after rows [tokens, heads, head size] of its own dtype have been written."""
    cache = cache.copy()
    for token, block, position in placed(slots, cache):
        cache[block, :, position] = rows[token]
    return cache


def scales_of_rows(rows: np.ndarray, form: str) -> np.ndarray:
    """[tokens, heads] float32: the largest finite magnitude over the largest number of the format; 1 for zeros."""
    with np.errstate(all="ignore"):
        magnitudes = np.abs(rows.astype(np.float32))
        finite = np.where(np.isfinite(magnitudes), magnitudes, 0)
        largest = finite.max(axis=-1, initial=0).astype(np.float32)
        scales = np.maximum(largest / np.float32(LARGEST[form]), np.finfo(np.float32).smallest_normal)
    return np.where(largest == 0, np.float32(1), scales).astype(np.float32)
