"""Streams of prompts that a policy and its index serve."""

from __future__ import annotations

from typing import Any

from paddle_kv.offload import BlockIndex, make_policy
from tests.offload.streams import Prompts


class Served:
    """A policy and its index, in the time of a stream."""

    def __init__(self, name: str, capacity: int) -> None:
        self.now_s = 0.0
        self.policy: Any = make_policy(name, capacity, lambda: self.now_s)
        self.index: BlockIndex[Any] = BlockIndex(self.policy, capacity)
        self.free = list(range(capacity))

    def use(self, arrival_s: float, prompt: list[int]) -> int:
        self.now_s = arrival_s
        found = self.index.lookup(prompt)
        self.index.admit(prompt[found:], self.free)
        return found


def hit_rate(name: str, capacity: int, prompts: Prompts) -> float:
    """In percent."""
    served = Served(name, capacity)
    found = [served.use(arrival_s, prompt) for arrival_s, prompt in prompts]
    return 100 * sum(found) / sum(len(prompt) for _, prompt in prompts)
