"""ARC: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", USENIX FAST 2003, figure 4.

T1 holds the resident blocks used once lately, T2 those used at least twice; B1 and B2 remember what left T1 and T2. The
target size p of T1 grows when a block comes back that B1 remembers, and shrinks for B2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import Generic

from .policy import Key


class Arc(Generic[Key]):
    """Adaptive replacement cache for ``capacity_blocks`` resident blocks (c in the paper).

    The figure trims the ghost lists before it makes room; here that happens in ``on_insert``, behind it, which leaves
    the same lists: both remove the oldest entries.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._target = 0.0  # p: blocks that T1 should have
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1, oldest first
        self._often: OrderedDict[Key, None] = OrderedDict()  # T2
        self._once_ghosts: OrderedDict[Key, None] = OrderedDict()  # B1
        self._often_ghosts: OrderedDict[Key, None] = OrderedDict()  # B2

    def on_access(self, key: Key) -> None:
        if key in self._often:
            self._often.move_to_end(key)
        else:
            del self._once[key]
            self._often[key] = None

    def on_insert(self, key: Key) -> None:
        if key in self._once_ghosts:
            del self._once_ghosts[key]
            self._often[key] = None
            return
        if key in self._often_ghosts:
            del self._often_ghosts[key]
            self._often[key] = None
            return
        if self._once_ghosts and len(self._once) + len(self._once_ghosts) >= self._capacity:
            self._once_ghosts.popitem(last=False)
        resident = len(self._once) + len(self._often)
        if self._often_ghosts and resident + len(self._once_ghosts) + len(self._often_ghosts) >= 2 * self._capacity:
            self._often_ghosts.popitem(last=False)
        self._once[key] = None

    def on_remove(self, key: Key) -> None:
        del (self._once if key in self._once else self._often)[key]

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        once, once_ghosts, often_ghosts = self._once, self._once_ghosts, self._often_ghosts
        size = len(once)
        from_once = size > self._target
        if incoming in once_ghosts:
            self._target = min(float(self._capacity), self._target + max(len(often_ghosts) / len(once_ghosts), 1.0))
            from_once = size > self._target
        elif incoming in often_ghosts:
            self._target = max(0.0, self._target - max(len(once_ghosts) / len(often_ghosts), 1.0))
            from_once = size >= self._target
        if from_once:
            key = _oldest(once, pinned, once_ghosts)
            return _oldest(self._often, pinned, often_ghosts) if key is None else key
        key = _oldest(self._often, pinned, often_ghosts)
        return _oldest(once, pinned, once_ghosts) if key is None else key

    def replace(self, incoming: Key, pinned: Container[Key]) -> Key | None:
        """Written out, because most blocks of a busy cache come this way: a block that nothing remembers."""
        once, once_ghosts, often_ghosts = self._once, self._once_ghosts, self._often_ghosts
        resident, ghosts = (once, once_ghosts) if len(once) > self._target else (self._often, often_ghosts)
        if incoming not in once_ghosts and incoming not in often_ghosts:
            for key in resident:
                if key not in pinned:
                    del resident[key]
                    ghosts[key] = None
                    size = len(once) + len(once_ghosts)
                    if once_ghosts and size >= self._capacity:
                        del once_ghosts[next(iter(once_ghosts))]
                        size -= 1
                    if often_ghosts and size + len(self._often) + len(often_ghosts) >= 2 * self._capacity:
                        del often_ghosts[next(iter(often_ghosts))]
                    once[incoming] = None
                    return key
        victim = self.victim(incoming, pinned)
        if victim is not None:
            self.on_insert(incoming)
        return victim


def _oldest(resident: OrderedDict[Key, None], pinned: Container[Key], ghosts: OrderedDict[Key, None]) -> Key | None:
    """Moves the oldest block that is not pinned to the ghosts."""
    for key in resident:
        if key not in pinned:
            del resident[key]
            ghosts[key] = None
            return key
    return None
