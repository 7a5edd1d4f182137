"""The order of use, of the runs of a survival policy: what goes while nothing better is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic

from .owners import Owners
from .policy import Key
from .run import Run


class OrderOfUse(Generic[Key]):
    """
    Args:
        hanging: of the policy: on a block, how many runs hang that have blocks which are there.

    Attributes:
        runs: with blocks; the one used longest ago first.
        over: of sessions that are over, likewise. Who takes one for something else takes it out.
    """

    def __init__(self, owner: Owners[Key], hanging: Container[Key]) -> None:
        self._owner, self._hanging = owner, hanging
        self.runs: OrderedDict[Run[Key], None] = OrderedDict()
        self.over: OrderedDict[Run[Key], None] = OrderedDict()

    def oldest(self, pinned: Container[Key], but_for: Run[Key] | None) -> tuple[Run[Key], Key] | None:
        """The run used longest ago on which nothing hangs, and its last block; but for one, as long as nothing has to
        go from inside of a run."""
        hanging, owner = self._hanging, self._owner
        for run in self.runs:
            key = owner.last(run)
            if key not in pinned and key not in hanging and run is not but_for:
                return run, key
        for run in self.runs:  # what hangs on them is held
            for key in reversed(run.keys[: run.end]):
                if owner.get(key) is run and key not in pinned:
                    return run, key
        return None

    def oldest_over(self, pinned: Container[Key]) -> tuple[Run[Key], Key] | None:
        """The run of a session that is over, and its last block."""
        blocked, found = [], None
        for run in self.over:
            key = self._owner.last(run)
            if key in self._hanging:
                blocked.append(run)  # until what hangs on it has gone
            elif key not in pinned:
                found = run, key
                break
        for run in blocked:
            del self.over[run]
        return found
