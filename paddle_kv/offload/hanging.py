"""Which block hangs on which, by a number for each slot, and a second one as soon as somebody asks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Generic

from .policy import Key
from .slot_numbers import with_room

NOTHING = -1  # in the place of a slot: a block hangs on none that is known
COMING_SHARE = 64  # blocks of prompts that were looked up and not let in: one in so many of the capacity is remembered,
MIN_COMING = 4096  # and at least so many
MOST_AT_ONCE = 8  # prompts that begin with the same block to come

Coming = tuple[Sequence[Key], int]  # a prompt, and where its first block that is to come stands


class Hanging(Generic[Key]):
    """Of the blocks that are there.

    A block that goes while others hang on it leaves them to the next one in its slot, until they go too or are let in
    behind another: that one seems to be shared meanwhile. That they hang on it, should it come back elsewhere, is known
    when they are met again.

    Args:
        slots: of the blocks that are there. A slot that one has left is told by :meth:`gone`, unless :meth:`link` is
            next and finds another in it.
        capacity_blocks: how many there can be.
    """

    def __init__(self, slots: Mapping[Key, int], capacity_blocks: int) -> None:
        self._slots, self._capacity = slots, capacity_blocks
        self._parents = array("i")  # slot -> that of the block before it
        self._children: array[int] | None = None  # slot -> how many have it as parent; None: nobody has asked
        self._coming: OrderedDict[Key, list[Coming[Key]]] = OrderedDict()  # by the first block that is to come
        self._num_coming = 0
        self._max_coming = max(MIN_COMING, capacity_blocks // COMING_SHARE)

    def saw(self, prompt: Sequence[Key], found: int) -> None:
        """A prompt, of which the blocks from ``found`` on may be let in. Kept for a while: it must not change."""
        coming, key, one = self._coming, prompt[found], (prompt, found)
        known = coming.get(key)
        if known is None:
            coming[key] = [one]
        else:
            coming.move_to_end(key)
            if one in known:
                known.remove(one)  # the one seen last is behind the others
                self._num_coming -= len(prompt)
            known.append(one)
            if len(known) > MOST_AT_ONCE:
                self._num_coming -= len(known.pop(0)[0])
        self._num_coming += len(prompt)
        while self._num_coming > self._max_coming and len(coming) > 1:
            _, oldest = coming.popitem(last=False)
            for forgotten, _ in oldest:
                self._num_coming -= len(forgotten)

    def path(self, keys: Sequence[Key], first: int) -> tuple[Sequence[Key], int, list[Coming[Key]]]:
        """The prompt in which ``keys[first]`` stands, and where, as far as that is known; and what :meth:`goes_on` is
        to be told when the keys were let in."""
        path, at, coming = keys, first, self._coming
        others: list[Coming[Key]] = []
        for start in range(first, -1, -1):  # blocks may have come since they were looked up
            for one in reversed(coming.get(keys[start], ())):
                prompt, found = one
                rest, new = prompt[found:], keys[start:]
                all_of_it = rest == new
                if not all_of_it:
                    others.append(one)
                if path is not keys:
                    continue
                if all_of_it or rest[: len(new)] == new:
                    path, at = prompt, found + first - start
                elif set(new) <= set(rest):  # a part lies elsewhere
                    path, at = prompt, found
                else:  # it goes another way behind the same head, or these are followed by an answer
                    path, at = [*prompt[:found], *new], found + first - start
        return path, at, others

    def goes_on(self, coming: list[Coming[Key]]) -> None:
        """Of these some blocks were let in; the others may come by further calls."""
        for prompt, at in coming:
            absent = next((i for i in range(at, len(prompt)) if prompt[i] not in self._slots), None)
            if absent is not None:
                self.saw(prompt, absent)

    def link(self, path: Sequence[Key], at: int) -> list[int]:
        """From ``at`` on they were let in, as many as there is room for, or were there. Slots on which nothing hangs
        any more, of those on which something did; none before :meth:`is_leaf` was asked."""
        slots = self._slots
        bare: list[int] = []
        above = slots.get(path[at - 1], NOTHING) if at else NOTHING
        chain = [above, *map(slots.__getitem__, takewhile(slots.__contains__, path[at:]))]
        highest = max(chain)
        if highest >= len(self._parents):
            self._make_room(highest)
        parents, children = self._parents, self._children
        before = list(map(parents.__getitem__, chain[1:]))
        if before == chain[:-1]:
            return bare  # as those whose places they have
        for slot in chain[1:]:
            parent = parents[slot]
            if parent != above:
                parents[slot] = above
                if children is None:
                    above = slot
                    continue
                if above != NOTHING:
                    children[above] += 1
                if parent != NOTHING:
                    children[parent] -= 1
                    if not children[parent]:
                        bare.append(parent)
            above = slot
        return bare

    def _make_room(self, slot: int) -> None:
        """For a slot that was never used before."""
        self._parents = with_room(self._parents, slot, self._capacity, NOTHING)
        if self._children is not None:
            self._children = with_room(self._children, slot, self._capacity, 0)

    def gone(self, slot: int) -> int:
        """The block that was there is not any more. The slot on which nothing hangs now, or ``NOTHING``; always that
        before :meth:`is_leaf` was asked."""
        if slot >= len(self._parents):
            return NOTHING
        parent = self._parents[slot]
        if parent == NOTHING:
            return NOTHING
        self._parents[slot] = NOTHING
        if self._children is None:
            return NOTHING
        self._children[parent] -= 1
        return NOTHING if self._children[parent] else parent

    def is_leaf(self, slot: int) -> bool:
        """Whether nothing hangs on the block there."""
        if slot >= len(self._parents):
            return True
        if self._children is None:
            self._children = self._count()
        return not self._children[slot]

    def _count(self) -> array[int]:
        """How many hang on each slot."""
        import numpy as np

        parents = np.frombuffer(self._parents, np.int32)
        counts = np.bincount(parents[parents != NOTHING], minlength=len(parents))
        return array("i", counts.astype(np.int32).tobytes())

    def clear(self) -> None:
        """No block is there."""
        self._parents, self._children = array("i"), None
        self._coming.clear()
        self._num_coming = 0
