"""Checks of arguments that several rooms share. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .errors import ForkedError
from .ranges import check_ends, count_of

Ids: TypeAlias = np.ndarray  # 1-D, int64, contiguous
MOST_IN_RANGE = 2**31  # where nothing else says how many there can be


def check_process(process_id: int, what: str) -> None:
    """ForkedError unless this is the process that has made ``what``."""
    if process_id != os.getpid():
        raise ForkedError(f"the {what} was made before a fork; make one in this process")


def range_array(ids: range, name: str, num_blocks: int | None = None) -> Ids:
    """A range as an array, if it lies in [0, num_blocks), or in 64 bits where that is None: it is asked before an array
    of any length is made."""
    if num_blocks is not None:
        check_ends(ids, name, 0, num_blocks)
    else:
        check_ends(ids, name, -(2**63), 2**63)
        if (count := count_of(ids)) > MOST_IN_RANGE:
            raise ValueError(f"{name} has {count} integers; at most {MOST_IN_RANGE} are expected")
    if abs(ids.step) >= 2**63:  # at most two
        return np.asarray(array("q", ids))
    return ids[0] + ids.step * np.arange(count_of(ids)) if ids else np.zeros(0, np.int64)  # arange counts in floats


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
