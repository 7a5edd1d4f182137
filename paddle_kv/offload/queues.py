"""The runs of a survival policy by class and age: who is watched, who may go, and who goes next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .policy import Key
from .returns import EDGES_S, NUM_PARTS, WIDTHS_S, Returns
from .run import Run

LOOKS_PER_PART = 4  # while a run is in a part of age

Queue = TypeVar("Queue", bound=dict[Any, None])


class Queues(Generic[Key]):
    """Of each class and part of age two queues, the run that was used first in front: of all that are watched, and of
    those that may go.

    Args:
        returns: is told what came through a part, and says what those of a class are worth at an age.
        passed: called with each run that grows into :attr:`told_part` or a later one.
        faded: called with each that is too old to be watched.

    Attributes:
        told_part: a part of age.
    """

    def __init__(
        self,
        returns: Returns,
        told_part: int,
        passed: Callable[[Run[Key]], None],
        faded: Callable[[Run[Key]], None],
    ) -> None:
        self._returns, self.told_part, self._passed, self._faded = returns, told_part, passed, faded
        classes, parts = range(returns.num_classes), range(NUM_PARTS)
        self._watched: list[list[dict[Run[Key], None]]] = [[{} for _ in classes] for _ in parts]
        self._leaves: list[list[OrderedDict[Run[Key], None]]] = [[OrderedDict() for _ in classes] for _ in parts]
        self._used: list[set[int]] = [set() for _ in parts]  # classes that have had anything in this part
        self._next_looks_s = [0.0] * NUM_PARTS
        self.next_look_s = 0.0
        self._cheapest: list[tuple[float, int, int]] = []  # heap of the queues of leaves; empty ones are dropped late
        self.price()

    def watch(self, run: Run[Key]) -> None:
        klass, part = run.klass, run.part
        run.watched = True
        self._used[part].add(klass)
        self._watched[part][klass][run] = None

    def unwatch(self, run: Run[Key]) -> None:
        if run.watched:
            run.watched = False
            del self._watched[run.part][run.klass][run]

    def enter(self, run: Run[Key]) -> None:
        """It may go."""
        if not run.leaf and run.live:
            run.leaf = True
            queue = self._leaves[run.part][run.klass]
            if not queue:
                heapq.heappush(self._cheapest, (self.worth[run.klass][run.part], run.klass, run.part))
            queue[run] = None

    def leave(self, run: Run[Key]) -> None:
        """It may not."""
        if run.leaf:
            run.leaf = False
            del self._leaves[run.part][run.klass][run]

    def use_again(self, run: Run[Key]) -> None:
        """Behind the others of its age."""
        if run.leaf:
            self._leaves[run.part][run.klass].move_to_end(run)

    def reclass(self, run: Run[Key], klass: int) -> None:
        watched, leaf = run.watched, run.leaf
        self.unwatch(run)
        self.leave(run)
        run.klass = klass
        if watched:
            self.watch(run)
        if leaf:
            self.enter(run)

    def advance(self, now_s: float) -> None:
        """Runs have grown older; there is nothing to do before :attr:`next_look_s`."""
        for part, look_s in enumerate(self._next_looks_s):
            if now_s < look_s:
                continue
            self._next_looks_s[part] = now_s + WIDTHS_S[part] / LOOKS_PER_PART
            before_s = now_s - EDGES_S[part + 1]
            watched = self._watched[part]
            for klass in self._used[part]:
                queue = watched[klass]
                if queue and next(iter(queue)).touched_s <= before_s:
                    self._grow(klass, part, before_s)
        self.next_look_s = min(self._next_looks_s)

    def _grow(self, klass: int, part: int, before_s: float) -> None:
        """Those that were used until then, into the next part of age."""
        runs = []
        for run in self._watched[part][klass]:
            if run.touched_s > before_s:
                break
            runs.append(run)
        self._returns.survived[klass][part] += len(runs)
        part += 1
        if part == NUM_PARTS:
            for run in runs:
                self.unwatch(run)
                self._faded(run)
            return
        self._used[part].add(klass)
        leaves = []
        for run in runs:
            run.part = part
            if run.leaf:
                leaves.append(run)
        _move(runs, self._watched, klass, part)
        if leaves:
            if not self._leaves[part][klass]:
                heapq.heappush(self._cheapest, (self.worth[klass][part], klass, part))
            _move(leaves, self._leaves, klass, part)
        if part >= self.told_part:
            for run in runs:
                self._passed(run)

    def price(self) -> None:
        """By what was learnt since."""
        self.worth = self._returns.worth()
        queues = {(klass, part) for _, klass, part in self._cheapest if self._leaves[part][klass]}
        self._cheapest = [(self.worth[klass][part], klass, part) for klass, part in queues]
        heapq.heapify(self._cheapest)

    def next(self) -> Run[Key] | None:
        """The one that is worth least; None: there is none that may go."""
        heap = self._cheapest
        while heap:
            _, klass, part = heap[0]
            queue = self._leaves[part][klass]
            if queue:
                return next(iter(queue))
            heapq.heappop(heap)
        return None

    def all(self) -> list[Run[Key]]:
        """Those that may go, worth least first."""
        return [run for _, klass, part in sorted(set(self._cheapest)) for run in self._leaves[part][klass]]


def _move(runs: list[Run[Key]], queues: list[list[Queue]], klass: int, part: int) -> None:
    """Some of the queue of the part before, to the end of that of this part."""
    younger, older = queues[part - 1][klass], queues[part][klass]
    if not older and runs == [*younger]:  # all of them, and in this order
        queues[part - 1][klass], queues[part][klass] = older, younger
        return
    for run in runs:
        del younger[run]
        older[run] = None
