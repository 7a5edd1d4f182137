"""What a server knows of the future: which prompts it expects, and which sessions are over. Any policy profits: what is
expected is kept from it, and what is over goes before it is asked."""

from __future__ import annotations

import itertools
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Generic

from .hanging import Hanging
from .policy import Key

LAPSE_TURNOVERS = 4  # an expectation is given up when so many times the capacity has been let in since


class Expectation(Generic[Key]):
    """One prompt that will come.

    Attributes:
        number: in the order of the calls.
        admitted: blocks that had been let in when it was told, or was expected again.
        over: it has come, or was given up.
        released: it was given up since there was no room, and has not come since, nor lapsed.
        reader: the owner's; what brings its blocks.
    """

    __slots__ = ("admitted", "due_s", "keys", "number", "over", "reader", "released")

    def __init__(self, keys: Sequence[Key], due_s: float, admitted: int, number: int = 0) -> None:
        self.keys, self.due_s, self.admitted, self.number = tuple(keys), due_s, admitted, number
        self.over = self.released = False
        self.reader: Any = None

    def __lt__(self, other: Expectation[Key]) -> bool:
        return (self.due_s, self.number) < (other.due_s, other.number)


class Expected(Generic[Key]):
    """Prompts that will come.

    Attributes:
        blocks: of them -> by how many they are expected.
        by_end: last block of a prompt -> what is expected of it, in the order of the calls, with what was released.
        met: those of them that a policy would have let go of, since the owner last emptied it.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._lapse_blocks = LAPSE_TURNOVERS * capacity_blocks
        self.blocks: dict[Key, int] = {}
        self.met: list[Key] = []
        self._nearest: list[Expectation[Key]] = []  # first
        self._released: dict[Expectation[Key], None] = {}
        self._told: deque[tuple[int, Expectation[Key]]] = deque()  # with what had been let in, in the order of that
        self._numbers = itertools.count()
        self.by_end: dict[Key, list[Expectation[Key]]] = {}

    def add(self, keys: Sequence[Key], due_s: float, admitted_blocks: int) -> Expectation[Key]:
        """Of those that are due at the same time, the one that was told first comes first."""
        one = Expectation(keys, due_s, admitted_blocks, next(self._numbers))
        self.by_end.setdefault(one.keys[-1], []).append(one)
        self._begin(one)
        return one

    def again(self, last: Expectation[Key], admitted_blocks: int) -> list[Expectation[Key]]:
        """It was released, and there may be room now: it is expected, and so is all that is due before it. Returns
        these."""
        found = [one for one in self._released if not last < one]
        for one in found:
            del self._released[one]
            one.over = one.released = False
            one.admitted = admitted_blocks
            self._begin(one)
        return found

    def came(self, prompt: Sequence[Key]) -> None:
        """What ends with one of these blocks is not expected any more; nor is what lacks its last block alone, which a
        look-up may leave out."""
        by_end = self.by_end
        if not by_end.keys().isdisjoint(prompt):
            for key in prompt:
                if key in by_end:
                    self._forget(by_end[key][0])
        elif prompt:
            for one in itertools.chain(self._nearest, self._released):
                if one.keys[-2:-1] == (prompt[-1],) and len(one.keys) == len(prompt) + 1:
                    self._forget(one)
                    break

    def lapse(self, admitted_blocks: int) -> None:
        """Gives up what has not come for so long."""
        told = self._told
        while told:
            admitted, one = told[0]
            waits = (not one.over or one.released) and one.admitted == admitted  # else it was told once more
            if waits and admitted + self._lapse_blocks >= admitted_blocks:
                break
            told.popleft()
            if waits:
                self._forget(one)

    def all(self) -> list[Key]:
        """Of all that is expected the blocks, in the order in which they should go."""
        return list(dict.fromkeys(key for one in self._nearest for key in one.keys))[::-1]

    def release_farthest(self, incoming: Key | None = None, may_go: Callable[[Key], bool] = lambda key: True) -> bool:
        """Of all that is expected, up to one of which a block may go. Not what ``incoming`` is expected by, nor what is
        due sooner: what is expected makes no room for what is due later, nor for its own prompt. Returns whether a
        block may go."""
        while self._nearest:
            one = self._nearest[-1]
            if incoming is not None and self.blocks.get(incoming) == 1 and incoming in one.keys:
                return False
            self._end(one)
            one.released = True
            self._released[one] = None
            if any(key not in self.blocks and may_go(key) for key in one.keys):
                return True
        return False

    def beside(self, pins: Container[Key]) -> Beside[Key]:
        """What a policy must not let go of."""
        return Beside(pins, self)

    def _forget(self, one: Expectation[Key]) -> None:
        if not one.over:
            self._end(one)
        elif one.released:
            one.released = False
            del self._released[one]
        else:
            return
        same = self.by_end[one.keys[-1]]
        same.remove(one)
        if not same:
            del self.by_end[one.keys[-1]]

    def _begin(self, one: Expectation[Key]) -> None:
        insort(self._nearest, one)
        self._told.append((one.admitted, one))
        blocks = self.blocks
        for key in one.keys:
            blocks[key] = blocks.get(key, 0) + 1

    def _end(self, one: Expectation[Key]) -> None:
        one.over = True
        self._nearest.remove(one)
        blocks = self.blocks
        for key in one.keys:
            if blocks[key] == 1:
                del blocks[key]
            else:
                blocks[key] -= 1


class Beside(Generic[Key]):
    """Pinned or expected blocks."""

    def __init__(self, pins: Container[Key], expected: Expected[Key]) -> None:
        self._pins, self._blocks, self._met = pins, expected.blocks, expected.met

    def __contains__(self, key: object) -> bool:
        if key in self._pins:
            return True
        if key in self._blocks:
            self._met.append(key)
            return True
        return False


class Ended(Generic[Key]):
    """Blocks of sessions that are over, the first to go first: each session from its end. One on which something hangs
    that is there is shared, or not yet the end: it waits for that to go.

    Args:
        slots: of the blocks that are there.
        capacity_blocks: how many there can be.
    """

    def __init__(self, slots: Mapping[Key, int], capacity_blocks: int) -> None:
        self._slots = slots
        self.hanging: Hanging[Key] = Hanging(slots, capacity_blocks)
        self.blocks: set[Key] = set()
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._waiting: dict[int, Key] = {}  # slot -> the block there, until nothing hangs on it

    def saw(self, prompt: Sequence[Key], found: int) -> None:
        """These are in use, and follow each other; those from ``found`` on may be let in."""
        if self.blocks:
            self.blocks.difference_update(prompt)
            for key in prompt:
                self._order.pop(key, None)
        if found < len(prompt):
            self.hanging.saw(prompt, found)

    def let_in(self, path: Sequence[Key], at: int) -> None:
        """See :meth:`Hanging.link`."""
        bare = self.hanging.link(path, at)
        if self._waiting:
            for slot in bare:
                self._go_on(slot)

    def add(self, prompt: Iterable[Key]) -> None:
        """The session of this prompt is over."""
        there = [key for key in prompt if key in self._slots]
        self.blocks.update(there)
        self._order.update(dict.fromkeys(reversed(there)))
        if len(self._order) > 2 * len(self._slots):  # the others were taken out by their owner
            for key in [key for key in self._order if key not in self._slots]:
                del self._order[key]
                self.blocks.discard(key)

    def take(self, kept: Container[Key]) -> Key | None:
        """The next one to go, if any, that is not ``kept``."""
        order, passed = self._order, []
        found = None
        while order:
            key, _ = order.popitem(last=False)
            if key not in self._slots:
                self.blocks.discard(key)
            elif key in kept:
                passed.append(key)
            elif not self.hanging.is_leaf(slot := self._slots[key]):
                self._waiting[slot] = key
            else:
                self.blocks.discard(key)
                found = key
                break
        for key in reversed(passed):
            self._go_first(key)
        return found

    def gone(self, slot: int) -> None:
        """The block that was there is not any more."""
        bare = self.hanging.gone(slot)
        if self._waiting:
            self._waiting.pop(slot, None)
            self._go_on(bare)

    def clear(self) -> None:
        """No block is there."""
        self.hanging.clear()
        self.blocks.clear()
        self._order.clear()
        self._waiting.clear()

    def _go_on(self, slot: int) -> None:
        if slot in self._waiting and (key := self._waiting.pop(slot)) in self.blocks:
            self._go_first(key)

    def _go_first(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key, last=False)
