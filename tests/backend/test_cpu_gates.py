"""Gates without a GPU, by themselves."""

from __future__ import annotations

import threading

import pytest

from paddle_kv.backend import cpu_gates
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.tracking.keeper import Waiter
from tests.schedule.rig import WAIT_S


def test_a_replay_whose_gate_gave_up_waits_at_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a thread that came later wait for its whole time."""
    time_is_over, later_sleeps = threading.Event(), threading.Event()

    class Sleeping(Waiter):
        def sleep(self, timeout_s: float | None) -> bool:
            if threading.current_thread() is first:  # its time is over when the test says so
                assert time_is_over.wait(WAIT_S)
                return False
            if threading.current_thread() is later:
                later_sleeps.set()
            return super().sleep(timeout_s)

    monkeypatch.setattr(cpu_gates, "Waiter", Sleeping)
    gates = CpuBackend().create_gates(3, 1000.0)
    gates.arm(None, 1, 0)
    first, later = (threading.Thread(target=gates.wait, args=(layer, None), daemon=True) for layer in (2, 0))
    first.start()
    later.start()
    assert later_sleeps.wait(WAIT_S)
    assert gates.given_up(1) is None
    time_is_over.set()
    for thread in (first, later):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    third = threading.Thread(target=gates.wait, args=(1, None), daemon=True)
    third.start()
    third.join(WAIT_S)
    assert not third.is_alive()
    assert (gates.given_up(1), gates.given_up(2)) == (2, None)
    gates.close()
