"""An event of the CPU backend, as threads see it that look while it passes."""

from __future__ import annotations

import threading

import pytest

from paddle_kv import BackendError
from paddle_kv.backend.cpu_backend import CpuEvent
from paddle_kv.tracking.keeper import Waiter
from tests.schedule.rig import SHORT_S, WAIT_S


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


def test_what_passes_when_the_time_is_over_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    event = CpuEvent()

    def sleep(waiter: Waiter, timeout_s: float | None) -> bool:
        event._passed = True  # the thread that sets it has not come to the waiters yet
        return False

    monkeypatch.setattr(Waiter, "sleep", sleep)
    assert event.wait(0.0)


def test_a_thread_that_synchronizes_is_held_until_the_event() -> None:
    event = CpuEvent()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join(SHORT_S)
    assert thread.is_alive()
    event.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
