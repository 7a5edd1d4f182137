"""Faults around a sink, where a test wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...peers.fabrics import Fabric, Sink, Write


class FaultySink:
    """Passes writes on, but for those that a test has spoilt. The number of a write is that of its call, from 0 on.

    Args:
        sink: does the work.

    Attributes:
        arrived: released for each write that is held.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._number = 0
        self._faults: dict[int, Callable[[Write], None]] = {}
        self._held: list[Write] = []
        self.arrived = threading.Semaphore(0)

    def fail(self, number: int, why: str = "lost") -> None:
        """Nothing of it is written."""
        self._faults[number] = lambda write: _fail(write, why)

    def tear(self, number: int, why: str = "torn") -> None:
        """Half of its pieces are written, then it fails."""
        self._faults[number] = lambda write: self._sink.write(_half(write, why))

    def hold(self, number: int) -> None:
        """It is not begun before :meth:`go_on`."""
        self._faults[number] = self._hold

    def go_on(self) -> None:
        held, self._held = self._held, []
        for write in held:
            self._sink.write(write)

    def write(self, write: Write) -> None:
        number, self._number = self._number, self._number + 1
        self._faults.get(number, self._sink.write)(write)

    def close(self, timeout_s: float | None = None) -> None:
        held, self._held = self._held, []
        for write in held:
            _fail(write, "the sink is closed")
        self._sink.close(timeout_s)

    def _hold(self, write: Write) -> None:
        self._held.append(write)
        self.arrived.release()


class FaultyFabric:
    """A fabric of which each sink is a :class:`FaultySink`."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.sinks: list[FaultySink] = []

    def connect(self, address: bytes) -> FaultySink:
        self.sinks.append(FaultySink(self._fabric.connect(address)))
        return self.sinks[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)


def _fail(write: Write, why: str) -> None:
    write.ended(why)


def _half(write: Write, why: str) -> Write:
    half = len(write.sizes) // 2
    lists = (write.sources[:half], write.targets[:half], write.sizes[:half])
    return Write(*lists, write.deadline, lambda found: write.ended(found or why), write.wanted)
