"""The host of a simulation: sections run where they are called, and waiting lets the device run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ...tracking.keeper import Waiter
from .device import Device


class SimulatedHost:
    """See :class:`~paddle_kv.tracking.keeper.Host`. What the library's thread would do is done before the next section,
    or while the caller waits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._posted: deque[Callable[[], object]] = deque()
        self._depth = 0

    def call(self, function: Callable[[], Any]) -> Any:
        self._run_posted()
        self._depth += 1
        try:
            return function()
        finally:
            self._depth -= 1

    def soon(self, function: Callable[[], object]) -> None:
        self.call(function)

    def post(self, function: Callable[[], object]) -> None:
        self._posted.append(function)

    def park(self, waiter: Waiter, timeout_s: float | None) -> bool:
        def released() -> bool:
            self._run_posted()
            return waiter.sleep(0.0)

        return self._device.run_until(released, timeout_s)

    def pause(self) -> None:
        pass

    def _run_posted(self) -> None:
        while self._posted and not self._depth:
            self._posted.popleft()()
