"""What the operators of the copy family do, in NumPy, on arrays of bytes [blocks, bytes of a block]."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def copied(cache: np.ndarray, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    before, after = cache, cache.copy()
    for source, target in pairs:
        after[target] = before[source]
    return after


def exchanged(cache: np.ndarray, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    before, after = cache, cache.copy()
    for first, second in pairs:
        after[first], after[second] = before[second], before[first]
    return after
