"""Who chooses better what goes, a policy or the order of use: seen while the order of use decides, at no cost of hits.

Now and then the run that goes meets the one that the policy would have let go. Of the two, the one that is used again
first should have stayed (L. A. Belady, 1966), and whoever chose it has lost. Both are watched, whether they are there
or not, so it is seen in either case. A run that meets many others says little more than that it came back: n duels that
end with it count as the square root of n, and as one outcome when it is asked whether all of them could be chance. The
policy's choice is the one that meets many, as it stays where it is. So duels are rather won than not, and most streams
of blocks that come by chance alone are tried: that finds good policies early, and what a trial may cost is for
:mod:`.guard`.
"""

from __future__ import annotations

from math import sqrt
from typing import Generic

from .policy import Key
from .run import Run

A_TURNOVER = 256  # so many duels while as many blocks are asked for as there is room for
MOST_OPEN = 512  # are waited for: returns within two turnovers
MEMORY = 256.0  # outcomes; what is longer ago counts less
SURE = 3.0  # so many standard deviations away from chance
CLEARLY = 0.5  # ahead by so much of all, as who wins three of four

Pair = tuple[Run[Key], Run[Key]]  # the choice of the order of use, the policy's


class Duels(Generic[Key]):
    """
    Attributes:
        every_blocks: that are asked for there should be one.
        asked_blocks: since the last one.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.every_blocks = max(1, capacity_blocks // A_TURNOVER)
        self.clear()

    def clear(self) -> None:
        """What was seen so far counts no more."""
        self.asked_blocks = 0
        self._open: dict[Pair[Key], None] = {}  # the one begun first in front
        self._pairs_of: dict[Run[Key], list[Pair[Key]]] = {}
        self._ahead = 0.0  # duels that the policy has won, less those that it has lost
        self._all = self._variance = 0.0

    @property
    def won(self) -> bool:
        """The policy chooses clearly better; that is no chance."""
        return self.won_after(0)

    def won_after(self, failures: int) -> bool:
        """:attr:`won`, though so many trials have failed: each takes twice the deviations, and half the duels lost."""
        times = 1 << failures
        clearly = 1 - (1 - CLEARLY) / times
        return self._ahead > SURE * times * sqrt(self._variance) and self._ahead >= clearly * self._all

    @property
    def lost(self) -> bool:
        """The policy chooses worse; that is no chance."""
        return self._ahead < -SURE * sqrt(self._variance)

    def begin(self, by_use: Run[Key], by_policy: Run[Key]) -> None:
        """These two were chosen to go."""
        self.asked_blocks = 0
        pair = by_use, by_policy
        if by_use is by_policy or pair in self._open or not (by_use.watched and by_policy.watched):
            return
        self._open[pair] = None
        for run in pair:
            self._pairs_of.setdefault(run, []).append(pair)
        if len(self._open) > MOST_OPEN:
            self._close(next(iter(self._open)))

    def came_back(self, run: Run[Key]) -> None:
        """It is used again."""
        pairs = self._pairs_of.get(run)
        if pairs is None:
            return
        score = sum(1 if run is by_use else -1 for by_use, _ in pairs) / sqrt(len(pairs))
        self._ahead += score - self._ahead / MEMORY
        self._all += sqrt(len(pairs)) - self._all / MEMORY
        self._variance += score**2 - self._variance / MEMORY
        for pair in list(pairs):
            self._close(pair)

    def _close(self, pair: Pair[Key]) -> None:
        del self._open[pair]
        for run in pair:
            pairs = self._pairs_of[run]
            pairs.remove(pair)
            if not pairs:
                del self._pairs_of[run]
