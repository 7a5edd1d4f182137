"""The link, or the tier, of a simulated server: one load at a time. And what a tier may do to a read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from .link_queue import LinkQueue

T = TypeVar("T")
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Fault:
    """What a tier does to a read.

    Attributes:
        stall_s: it takes so much longer.
        factor: it takes so many times as long.
        fails: it ends with an error.
    """

    stall_s: float = 0.0
    factor: float = 1.0
    fails: bool = False


Faults = Callable[[int, float, int], Fault]  # number of the read, its time, its blocks


def no_faults(read: int, now_s: float, num_blocks: int) -> Fault:
    return Fault()


class Channel(Generic[T]):
    """
    Attributes:
        queue: of what waits for it.
        moving: what it moves now; None: nothing.
        begun_s: when that, or what it moved last, has begun.
    """

    def __init__(self) -> None:
        self.queue: LinkQueue[T] = LinkQueue(NO_LIMIT)
        self.moving: T | None = None
        self.begun_s = self._moved_s = 0.0

    def begin(self, job: T, now_s: float) -> None:
        self.moving, self.begun_s = job, now_s

    def end(self, now_s: float) -> float:
        """How long it took."""
        taken_s = now_s - self.begun_s
        self._moved_s += taken_s
        self.moving = None
        return taken_s

    def busy_s(self, now_s: float) -> float:
        """For how long it has moved something so far."""
        return self._moved_s + (0.0 if self.moving is None else now_s - self.begun_s)
