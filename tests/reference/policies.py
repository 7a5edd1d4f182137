"""The eviction policies as their papers write them, on plain lists: slow, and independent of the product's classes.

``request`` returns the block that was evicted, if any; never one of ``held``. If only such could go, the block that was
asked for is not let in.
"""

from __future__ import annotations

from collections.abc import Collection


def first_free(blocks: list[int], held: Collection[int]) -> int | None:
    return next((block for block in blocks if block not in held), None)


class LruReference:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self.blocks

    def request(self, key: int, held: Collection[int] = ()) -> int | None:
        out = None
        if key in self.blocks:
            self.blocks.remove(key)
        elif len(self.blocks) == self.capacity:
            out = first_free(self.blocks, held)
            if out is None:
                return None
            self.blocks.remove(out)
        self.blocks.append(key)
        return out


class ArcReference:
    """Figure 4 of Megiddo and Modha, case by case. The end of a list is its most recently used block.

    Where REPLACE finds nothing but held blocks in its list, it takes the other one. A request that is not let in has
    moved the target, and nothing else.
    """

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def full(self) -> bool:
        return len(self.t1) + len(self.t2) == self.c

    def choose(self, key: int, held: Collection[int]) -> int | None:
        """What REPLACE takes."""
        t1, t2 = first_free(self.t1, held), first_free(self.t2, held)
        if (key in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p:
            return t2 if t1 is None else t1
        return t1 if t2 is None else t2

    def replace(self, out: int | None) -> None:
        if out in self.t1:
            self.t1.remove(out)
            self.b1.append(out)
        elif out in self.t2:
            self.t2.remove(out)
            self.b2.append(out)

    def request(self, x: int, held: Collection[int] = ()) -> int | None:
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return None
        if x in self.b1:
            self.p = min(float(self.c), self.p + max(len(self.b2) / len(self.b1), 1.0))
        elif x in self.b2:
            self.p = max(0.0, self.p - max(len(self.b1) / len(self.b2), 1.0))
        out = self.choose(x, held) if self.full() else None
        if self.full() and out is None:
            return None
        if x in self.b1:
            self.replace(out)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.replace(out)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(out)
                else:
                    assert out is not None
                    self.t1.remove(out)
            else:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                    self.b2.pop(0)
                self.replace(out)
            self.t1.append(x)
        return out


class S3FifoReference:
    """Algorithm 1 of Yang et al., one eviction at a time. The end of a list is the head of the queue.

    A held block is passed over as if it had just come: it goes back to the head of its queue. A queue in which all are
    held is gone through until their counters are 0; then the other queue has its turn.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_target = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.freq

    def request(self, x: int, held: Collection[int] = ()) -> int | None:
        if x in self.freq:
            self.freq[x] = min(3, self.freq[x] + 1)
            return None
        out = None
        if len(self.freq) == self.capacity:
            out = self.evict(held)
            if out is None:
                return None
        if x in self.ghost:
            self.ghost.remove(x)
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0
        return out

    def evict(self, held: Collection[int]) -> int | None:
        queues = [self.evict_small, self.evict_main]
        if len(self.small) < self.small_target:
            queues.reverse()
        for queue in queues:
            out = queue(held)
            if out is not None:
                return out
        return None

    def evict_small(self, held: Collection[int]) -> int | None:
        for tail in list(self.small):
            self.small.remove(tail)
            if self.freq[tail] > 1:
                self.main.append(tail)
                self.freq[tail] = 0
            elif tail in held:
                self.small.append(tail)
            else:
                self.ghost = [*self.ghost, tail][-(self.capacity - self.small_target) :] if self.capacity > 1 else []
                del self.freq[tail]
                return tail
        return None

    def evict_main(self, held: Collection[int]) -> int | None:
        if all(block in held for block in self.main):
            for block in self.main:
                self.freq[block] = 0
            return None
        while True:
            tail = self.main.pop(0)
            if self.freq[tail] == 0 and tail not in held:
                del self.freq[tail]
                return tail
            self.freq[tail] = max(0, self.freq[tail] - 1)
            self.main.append(tail)
