"""Checks of arguments that several rooms share. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Real
from threading import TIMEOUT_MAX
from typing import TypeAlias

import numpy as np

Ids: TypeAlias = np.ndarray  # 1-D, int64, contiguous


def check_ids(ids: Sequence[int] | Ids, name: str, num_blocks: int) -> None:
    """IndexError unless each id lies in [0, num_blocks)."""
    found = np.asarray(ids)
    if found.size and (found.min() < 0 or found.max() >= num_blocks):
        position = next(i for i, block_id in enumerate(ids) if not 0 <= block_id < num_blocks)
        raise IndexError(f"{name}[{position}] = {ids[position]} must be in [0, {num_blocks})")


def check_distinct(name: str, ids: Sequence[int] | Ids) -> None:
    """ValueError if an id, none of them negative, occurs twice."""
    found = np.asarray(ids, np.int64)
    if found.size < 2:
        return
    seen = np.zeros(found.max() + 1, bool)
    seen[found] = True
    if np.count_nonzero(seen) != found.size:
        [(block_id, _)] = Counter(found.tolist()).most_common(1)
        raise ValueError(f"{name} names block {block_id} more than once; each may occur only once")


def check_timeout(timeout_s: float | None) -> None:
    """TypeError or ValueError unless it is a number of seconds or None; a negative one is over at once."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        raise TypeError(f"timeout_s is {timeout_s!r}; a number of seconds or None is expected")
    if not timeout_s <= TIMEOUT_MAX:
        raise ValueError(f"timeout_s = {timeout_s} must be at most {TIMEOUT_MAX:.0f} seconds, or None")
