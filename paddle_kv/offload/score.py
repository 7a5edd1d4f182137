"""Whether a run will be used again at all, guessed from what is known when its prompt comes.

A logistic regression over the turn, the length of the prompt, the share of it that was seen before, how much it has
grown, and the time since the turn before. It is fitted to the last outcomes by Newton's method, every few hundred
prompts; each outcome weighs what it has blocks, since it is blocks that are kept or not. Of the prompts of one turn,
its thirds are the classes of which :mod:`.returns` counts the returns: what the score promises is not relied on, only
its order. Prompts of one score are of one class, and the fit (:mod:`.logistic`) is the same bits on every machine: else
rounding would decide which class is which, and what was counted of them would be worth nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from operator import mul
from typing import Any

from .outcomes import Outcomes
from .returns import EDGES_S, part_of

TURNS = 5  # the last one stands for all that follow
LEVELS = 3  # of the score
CLASSES = TURNS * LEVELS
HORIZON_PART = part_of(180.0)  # of age; and where ends of sessions are told,
HORIZON_STAYS = 4.0  # times as long as LRU keeps a block,
HORIZONS_S = (30.0, 512.0)  # at least and at most
NUM_OUTCOMES = 4096  # are remembered
FIT_EVERY = 512  # outcomes
MIN_OUTCOMES = 96  # of a turn, before its thirds are told apart
SIZE = 4  # the place of log2(1 + blocks) among the facts
SAME_SCORE = 1e-6  # apart: what rounding makes of equal ones
FINENESS = 2.0**20  # of logarithms: their last bits are the machine's

Facts = tuple[float, ...]


def log2(value: float) -> float:
    return round(math.log2(value) * FINENESS) / FINENESS


class Score:
    """See the module.

    Attributes:
        horizon_part: what has not come back before this part of age counts as lost; so an outcome is soon known.
    """

    def __init__(self) -> None:
        self.horizon_part = HORIZON_PART
        self._weights: list[float] = []
        self._limits: list[list[float]] = [[] for _ in range(TURNS)]  # between the levels of a turn
        self._outcomes = Outcomes(NUM_OUTCOMES)
        self._fresh = 0

    @staticmethod
    def facts(turn: int, num_blocks: int, known_blocks: int, gap_s: float) -> Facts:
        """Of a prompt of so many blocks, of which so many were seen before; ``gap_s`` since the turn before."""
        size = log2(1 + num_blocks)
        return (
            1.0,
            1.0 if turn == 1 else 0.0,
            1.0 if turn == 2 else 0.0,
            log2(turn),
            size,
            size if turn == 1 else 0.0,
            known_blocks / num_blocks,
            log2(1 + num_blocks - known_blocks) if num_blocks > known_blocks else 0.0,
            log2(1 + gap_s),
        )

    def class_of(self, turn: int, facts: Facts) -> int:
        """Of ``CLASSES``: by turn and, within it, by score."""
        group = (turn if turn < TURNS else TURNS) - 1
        limits = self._limits[group]
        level = bisect_right(limits, sum(map(mul, facts, self._weights))) if limits else LEVELS // 2
        return group * LEVELS + level

    def look_ahead(self, stay_s: float) -> int:
        """Sessions that are over are known, so the others come back: the question is whether in time. LRU keeps a block
        for ``stay_s``. Returns the part of age from which on it counts as lost."""
        shortest_s, longest_s = HORIZONS_S
        self.horizon_part = part_of(min(longest_s, max(shortest_s, HORIZON_STAYS * stay_s)))
        return self.horizon_part

    def learn(self, facts: Facts, turn: int, back: bool, touched_s: float) -> None:
        """What became of a prompt of that time."""
        self._outcomes.add(facts, turn, back, touched_s)
        self._fresh += 1

    def fit(self, now_s: float) -> None:
        """Of prompts whose outcome is known in any case: those that came back early are not all."""
        if self._fresh < FIT_EVERY:
            return
        facts, turns, back = self._outcomes.until(now_s - EDGES_S[self.horizon_part])
        self._fresh = 0
        if len(back) < MIN_OUTCOMES:
            return
        import numpy as np

        from .logistic import fitted, total, weighted

        blocks = np.rint(np.exp2(facts[SIZE]))
        self._weights = fitted(facts, back, blocks / (total(blocks) / len(back)))
        scores, turns = weighted(facts, self._weights), np.minimum(turns, TURNS)
        for turn in range(TURNS):
            own = scores[turns == turn + 1]
            self._limits[turn] = self._thirds(np.sort(own)) if len(own) >= MIN_OUTCOMES else []

    @staticmethod
    def _thirds(scores: Any) -> list[float]:
        """The limits between levels of so many sorted scores each, as nearly as scores that are the same are of one
        level: prompts that look the same belong together, and rounding shall not decide where."""
        import numpy as np

        count = len(scores)
        edges = np.array([0, *(np.flatnonzero(np.diff(scores) > SAME_SCORE) + 1), count])
        ends = [-math.inf, *scores.tolist(), math.inf]
        nearest = [edges[np.abs(edges - level * count / LEVELS).argmin()] for level in range(1, LEVELS)]
        return [(ends[edge] + ends[edge + 1]) / 2 for edge in nearest]
