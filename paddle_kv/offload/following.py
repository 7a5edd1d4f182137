"""A load to the device of blocks that a tier is still reading into host memory: each layer as soon as it is there.

What is being read lies under a lease (:mod:`.fetching`), which the load outlives or not: where it fails or is given up,
nothing of it runs on the device soon behind that, however long the tier takes. In sections only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..schedule import arriving
from ..schedule.movement import Movement
from .fetching import TierFetching


class Following:
    """Of one load.

    Args:
        keys: of it.
        fetching: what brings those that are not there.
    """

    def __init__(self, movement: Movement, keys: Iterable[bytes], fetching: Sequence[TierFetching]) -> None:
        self._movement, self._keys, self._fetching = movement, frozenset(keys), fetching
        for one in fetching:
            one.followers.append(self.look)
        self.look()

    def look(self) -> None:
        """Something has come, or does not."""
        movement = self._movement
        if movement.over or movement.failed:
            return
        lost = [key for one in self._fetching for key in one.lost & self._keys]
        if lost:
            movement.told = True  # the request computes it: no word in the log
            arriving.fail(movement, f"{len(lost)} of {len(self._keys)} blocks did not come from the tier")
            return
        num_layers = movement.plan.num_layers
        arriving.mark(movement, range(min((num_layers if one.known else one.num_layers) for one in self._fetching)))
