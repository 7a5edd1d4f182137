"""An event of the CPU backend, as threads see it that look while it passes."""

from __future__ import annotations

from paddle_kv import BackendError
from paddle_kv.backend.cpu_backend import CpuEvent


def test_its_error_and_its_time_are_there_before_it_has_passed() -> None:
    seen = []

    class Looking(CpuEvent):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "_passed" and value:
                seen.append((self.error, self.time_s > 0))
            super().__setattr__(name, value)

    event, error = Looking(), BackendError("broken")
    event.set(error)
    assert seen == [(error, True)]
