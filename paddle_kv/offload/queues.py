"""The runs of a survival policy by class and age: who is watched, who may go, and who goes next."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Container
from typing import Generic

from .policy import Key
from .returns import EDGES_S, NUM_PARTS, WIDTHS_S, Returns
from .run import Run

LOOKS_PER_PART = 4  # while a run is in a part of age
MOST_STALE = 64  # entries of runs that are watched no more, behind an end of watching, beside as many as of others


class Queues(Generic[Key]):
    """Of each part of age a queue of all runs that are watched, the one that was used first in front; and of each class
    and part one of those that may go.

    Args:
        returns: is told what came through a part, and says what those of a class are worth at an age.
        passed: called with each run that grows into :attr:`told_part` or a later one while it has facts.
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
        # Each with the number of the entry that counts: others of it are from before it was watched anew.
        self._watched: list[deque[tuple[Run[Key], int]]] = [deque() for _ in parts]
        self._num_watched = [0] * NUM_PARTS
        self._num_entries = 0
        self._leaves: list[list[OrderedDict[Run[Key], None]]] = [[OrderedDict() for _ in classes] for _ in parts]
        self._next_looks_s = [0.0] * NUM_PARTS
        self.next_look_s = 0.0
        self._cheapest: list[tuple[float, int, int]] = []  # heap of the queues of leaves; empty ones are dropped late
        self._in_order: list[tuple[float, int, int]] | None = None  # the heap, but for empty ones; None: unknown
        self.price()

    def watch(self, run: Run[Key]) -> None:
        """From now on. One that was used before the last ones grows older with these: late by one part at most."""
        if run.watched:
            return
        self._num_entries += 1
        run.watched = self._num_entries
        self._watched[run.part].append((run, run.watched))
        self._num_watched[run.part] += 1

    def unwatch(self, run: Run[Key]) -> None:
        if not run.watched:
            return
        run.watched = 0
        entries = self._watched[run.part]
        self._num_watched[run.part] -= 1
        if len(entries) > 2 * self._num_watched[run.part] + MOST_STALE:
            self._watched[run.part] = deque(one for one in entries if one[0].watched == one[1])

    def enter(self, run: Run[Key]) -> None:
        """It may go."""
        if not run.leaf and run.live:
            run.leaf = True
            self._queue(run, run.part)

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
        leaf = run.leaf
        self.leave(run)
        run.klass = klass
        if leaf:
            self.enter(run)

    def advance(self, now_s: float) -> None:
        """Runs have grown older; there is nothing to do before :attr:`next_look_s`."""
        for part, look_s in enumerate(self._next_looks_s):
            if now_s < look_s:
                continue
            self._next_looks_s[part] = now_s + WIDTHS_S[part] / LOOKS_PER_PART
            before_s = now_s - EDGES_S[part + 1]
            if self._watched[part]:
                self._grow(part, before_s)
        self.next_look_s = min(self._next_looks_s)

    def _grow(self, part: int, before_s: float) -> None:
        """Those that were used until then, into the next part of age."""
        entries, survived, next_part = self._watched[part], self._returns.survived, part + 1
        is_last, has_passed = next_part == NUM_PARTS, next_part >= self.told_part
        older = deque() if is_last else self._watched[next_part]
        leaves, num_older = self._leaves[part], len(older)
        while entries:
            run, number = entry = entries[0]
            if run.watched == number:
                if run.touched_s > before_s:
                    break
                klass = run.klass
                survived[klass][part] += 1
                older.append(entry)
                if is_last:
                    run.watched = 0
                    self._faded(run)
                else:
                    run.part = next_part
                    if run.leaf:
                        del leaves[klass][run]
                        self._queue(run, next_part)
                    if has_passed and run.facts is not None:
                        self._passed(run)
            entries.popleft()
        num_grown = len(older) - num_older
        self._num_watched[part] -= num_grown
        if not is_last:
            self._num_watched[next_part] += num_grown

    def _queue(self, run: Run[Key], part: int) -> None:
        """Behind those that may go."""
        queue = self._leaves[part][run.klass]
        if not queue:
            heapq.heappush(self._cheapest, (self.worth[run.klass][part], run.klass, part))
            self._in_order = None
        queue[run] = None

    def price(self) -> None:
        """By what was learnt since."""
        self.worth = self._returns.worth()
        queues = {(klass, part) for _, klass, part in self._cheapest if self._leaves[part][klass]}
        self._cheapest = [(self.worth[klass][part], klass, part) for klass, part in queues]
        heapq.heapify(self._cheapest)
        self._in_order = None

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

    def least_before(self, used_s: float, but_for: Container[tuple[int, int]]) -> Run[Key] | None:
        """Of the first of each queue, if it was used last before then, the one that is worth least; but for some
        queues, each a class and a part."""
        for _, klass, part in self._by_worth():
            queue = self._leaves[part][klass]
            if queue and (klass, part) not in but_for and (run := next(iter(queue))).touched_s < used_s:
                return run
        return None

    def all(self) -> list[Run[Key]]:
        """Those that may go, worth least first."""
        return [run for _, klass, part in self._by_worth() for run in self._leaves[part][klass]]

    def _by_worth(self) -> list[tuple[float, int, int]]:
        """The queues of leaves, once each; some may be empty by now."""
        if self._in_order is None:
            self._in_order = sorted({one for one in self._cheapest if self._leaves[one[2]][one[1]]})
        return self._in_order
