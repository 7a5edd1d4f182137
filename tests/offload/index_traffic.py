"""What happens to the blocks of several indexes between prompts: the same to each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from paddle_kv.offload import BlockIndex

Each = Callable[[Callable[[BlockIndex[int], list[int]], Any]], Any]  # calls it with every index and its free slots


def hold_and_drop(rng: random.Random, there: list[int], held: list[list[int]], each: Each, *, most_held: float) -> None:
    """Some blocks are held, such as were held are let go, one is dropped, a few make room; each of that now and then.

    Args:
        there: blocks of each index.
        held: those that are held, call by call.
        most_held: share of all blocks that are held at a time.
    """
    if there and rng.random() < 0.3:
        held.append(rng.sample(there, rng.randrange(1 + int(len(there) * most_held))))
        each(lambda index, _: index.pin(held[-1]))
    while len(held) > rng.randrange(4):
        let_go = held.pop(0)
        each(lambda index, _, let_go=let_go: index.unpin(let_go))
    if there and rng.random() < 0.1:
        gone = rng.choice(there)
        each(lambda index, free: free.append(index.remove(gone)))
    if rng.random() < 0.1:
        count = rng.randrange(1, 4)
        each(lambda index, free: free.extend(index.evict(count)))
