"""An event of the CPU backend, as threads see it that look while it passes."""

from __future__ import annotations

import threading

from paddle_kv import BackendError
from paddle_kv.backend.cpu_backend import CpuEvent


def test_its_error_and_its_time_are_there_before_it_has_passed() -> None:
    event, error = CpuEvent(), BackendError("broken")
    seen = []

    class Looking(threading.Event):
        def set(self) -> None:
            seen.append((event.error, event.time_s > 0))
            super().set()

    event._passed = Looking()
    event.set(error)
    assert seen == [(error, True)]
