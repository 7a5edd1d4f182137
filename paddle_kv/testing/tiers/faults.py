"""An engine that goes wrong as storage and networks do, around any other."""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...tiers import Engine, Outcome, Read, Write


class Fault(enum.Enum):
    """``LATE``: the end is reported later; ``LOST``: never, until the engine is closed; ``TORN``: the second half of
    the bytes is missing; ``WRONG``: one bit is another one; ``TWICE``: everything is reported two times."""

    LATE = "late"
    LOST = "lost"
    TORN = "torn"
    WRONG = "wrong"
    TWICE = "twice"


class FaultyEngine:
    """Args:
        engine: does the work.
        faults: those that may happen.
        share: of the objects that are hit, each time they are stored or loaded.
        seed: of the choice.
        delay_s: of ``Fault.LATE``.

    Attributes:
        dead: while it is set nothing works, as of a server that is gone.
        num_hit: objects.
    """

    def __init__(
        self, engine: Engine, faults: Sequence[Fault], *, share: float = 0.5, seed: int = 0, delay_s: float = 0.02
    ) -> None:
        self.name = f"faulty {engine.name}"
        self.dead = False
        self.num_hit = 0
        self.delay_s = delay_s
        self.random = random.Random(seed)
        self.lost: list[Any] = []
        self._engine = engine
        self._faults = list(faults)
        self._share = share

    def register(self, memory: np.ndarray) -> None:
        self._engine.register(memory)

    def write(self, items: Sequence[Write]) -> None:
        if self._alive(items):
            self._engine.write([self._hit(item, _FaultyWrite) for item in items])

    def read(self, items: Sequence[Read]) -> None:
        if self._alive(items):
            self._engine.read([self._hit(item, _FaultyRead) for item in items])

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [False] * len(names) if self.dead else self._engine.exists(names)

    def delete(self, names: Sequence[bytes]) -> None:
        if not self.dead:
            self._engine.delete(names)

    def clear(self) -> None:
        self._engine.clear()  # type: ignore[attr-defined]

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    def close(self, timeout_s: float | None = None) -> None:
        self._engine.close(timeout_s)
        while self.lost:
            self.lost.pop().ended(Outcome.FAILED)

    def _alive(self, items: Sequence[Any]) -> bool:
        for item in items if self.dead else ():
            item.ended(Outcome.FAILED)
        return not self.dead

    def _hit(self, item: Any, kind: type[_Faulty]) -> Any:
        if not self._faults or self.random.random() >= self._share:
            return item
        self.num_hit += 1
        return kind(item, self, self.random.choice(self._faults))


class _Faulty:
    def __init__(self, item: Any, engine: FaultyEngine, fault: Fault) -> None:
        self._item, self._engine, self._fault = item, engine, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def ended(self, outcome: Outcome) -> None:
        if self._fault is Fault.LOST:
            self._engine.lost.append(self._item)
        elif self._fault is Fault.LATE:
            threading.Timer(self._engine.delay_s, self._item.ended, [outcome]).start()
        else:
            for _ in range(2 if self._fault is Fault.TWICE else 1):
                self._item.ended(outcome)

    def _spoil(self, buffers: Sequence[memoryview]) -> None:
        """Somewhere in them, header and payload alike."""
        if self._fault is Fault.TORN:
            whole = buffers[-1]
            whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
        elif self._fault is Fault.WRONG:
            buffer = self._engine.random.choice(buffers)
            buffer[self._engine.random.randrange(len(buffer))] ^= 1 << self._engine.random.randrange(8)


class _FaultyWrite(_Faulty):
    aligned = False  # what is spoiled are copies

    def buffers(self) -> list[memoryview] | None:
        found = self._item.buffers()
        if found is None:
            return None
        copies = [memoryview(bytearray(buffer)) for buffer in found]
        self._spoil(copies)
        return copies


class _FaultyRead(_Faulty):
    def arrived(self, stage: int) -> bool:
        asked = self._item.buffers(stage)
        if asked is not None:
            self._spoil(asked[1])
        more = bool(self._item.arrived(stage))
        if self._fault is Fault.TWICE:
            self._item.arrived(stage)
        return more
