"""A device that cannot be asked to report an end: there is no memory for it, say. The transfer fails, and what it holds
is free when nothing touches it any more."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import SHORT_S, WAIT_S


class Deaf(CpuBackend):
    def watch(self, events, report):
        raise MemoryError("no room for a report")


@pytest.fixture
def scheduler(rig):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Deaf()) as made:
        yield made


def test_it_is_over_when_its_copies_are(rig, copies, scheduler):
    copies.hold("onload", 4)
    threading.Timer(SHORT_S, copies.go_on).start()
    with pytest.raises(TransferError, match="no room for a report"):
        scheduler.onload([3], [2])
    assert rig.cache.domain.busy([2]) == []
    assert rig.pool.domain.busy([3]) == []
    assert rig.cache.domain.poisoned([2]) == [2]


def test_what_fails_through_it_is_over_too(rig, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    load = scheduler.onload([2], [5])
    told = queue.SimpleQueue()
    load.add_done_callback(told.put)
    with contextlib.suppress(TransferError):
        for layer in range(rig.cache.spec.num_layers):
            save.mark_layer_written(layer)
    assert told.get(timeout=WAIT_S) is load  # nobody has asked for it
    assert load.state.value == "failed"
    assert rig.cache.domain.busy([3, 5]) == rig.pool.domain.busy([2]) == []
