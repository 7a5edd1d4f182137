"""Two threads close one scheduler."""

from __future__ import annotations

import threading

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import SHORT_S, WAIT_S


def test_a_second_closer_returns_when_the_first_one_has_closed(rig):
    at_it, go_on, returned = threading.Event(), threading.Event(), threading.Event()

    class Slow(CpuBackend):
        def destroy_stream(self, stream):
            at_it.set()
            assert go_on.wait(WAIT_S)
            super().destroy_stream(stream)

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Slow())
    first = threading.Thread(target=scheduler.close)
    second = threading.Thread(target=lambda: (scheduler.close(), returned.set()))
    first.start()
    assert at_it.wait(WAIT_S)
    second.start()
    assert not returned.wait(4 * SHORT_S)
    go_on.set()
    assert returned.wait(WAIT_S)
    for thread in (first, second):
        thread.join(WAIT_S)
