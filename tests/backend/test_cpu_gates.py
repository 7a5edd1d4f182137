"""Gates without a GPU, by themselves."""

from __future__ import annotations

import threading
import time

from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import SHORT_S, WAIT_S


def test_a_replay_whose_gate_gave_up_waits_at_no_other_one() -> None:
    """Nor does a thread that came later wait for its whole time."""
    timeout_s = 20 * SHORT_S
    gates = CpuBackend().create_gates(3, timeout_s)
    gates.arm(None, 1, 0)
    first = threading.Thread(target=gates.wait, args=(2, None))
    first.start()
    time.sleep(0.6 * timeout_s)
    started_s = time.monotonic()
    gates.wait(0, None)
    assert time.monotonic() - started_s < 0.9 * timeout_s
    first.join(WAIT_S)
    gates.wait(1, None)
    assert (gates.given_up(1), gates.given_up(2)) == (2, None)
    gates.close()
