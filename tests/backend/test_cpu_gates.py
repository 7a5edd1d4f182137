"""Gates without a GPU, by themselves."""

from __future__ import annotations

import threading
import time

from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import SHORT_S, WAIT_S


def test_a_replay_whose_gate_gave_up_waits_at_no_other_one() -> None:
    """Nor at one to which another thread came later: the first is the one that is told."""
    gates = CpuBackend().create_gates(3, 20 * SHORT_S)
    gates.arm(None, 1, 0)
    first = threading.Thread(target=gates.wait, args=(2, None))
    first.start()
    time.sleep(4 * SHORT_S)
    second = threading.Thread(target=gates.wait, args=(0, None))
    second.start()
    for thread in (first, second):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    gates.wait(1, None)
    assert (gates.given_up(1), gates.given_up(2)) == (2, None)
    gates.close()
