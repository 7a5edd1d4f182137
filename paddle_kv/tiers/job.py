"""Blocks of a pool on their way to a tier or from it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..lists import listed
from ..ops import _arguments as arguments
from ..ranges import count_of
from ..timeouts import check_time
from ..tracking.keeper import Deadline, Living
from ..values import check_bool, check_methods
from .object_format import MOST_KEY_BYTES
from .protocol import Outcome

_numbers = itertools.count(1)


class Observer(Protocol):
    """Hears of a job in threads of the tier; does not wait for anything."""

    def layers_arrived(self, job: Job, layers: range) -> None:
        """These layers of all blocks are in the pool, and right. In order; not called any more once a block failed."""

    def settled(self, job: Job) -> None:
        """It is known how it went with each block. Called once; the tier may still write to the blocks."""

    def over(self, job: Job) -> None:
        """Called once, last: the tier does not touch the blocks any more."""


class Job:
    """Blocks, each with its key, that are to be stored or loaded together.

    Args:
        keys: one for each block: its chained hash, at most 64 bytes.
        block_ids: of the pool. Until the job is over nobody may write blocks that are stored, nor touch those that are
            loaded.
        timeout_s: from the call of the tier on; what takes longer counts as late.
        layerwise: a load reports layers as they arrive, the first ones early. Else it reads each object at once.
        observer: hears of it; None: ask :meth:`Tier.finished`.

    Attributes:
        outcomes: one for each block, None where it is not known yet.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        block_ids: Any,
        *,
        timeout_s: float = 30.0,
        layerwise: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.keys, self.block_ids = check_blocks(keys, block_ids)
        self.timeout_s = check_time(timeout_s)
        check_bool(layerwise, "layerwise")
        if observer is not None:
            check_methods(observer, "observer", ("layers_arrived", "settled", "over"), "an object")
        self.layerwise = layerwise
        self.outcomes: list[Outcome | None] = [None] * len(self.keys)
        self.settled = False
        self.over = False
        self.told = False  # the observer has heard that it is over
        self.cancelled = False
        self.deadline = Deadline(None)
        self.started_s = 0.0
        self.kind = ""  # "store" or "load"
        self._observer = observer
        self._tell_tier: Callable[[], object] | None = None  # that it is cancelled
        self._lock = threading.Lock()
        self._num_unknown = len(self.keys)
        self._held = len(self.keys) + 1  # blocks that the tier may touch; and until it is settled
        self._arrived: list[int] = []  # blocks, by stage
        self._announced = 0  # stages

    def cancel(self) -> None:
        """What has not begun is dropped. May be called in the middle of anything."""
        self.cancelled = True
        tell = self._tell_tier
        if tell is not None:
            tell()

    @property
    def observed(self) -> bool:
        """Whether somebody is told of its end."""
        return self._observer is not None

    @property
    def done(self) -> bool:
        """Whether all blocks were stored, or loaded."""
        return all(outcome is Outcome.DONE for outcome in self.outcomes)

    @property
    def left_block_ids(self) -> list[int]:
        """Those that were not stored, or loaded."""
        ends = zip(self.block_ids, self.outcomes, strict=True)
        return [block_id for block_id, outcome in ends if outcome is not Outcome.DONE]

    @property
    def num_lost(self) -> int:
        """Blocks that did not come, without those that were dropped since the job was cancelled."""
        withdrawn = Outcome.DROPPED if self.cancelled else Outcome.DONE
        return sum(outcome not in (Outcome.DONE, withdrawn) for outcome in self.outcomes)

    # ---- what the tier calls ----
    def begin(self, kind: str, num_stages: int, now_s: float, cancelled: Callable[[], object] | None = None) -> None:
        """``cancelled`` is called when it is cancelled before it is over, in the middle of anything."""
        if self.started_s:
            raise ValueError("the job was handed to a tier before; make another one")
        self.kind = kind
        self.started_s = now_s
        self.deadline = Deadline(self.timeout_s)
        self._arrived = [0] * num_stages
        self._tell_tier = cancelled

    def stage_arrived(self, stage: int, stages: Sequence[range]) -> None:
        """Of one more block."""
        with self._lock:
            self._arrived[stage] += 1
            first = self._announced
            while self._announced < len(stages) and self._arrived[self._announced] == len(self.keys):
                self._announced += 1
            found = range(first, self._announced)
        for one in found:
            self._tell("layers_arrived", stages[one])

    def end(self, ends: Iterable[tuple[int, Outcome]]) -> list[Outcome]:
        """Of some blocks, by position. Those outcomes that were not known before."""
        fresh = []
        with self._lock:
            for position, outcome in ends:
                if self.outcomes[position] is None:
                    self.outcomes[position] = outcome
                    fresh.append(outcome)
            self._num_unknown -= len(fresh)
        return fresh

    def settle(self) -> bool:
        """Whether that makes all known, for the first time."""
        if self._num_unknown:
            return False  # asked for with each block
        with self._lock:
            if self.settled:
                return False
            self.settled = True
        self._tell("settled")
        self.let_go()
        return True

    def let_go(self, count: int = 1) -> None:
        """Of blocks that the tier will not touch again."""
        if not count:
            return
        with self._lock:
            self._held -= count
            if self._held:
                return
            self.over = True
        self._tell_tier = None
        self._tell("over")
        self.told = True

    def _tell(self, what: str, *given: object) -> None:
        """What an observer raises ends neither the job nor a thread of the tier."""
        if self._observer is not None:
            with Living("an error in the observer of a job"):
                getattr(self._observer, what)(self, *given)


def check_blocks(keys: Any, block_ids: Any) -> tuple[list[bytes], list[int]]:
    """As many keys as ids of blocks; TypeError, ValueError or IndexError unless they are that."""
    keys = check_keys(keys)
    ids = block_ids if isinstance(block_ids, range) else arguments.block_ids(block_ids, "block_ids")
    if len(keys) != count_of(ids):
        raise ValueError(f"keys has {len(keys)} entries, block_ids has {count_of(ids)}; both need the same number")
    return keys, arguments.block_ids(ids, "block_ids") if isinstance(ids, range) else ids


def check_keys(keys: Any, name: str = "keys") -> list[bytes]:
    """The keys as a list of bytes; TypeError or ValueError that names the argument unless they are that."""
    found = listed(keys)
    if found is None:
        raise TypeError(f"{name} is {type(keys).__name__}; a list of bytes is expected")
    for position, key in enumerate(found):
        if not isinstance(key, bytes):
            raise TypeError(f"{name}[{position}] is {type(key).__name__}; bytes are expected")
        if not 0 < len(key) <= MOST_KEY_BYTES:
            raise ValueError(f"{name}[{position}] has {len(key)} bytes; 1 to {MOST_KEY_BYTES} are expected")
    return found
