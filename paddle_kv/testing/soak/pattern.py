"""The bytes of a block as a function of what it holds: recomputed where they are checked, stored nowhere.

Word k of a block of content c in row r (a row is one tensor of one layer) is a mix of (c, r, k), so that a block of
another content, layer, tensor or place differs in nearly every word. ``gpu_compute`` has the same function in CUDA.
"""

from __future__ import annotations

import functools

import numpy as np

CONTENT_FACTOR = 0x9E3779B97F4A7C15
ROW_FACTOR = 0xC2B2AE3D27D4EB4F
WORD_FACTOR = 0x165667B19E3779F9
MIX_FACTOR = 0xBF58476D1CE4E5B9
WORD_BYTES = 8


@functools.cache
def _of_words(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64) * np.uint64(WORD_FACTOR)


def expected_bytes(contents: np.ndarray, row: int, block_bytes: int) -> np.ndarray:
    """What blocks of these contents hold in one row: uint8 ``[len(contents), block_bytes]``."""
    of_row = np.uint64(row * ROW_FACTOR % 2**64)
    mixed = (contents.astype(np.uint64) * np.uint64(CONTENT_FACTOR) + of_row)[:, None] + _of_words(
        -(-block_bytes // WORD_BYTES)
    )
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(MIX_FACTOR)
    mixed ^= mixed >> np.uint64(32)
    return mixed.view(np.uint8)[:, :block_bytes]  # type: ignore[no-any-return]
