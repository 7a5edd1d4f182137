"""Checks of arguments that several rooms share. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .errors import ForkedError

Ids: TypeAlias = np.ndarray  # 1-D, int64, contiguous


def check_process(process_id: int, what: str) -> None:
    """ForkedError unless this is the process that has made ``what``."""
    if process_id != os.getpid():
        raise ForkedError(f"the {what} was made before a fork; make one in this process")


def check_ids(ids: Sequence[int] | Ids, name: str, num_blocks: int) -> None:
    """IndexError unless each id lies in [0, num_blocks)."""
    found = np.asarray(ids)
    if not found.size:
        return
    if found.dtype == np.int64:  # a negative number is a very large one to those that have no sign
        wrong = np.maximum.reduce(found.view(np.uint64)) >= num_blocks
    else:
        wrong = found.min() < 0 or found.max() >= num_blocks
    if wrong:
        position = next(i for i, block_id in enumerate(ids) if not 0 <= block_id < num_blocks)
        raise IndexError(f"{name}[{position}] = {ids[position]} must be in [0, {num_blocks})")


def check_distinct(name: str, ids: Sequence[int] | Ids) -> None:
    """ValueError if an id, none of them negative, occurs twice."""
    found = np.asarray(ids, np.int64)
    if found.size < 2:
        return
    seen = np.zeros(np.maximum.reduce(found) + 1, bool)
    seen[found] = True
    if np.count_nonzero(seen) != found.size:
        [(block_id, _)] = Counter(found.tolist()).most_common(1)
        raise ValueError(f"{name} names block {block_id} more than once; each may occur only once")
