"""The clairvoyant optimum: what the best eviction could reach that knows all future requests.

Belady's rule keeps the blocks that are used again soonest (L. A. Belady, "A study of replacement algorithms for a
virtual-storage computer", IBM Systems Journal 5(2), 1966), and may leave a block out. It maximises the number of blocks
that are present when they are used. A block counts here only if all blocks before it are present too, so that number
bounds what any policy reaches. And the rule reaches it: a block is used whenever one that follows it in a prompt is,
and earlier in the request, so of a prompt it always lets go of the last block first: what is present is a prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from .trace import Request

NEVER = 1 << 62


def optimal_hits(
    requests: Sequence[Request], capacity_blocks: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[list[int], int, int]:
    """Blocks found by each request; how many were brought in; how many of them made room for others.

    A block that is never used again is let go of at once, which is no eviction.
    """
    next_uses = _next_uses(requests)
    present: dict[int, int] = {}  # block -> position of its next use
    farthest: list[
        tuple[int, int]
    ] = []  # heap of (-next use, block); entries that ``present`` disagrees with are stale
    hits, saved, evicted = [], 0, 0
    position = 0
    for number, request in enumerate(requests):
        found = 0
        for block in request.block_ids:
            if block not in present:
                break
            found += 1
        hits.append(found)
        for block in request.block_ids:
            again = next_uses[position]
            was_present = present.pop(block, None) is not None
            position += 1
            if again == NEVER:
                continue
            if not was_present and len(present) >= capacity_blocks:
                while present.get(farthest[0][1]) != -farthest[0][0]:
                    heapq.heappop(farthest)
                if -farthest[0][0] <= again:
                    continue  # all others are needed sooner
                del present[heapq.heappop(farthest)[1]]
                evicted += 1
            saved += not was_present
            present[block] = again
            heapq.heappush(farthest, (-again, block))
        progress(number + 1)
    return hits, saved, evicted


def _next_uses(requests: Sequence[Request]) -> list[int]:
    """For each use of a block, in order: the position of the next use of the same block."""
    stream = [block for request in requests for block in request.block_ids]
    following: dict[int, int] = {}
    next_uses = [NEVER] * len(stream)
    for position in range(len(stream) - 1, -1, -1):
        next_uses[position] = following.get(stream[position], NEVER)
        following[stream[position]] = position
    return next_uses
