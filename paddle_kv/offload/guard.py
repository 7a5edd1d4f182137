"""Keeps a policy that learns from falling behind the order of use.

A shadow replays what LRU would have found: keys alone, and of large caches a sample of them by their hash, with the
same part of the capacity (C. Waldspurger et al., "Efficient MRC construction with SHARDS", USENIX FAST 2015). While
the blocks that were found are fewer than the shadow's by more than a thousandth of those asked for, the order of use
decides. That difference stays what it is meanwhile, as both then find the same.

A trial of the policy costs hits if it fails, and about as many again until the cache holds what LRU holds. So there is
one only if it has won its duels with the order of use (:mod:`.duels`), or if it has not lost them, and so many blocks
were asked for that such a failure is a small part. Behind won duels it is given up only when what it is behind is no
chance either, since one long prompt may be more than a thousandth, or is more than twice that and a share of the
capacity. But what many prompts have cost is no such chance: with each prompt counted as no longer than a few are on
average, twice a thousandth, or one of these, ends it.
A few long prompts can end a trial all the same. What it has lost then does not come back while the order of use
decides; so there is another one if the duels since are won far more clearly, and what was lost counts no more. It is
given half as much for chance, so that all of them together are not given more than two.
When a trial has failed, the cache lacks blocks that LRU would have kept, and has others instead. If the order of use
took those first, as it would, all that the policy has kept would go at once, and what it has thrown away would be
missed for as long as LRU keeps a block. So a policy that had won its duels still chooses among what LRU would not
have, until the cache lacks nothing.
Nor does the policy decide before it has watched for a few times as long as LRU keeps a block: what it knows of returns
ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import sqrt
from typing import Any

from .duels import Duels
from .returns import EDGES_S

SHADOW_BLOCKS = 16384  # at most
BEHIND = 0.001  # of the blocks asked for
CHANCE = 1.0  # standard deviation: a policy that has won its duels is given up only behind what may be chance
LONG = 4.0  # times as long as prompts are on average; what one has beyond that, says nothing of those to come
MOST_FAILURES = 32  # are counted: no duels are won as clearly as one more would ask for
TRIAL_TURNOVERS = 8  # a policy that has neither won nor lost is tried once the capacity was asked for so often
WATCHED_STAYS = 4.0  # as long as LRU keeps a block
AHEAD = 0.005  # no more of a lead than this, and the share of the capacity, is kept for worse days
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
        self._asked = self._prompts = 0.0
        self._lead = self._steady = 0.0  # the latter with all prompts cut to LONG
        self._squares = 0.0  # of what each prompt has added to the lead, in this trial
        self._share = self._size / SHARE
        self._trial_from = TRIAL_TURNOVERS * self._size
        self._has_won = False  # before it was trusted
        self._tried = False
        self._failures = 0
        self._lacking: set[Any] = set()  # of the shadow's blocks: those that the cache has let go
        self.trusts = False

    @property
    def kept_from_s(self) -> float | None:
        """LRU would hold nothing that was used last before; None: the cache holds what LRU would hold."""
        return next(iter(self._order.values())) if self._lacking else None

    def let_go(self, keys: Iterable[Any]) -> None:
        """These are there no more, or were not let in, while the policy is trusted."""
        self._lacking.update(filter(self._order.__contains__, keys))

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
        count = len(list(takewhile(order.__contains__, prompt)))
        self._asked += len(prompt)
        self._squares += (found - count) ** 2
        self._prompts += 1
        ahead, most, long = found - count, self._share + AHEAD * self._asked, self._long
        self._lead = min(self._lead + ahead, most)
        self._steady = min(self._steady + max(-long, min(ahead, long)), most)
        if self._asked * every > self._memory_blocks:
            self._asked /= 2
            self._prompts /= 2
            self._lead /= 2
            self._steady /= 2
            self._squares /= 4
        if self.warm:
            self._decide()
        use_again, lacking, absent = order.move_to_end, self._lacking, prompt[count:]
        are_new = order.keys().isdisjoint(absent)  # what is new comes last by itself
        for key in reversed(absent):
            order[key] = now_s
        for key in reversed(prompt[:count] if are_new else prompt):
            order[key] = now_s
            use_again(key)
        if lacking:
            lacking.difference_update(prompt)
        if len(order) > self._size:
            gone = [order.popitem(last=False) for _ in range(len(order) - self._size)]
            self.stay_s = now_s - gone[-1][1]
            if lacking:
                lacking.difference_update(key for key, _ in gone)
            if not self.warm:
                longest_s = (now_s - self._started_s) / WATCHED_STAYS
                self.warm = any(EDGES_S[1] <= now_s - used_s <= longest_s for _, used_s in gone)

    @property
    def _long(self) -> float:
        """Blocks."""
        return LONG * self._asked / self._prompts

    def _decide(self) -> None:
        allowed = BEHIND * self._asked
        if self.trusts:
            if self._lead < -allowed - self._chance(allowed) or (self._has_won and self._is_steadily_behind(allowed)):
                self.trusts = False
                if not self._has_won:
                    self._lacking.clear()
                self._failures = min(self._failures + 1, MOST_FAILURES)
            return
        if not self._tried:
            self._lead = self._steady = 0.0  # both are LRU: it is the error of the sample
        self._has_won = self.duels.won or self.told
        if min(self._lead, self._steady) < -allowed / 2:
            if not self.duels.won_after(self._failures):
                return
            self._lead = self._steady = 0.0  # what was lost is lost
        if self._has_won or (self._asked >= self._trial_from and not self.duels.lost):
            self.trusts = self._tried = True
            self._squares = 0.0
            self.duels.clear()

    def _chance(self, allowed: float) -> float:
        """What a trial may be behind beyond ``allowed``; half as much after each that has failed."""
        if not self._has_won:
            return 0.0
        return min(CHANCE * sqrt(self._squares), allowed + self._share) / (1 << self._failures)

    def _is_steadily_behind(self, allowed: float) -> bool:
        """By what one long prompt does not make."""
        return self._steady < -allowed - max(allowed, self._long) / (1 << self._failures)
