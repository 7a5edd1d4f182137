"""Keeps a policy that learns from falling behind the order of use.

A shadow replays what LRU would have found: keys alone, and of large caches a sample of them by their hash, with the
same part of the capacity (C. Waldspurger et al., "Efficient MRC construction with SHARDS", USENIX FAST 2015). While
the blocks that were found are fewer than the shadow's by more than a thousandth of those asked for, the order of use
decides. That difference stays what it is meanwhile, as both then find the same.

A trial of the policy costs hits if it fails, and about as many again until the cache holds what LRU holds. So there is
one only if it has won its duels with the order of use (:mod:`.duels`): then it is given up only when what it is behind
is no chance either, since one long prompt may be more than a thousandth, or is more than twice that and a share of the
capacity. Or if it has not lost its duels, and so many blocks were asked for that such a failure is a small part.
A few long prompts can end a trial all the same. What it has lost then does not come back while the order of use
decides; so there is another one if the duels since are won far more clearly, and what was lost counts no more.
Nor does the policy decide before it has watched for a few times as long as LRU keeps a block: what it knows of returns
ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt
from typing import Any

from .duels import Duels
from .returns import EDGES_S

SHADOW_BLOCKS = 4096  # at most
BEHIND = 0.001  # of the blocks asked for
CHANCE = 1.0  # standard deviation: a policy that has won its duels is given up only behind what may be chance
TRIAL_TURNOVERS = 8  # a policy that has neither won nor lost is tried once the capacity was asked for so often
WATCHED_STAYS = 4.0  # as long as LRU keeps a block
AHEAD = 0.002  # no more of a lead than this, and the share of the capacity, is kept for worse days
SHARE = 32  # one block in so many of the capacity
MEMORY_TURNOVERS = 64  # what is longer ago counts less
MIX = 0x9E3779B97F4A7C15


class Guard:
    """
    Attributes:
        trusts: whether the policy may decide.
        warm: whether it ever could.
        told: whether sessions were said to be over: the policy knows more than the order of use, and needs no evidence.
        duels: to be told what either would let go while the policy may not decide.
        stay_s: for how long LRU kept the last block that it let go; 0 before it did, or where that one was just used.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._started_s: float | None = None
        self.warm = self.told = False
        self.stay_s = 0.0
        self.duels: Duels[Any] = Duels(capacity_blocks)
        self._every = 1
        while capacity_blocks // self._every > SHADOW_BLOCKS:
            self._every *= 2
        self._size = capacity_blocks // self._every
        self._memory_blocks = float(MEMORY_TURNOVERS * capacity_blocks)
        self._order: OrderedDict[Any, float] = OrderedDict()  # block -> when it was used; oldest first
        self._lead, self._asked = 0.0, 0.0
        self._squares = 0.0  # of what each prompt has added to the lead, in this trial
        self._share = self._size / SHARE
        self._trial_from = TRIAL_TURNOVERS * self._size
        self._has_won = False  # before it was trusted
        self._tried = False
        self._failures = 0
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
        every, order, duels = self._every, self._order, self.duels
        duels.asked_blocks += len(prompt)
        if every > 1:
            there, prompt = prompt[:found], self._sampled(prompt)
            found = len(self._sampled(there)) if prompt else 0
        if not prompt:
            return  # what it knows stays what it is
        count = 0
        for key in prompt:
            if key not in order:
                break
            count += 1
        self._asked += len(prompt)
        self._squares += (found - count) ** 2
        self._lead = min(self._lead + found - count, self._share + AHEAD * self._asked)
        if self._asked * every > self._memory_blocks:
            self._asked /= 2
            self._lead /= 2
            self._squares /= 4
        if self.warm:
            self._decide()
        for key in reversed(prompt):
            order[key] = now_s
            order.move_to_end(key)
        while len(order) > self._size:
            _, used_s = order.popitem(last=False)
            self.stay_s = now_s - used_s
            if not self.warm and EDGES_S[1] <= self.stay_s <= (now_s - self._started_s) / WATCHED_STAYS:
                self.warm = True

    def _decide(self) -> None:
        allowed = BEHIND * self._asked
        if self.trusts:
            if self._lead < -allowed:
                if self._has_won:
                    allowed += min(CHANCE * sqrt(self._squares), allowed + self._share)
                if self._lead < -allowed:
                    self.trusts = False
                    self._failures += 1
            return
        if not self._tried:
            self._lead = 0.0  # both are LRU: it is the error of the sample
        self._has_won = self.duels.won or self.told
        if self._lead < -allowed / 2:
            if not self.duels.won_after(self._failures):
                return
            self._lead = 0.0  # what was lost is lost
        if self._has_won or (self._asked >= self._trial_from and not self.duels.lost):
            self.trusts = self._tried = True
            self._squares = 0.0
            self.duels.clear()
