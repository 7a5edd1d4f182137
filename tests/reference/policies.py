"""The eviction policies as their papers write them, on plain lists: slow, and independent of the product's classes.

``request`` returns the block that was evicted, if any.
"""

from __future__ import annotations


class LruReference:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self.blocks

    def request(self, key: int) -> int | None:
        out = None
        if key in self.blocks:
            self.blocks.remove(key)
        elif len(self.blocks) == self.capacity:
            out = self.blocks.pop(0)
        self.blocks.append(key)
        return out


class ArcReference:
    """Figure 4 of Megiddo and Modha, case by case. The end of a list is its most recently used block."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self.t1 or key in self.t2

    def replace(self, key: int) -> int | None:
        if len(self.t1) + len(self.t2) < self.c:  # the cache is not full yet: nothing to replace
            return None
        if self.t1 and ((key in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p or not self.t2):
            out = self.t1.pop(0)
            self.b1.append(out)
        else:
            out = self.t2.pop(0)
            self.b2.append(out)
        return out

    def request(self, x: int) -> int | None:
        out = None
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            self.p = min(float(self.c), self.p + max(len(self.b2) / len(self.b1), 1.0))
            out = self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0.0, self.p - max(len(self.b1) / len(self.b2), 1.0))
            out = self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    out = self.replace(x)
                else:
                    out = self.t1.pop(0)
            else:
                total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
                if total >= self.c:
                    if total == 2 * self.c:
                        self.b2.pop(0)
                    out = self.replace(x)
            self.t1.append(x)
        return out


class S3FifoReference:
    """Algorithm 1 of Yang et al., one eviction at a time. The end of a list is the head of the queue."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_target = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self.freq

    def request(self, x: int) -> int | None:
        if x in self.freq:
            self.freq[x] = min(3, self.freq[x] + 1)
            return None
        out = self.evict() if len(self.freq) == self.capacity else None
        if x in self.ghost:
            self.ghost.remove(x)
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0
        return out

    def evict(self) -> int:
        if len(self.small) >= self.small_target:
            while self.small:
                tail = self.small.pop(0)
                if self.freq[tail] > 1:
                    self.main.append(tail)
                    self.freq[tail] = 0
                else:
                    self.ghost = (
                        [*self.ghost, tail][-(self.capacity - self.small_target) :] if self.capacity > 1 else []
                    )
                    del self.freq[tail]
                    return tail
        while True:
            tail = self.main.pop(0)
            if self.freq[tail] == 0:
                del self.freq[tail]
                return tail
            self.freq[tail] -= 1
            self.main.append(tail)
