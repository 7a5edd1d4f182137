"""What a prefix cache can reach at best, by trying everything; and a plain replay of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

from .policies import LruReference


def prefix_hits(present: Any, prompt: Sequence[int]) -> int:
    return next((count for count, block in enumerate(prompt) if block not in present), len(prompt))


def best_hits(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """The most blocks that any choice of what to keep after each request could find."""

    @cache
    def best(number: int, present: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        prompt = prompts[number]
        known = sorted(present | set(prompt))
        keeps = combinations(known, min(capacity, len(known)))
        return prefix_hits(present, prompt) + max(best(number + 1, frozenset(keep)) for keep in keeps)

    return best(0, frozenset())


def policy_run(reference: Any, prompts: Sequence[Sequence[int]], capacity: int) -> tuple[list[int], int, int]:
    """Blocks found by each prompt; blocks saved; blocks that made room.

    Every block of a prompt is one use, from the end of the prompt: first those of the prefix that was present before,
    then the others, of which no more than the capacity are offered. Such of the others as were present make room for
    none of the prompt, nor do those before them. Of those that were let in only the end of the prompt may go for the
    others: it was never saved. Where the order of use alone decides, what they hang on is used again behind them.
    """
    hits, saved, evicted = [], 0, 0
    for prompt in prompts:
        found = prefix_hits(reference, prompt)
        hits.append(found)
        for block in reversed(prompt[:found]):
            reference.request(block)
        held = {block for block in prompt if block in reference}
        new: list[int] = []  # from the end of the prompt
        for block in reversed(prompt[found : found + capacity]):
            was_present = block in reference
            out = reference.request(block, held.union(new[1:]))
            if out in new:
                new.remove(out)
            else:
                evicted += out is not None
            if not was_present and block in reference:
                new.append(block)
        saved += len(new)
        if new and isinstance(reference, LruReference):
            for block in reversed(prompt[:found]):
                if block in reference:
                    reference.request(block)
    return hits, saved, evicted
