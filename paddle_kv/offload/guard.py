"""Keeps a policy that learns from falling behind the order of use.

A shadow replays what LRU would have found: keys alone, and of large caches a sample of them by their hash, with the
same part of the capacity (C. Waldspurger et al., "Efficient MRC construction with SHARDS", USENIX FAST 2015). While
the blocks that were found are fewer than the shadow's by more than a thousandth of those asked for, the order of use
decides. That difference stays what it is meanwhile, as both then find the same: the policy is tried again when so
many more blocks were asked for that it has room to try, and all of its trials together cost no more than that
thousandth, and what keeping blocks for later costs at first, for which a part of the capacity is granted. Nor does it
decide before it has watched for a few times as long as LRU keeps a block: what it knows of returns ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from .returns import EDGES_S

SHADOW_BLOCKS = 4096  # at most
BEHIND = 0.001  # of the blocks asked for
GRANTED_SHARE = 32  # one block in so many of the capacity
WATCHED_STAYS = 4.0  # as long as LRU keeps a block
AHEAD = 0.002  # no more of a lead than this, and twice what is granted, is kept for worse days
MEMORY_TURNOVERS = 64  # what is longer ago counts less
MIX = 0x9E3779B97F4A7C15


class Guard:
    """
    Attributes:
        trusts: whether the policy may decide.
        warm: whether it ever could.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._started_s: float | None = None
        self.warm = False
        self._every = 1
        while capacity_blocks // self._every > SHADOW_BLOCKS:
            self._every *= 2
        self._size = capacity_blocks // self._every
        self._memory_blocks = float(MEMORY_TURNOVERS * capacity_blocks)
        self._order: OrderedDict[Any, float] = OrderedDict()  # block -> when it was used; oldest first
        self._lead, self._asked = 0.0, 0.0
        self._granted = self._size / GRANTED_SHARE
        self.trusts = False

    def _sampled(self, keys: Sequence[Any]) -> list[Any]:
        """The same ones in each run."""
        mask = self._every - 1
        if keys and isinstance(keys[0], bytes):
            low, high = mask & 255, mask >> 8
            return [key for key in keys if not key[0] & low and not key[1] & high]
        return [key for key in keys if not (hash(key) * MIX) >> 40 & mask]

    def saw(self, prompt: Sequence[Any], found: int, now_s: float) -> None:
        """A prompt, and how many of its first blocks were there."""
        if self._started_s is None:
            self._started_s = now_s
        every, order = self._every, self._order
        if every > 1:
            whole, prompt = prompt, self._sampled(prompt)
            if not prompt:
                return  # what it knows stays what it is
            found = len(self._sampled(whole[:found]))
        count = 0
        for key in prompt:
            if key not in order:
                break
            count += 1
        self._asked += len(prompt)
        allowed = self._granted + BEHIND * self._asked
        self._lead = min(self._lead + found - count, 2 * self._granted + AHEAD * self._asked)
        if self._asked * every > self._memory_blocks:
            self._asked /= 2
            self._lead /= 2
        if self.warm:
            self.trusts = self._lead >= (-allowed if self.trusts else -allowed / 2)
        for key in reversed(prompt):
            order[key] = now_s
            order.move_to_end(key)
        while len(order) > self._size:
            _, used_s = order.popitem(last=False)
            stay_s = now_s - used_s
            if not self.warm and EDGES_S[1] <= stay_s <= (now_s - self._started_s) / WATCHED_STAYS:
                self.warm = self.trusts = True
                self._lead = self._asked = 0.0
