"""A list of copies inside one memory, byte by byte; addresses are indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def copied(
    memory: np.ndarray, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int] | int
) -> np.ndarray:
    """The memory after the copies. All sources are read as they were before."""
    result = memory.copy()
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        for byte in range(sizes if isinstance(sizes, int) else sizes[i]):
            result[target + byte] = memory[source + byte]
    return result
