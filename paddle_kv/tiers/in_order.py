"""Several engines as one: neighbours, say, and behind them files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..tracking.keeper import Deadline
from ..values import check_methods
from . import protocol
from .protocol import Engine, Outcome, Read, Write

_SUMS = ("objects", "used_bytes", "capacity_bytes", "evicted", "errors", "resting_roots")


class EnginesInOrder:
    """Reads each object out of the first engine that has it; stores in the last one.

    What an engine has lost before the first stage of it came is read out of a later one that has it. ``delete`` deletes
    in all of them; what turns out to be missing or damaged in one of them is deleted there alone.

    Args:
        engines: two or more, those that are to be asked first in front. They stay their owner's: close this one first,
            then them.

    Raises:
        TypeError: not a list of engines.
        ValueError: less than two.

    Example:
        >>> import tempfile
        >>> from paddle_kv.tiers import EnginesInOrder, FilesEngine
        >>> folder = tempfile.TemporaryDirectory()
        >>> fast, slow = (FilesEngine({f"{folder.name}/{name}": 1 << 20}) for name in ("fast", "slow"))
        >>> with fast, slow:
        ...     EnginesInOrder([fast, slow]).exists([b"0123456789abcdef"])
        [False]
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not isinstance(engines, (list, tuple)):
            raise TypeError(f"engines is {type(engines).__name__}; a list of engines is expected")
        for position, one in enumerate(engines):
            methods = ("register", "write", "read", "exists", "delete", "stats")
            check_methods(one, f"engines[{position}]", methods, "an object")
        if len(engines) < 2:
            raise ValueError(f"engines has {len(engines)} entries; two or more are expected")
        self._engines = list(engines)
        self.name = ", ".join(one.name for one in engines)
        self._ending = threading.local()  # in which engine the objects are that a thread ends

    def register(self, memory: np.ndarray) -> None:
        for one in self._engines:
            one.register(memory)

    def write(self, items: Sequence[Write]) -> None:
        self._engines[-1].write(items)

    def read(self, items: Sequence[Read]) -> None:
        self._read(items, 0)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return list(map(any, zip(*(one.exists(names) for one in self._engines), strict=True)))

    def delete(self, names: Sequence[bytes]) -> None:
        engine = getattr(self._ending, "engine", None)
        for one in self._engines if engine is None else [engine]:
            one.delete(names)

    def stats(self) -> dict[str, float]:
        """``objects``, ``used_bytes``, ``capacity_bytes``, ``evicted``, ``errors``, ``resting_roots`` of all together;
        each engine has its own."""
        found = [one.stats() for one in self._engines]
        return {name: sum(stats.get(name, 0) for stats in found) for name in _SUMS}

    def close(self, timeout_s: float | None = None) -> None:
        """Closes all of them, the first ones first; see theirs."""
        deadline = Deadline(timeout_s)
        for one in self._engines:
            one.close(deadline.left_s())

    # ---- inside ----
    def _read(self, items: Sequence[Read], first: int) -> None:
        """Of these engines on; the last one is asked for what none has."""
        for number, engine in enumerate(self._engines[first:-1], first):
            there = engine.exists([item.name for item in items])
            found = [_Early(item, self, number) for item, has in zip(items, there, strict=True) if has]
            items = [item for item, has in zip(items, there, strict=True) if not has]
            if found:
                engine.read(found)
        if items:
            self._engines[-1].read(items)

    @contextmanager
    def _deleting_in(self, number: int) -> Iterator[None]:
        before = getattr(self._ending, "engine", None)
        self._ending.engine = self._engines[number]
        try:
            yield
        finally:
            self._ending.engine = before


class _Early:
    """An object that is read out of an engine which is not the last one."""

    def __init__(self, item: Read, owner: EnginesInOrder, number: int) -> None:
        self._item, self._owner, self._number = item, owner, number
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def arrived(self, stage: int) -> bool:
        return self.arrived_together([(self, stage)])[0]

    def ended(self, outcome: Outcome) -> None:
        self.ended_together([(self, outcome)])

    @staticmethod
    def arrived_together(reads: Sequence[tuple[_Early, int]]) -> list[bool]:
        for one, _ in reads:
            one._has_begun = True
        return protocol.arrived([(one._item, stage) for one, stage in reads])

    @staticmethod
    def ended_together(ends: Sequence[tuple[_Early, Outcome]]) -> None:
        for one, outcome in ends:
            owner = one._owner
            lost = outcome in (Outcome.MISSING, Outcome.FAILED, Outcome.DROPPED) and not one._has_begun
            if lost and any(engine.exists([one.name])[0] for engine in owner._engines[one._number + 1 :]):
                owner._read([one._item], one._number + 1)
            else:
                with owner._deleting_in(one._number):
                    protocol.ended([(one._item, outcome)])
