"""What a prefix cache can reach at best, by trying everything; and a plain replay of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any


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


def policy_hits(reference: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Every block of a prompt is one use, in order; found are those of the prefix that was present before."""
    hits = []
    for prompt in prompts:
        hits.append(prefix_hits(reference, prompt))
        for block in prompt:
            reference.request(block)
    return hits
