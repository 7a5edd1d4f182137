"""What an engine does: it moves objects, byte ranges between registered memory and a store, and reports each of them.

An engine knows names, sizes and addresses; what the bytes mean, and whether they are right, :mod:`.tier` knows. All of
it may be called by any thread, and nothing of it but ``close`` waits for storage. What it raises is
logged, and a miss; items whose buffers it has asked for it still has to end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..tracking.keeper import Deadline, Living


class Outcome(enum.Enum):
    """How it went with one object. All but ``DONE`` are a miss for who wanted to load it."""

    DONE = "done"
    MISSING = "missing"  # not there, or of another version, spec, model, group or rank
    DAMAGED = "damaged"  # what is there is not what was stored
    LATE = "late"  # not within its time-out
    DROPPED = "dropped"  # a full queue, a tier that rests after errors, or a cancelled job
    FAILED = "failed"  # the storage reported an error


class Write(Protocol):
    """An object that is to be stored. Visible under its name only when all of it is there."""

    name: bytes
    size_bytes: int
    deadline: Deadline
    aligned: bool  # addresses and sizes are multiples of 4 KiB: fit for direct I/O

    def buffers(self) -> list[memoryview] | None:
        """What to write, in order: asked for by a thread of the engine that is about to write, again if it tries again.
        None: it is not wanted any more."""

    def ended(self, outcome: Outcome) -> None:
        """To be called once: from then on the engine does not touch the memory."""


class Read(Protocol):
    """An object that is to be read in stages, each a range of bytes; the first begins at 0."""

    name: bytes
    size_bytes: int
    deadline: Deadline
    aligned: bool
    num_stages: int

    def stage_bytes(self, stage: int) -> int:
        """How many bytes the stage asks for."""

    def buffers(self, stage: int) -> tuple[int, list[memoryview]] | None:
        """Where the stage begins, and where its bytes go. None: nobody wants it any more."""

    def arrived(self, stage: int) -> bool:
        """To be called, in order, when the bytes of a stage are in place. False: the rest is not wanted."""

    def ended(self, outcome: Outcome) -> None:
        """To be called once: from then on the engine does not touch the memory. ``DONE``: all that was wanted came."""


# Of many items at once, which costs less of the processor. Items of the tier have the methods ``buffers_together``,
# ``arrived_together`` and ``ended_together`` for it; those that are not of one class are asked and told one by one.
def buffers_of(items: Sequence[Write]) -> list[list[memoryview] | None]:
    """``buffers`` of each write."""
    together = _together("buffers_together", [(item, None) for item in items])
    return together(items) if together else [item.buffers() for item in items]


def arrived(reads: Sequence[tuple[Read, int]]) -> list[bool]:
    """``arrived`` of each read with its stage."""
    together = _together("arrived_together", reads)
    return together(reads) if together else [item.arrived(stage) for item, stage in reads]


def ended(ends: Sequence[tuple[Write | Read, Outcome]]) -> None:
    """``ended`` of each. What one of them raises is logged, and the others are ended too."""
    together = _together("ended_together", ends)
    for some in [ends] if together else [[one] for one in ends]:
        with Living("an error in the end of an object"):
            if together:
                together(some)
            else:
                some[0][0].ended(some[0][1])


def _together(name: str, items: Sequence[tuple[object, object]]) -> Callable[[Any], Any] | None:
    kinds = {type(item) for item, _ in items}
    return getattr(kinds.pop(), name, None) if len(kinds) == 1 else None


class Engine(Protocol):
    """A store of objects. Existence is a hint: what ``exists`` reports may be gone when it is read."""

    name: str

    def register(self, memory: np.ndarray) -> None:
        """Buffers will lie in this memory, which lives until the engine is closed."""

    def write(self, items: Sequence[Write]) -> None:
        """Enqueues. Each item is ended, whatever happens."""

    def read(self, items: Sequence[Read]) -> None:
        """Enqueues; stage by stage: the first ones of all items come before the second ones."""

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether they could be read, as far as that is known here and now."""

    def delete(self, names: Sequence[bytes]) -> None:
        """Those that are there are not found any more; their bytes go now or soon."""

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes``, ``capacity_bytes``, ``evicted``, ``errors``, and what else it counts."""

    def close(self, timeout_s: float | None = None) -> None:
        """Ends all items. TimeoutError if a call of the storage did not return in time. Again: does nothing."""


Wrapper = Callable[[Engine], Engine]
