"""A device of which nobody reports that anything has ended: whoever needs to know looks at it."""

from __future__ import annotations

import threading

import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.tracking import memories
from tests.schedule.rig import WAIT_S


class Silent(CpuBackend):
    def watch(self, events, report):
        pass


@pytest.fixture
def scheduler(rig):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Silent()) as made:
        yield made


def test_a_wait_looks_when_its_time_is_over(rig, copies, scheduler):
    copies.hold("onload", 4)
    load = scheduler.onload([3], [2])
    threading.Timer(0.1, copies.go_on).start()
    load.wait(2.0)
    rig.expect_onload([3], [2])
    rig.check()


def test_a_call_looks_at_those_that_hold_its_blocks(copies, scheduler):
    copies.fail("onload", 3, RuntimeError("broken"))
    load = scheduler.onload([3, 4], [2, 5])
    assert load._movement.last_event.wait(WAIT_S)
    with pytest.raises(TransferError, match=r"block 5 of the device cache holds no usable data"):
        scheduler.offload([5], [1])
    assert scheduler.stats()["offload_transfers"] == 0


def test_a_lease_looks_at_those_that_hold_its_blocks(rig, scheduler):
    save = scheduler.offload([3], [2])
    assert save._movement.last_event.wait(WAIT_S)
    with rig.pool.lease([2], write=True, timeout_s=0):
        pass


def test_an_operator_that_is_checked_looks_at_those_that_hold_its_blocks(rig, scheduler):
    load = scheduler.onload([3], [2])
    assert load._movement.last_event.wait(WAIT_S)
    memories.check_access(rig.cache.tensor("key", 1).data_ptr(), [2], True, None)
    assert load.state.value == "done"  # which looks at no device


def test_a_pool_looks_at_those_that_hold_freed_blocks(rig, scheduler):
    blocks = rig.pool.allocate(2)
    save = scheduler.offload([3, 4], blocks)
    rig.pool.free(blocks)
    assert save._movement.last_event.wait(WAIT_S)
    assert rig.pool.num_free_blocks == rig.pool.num_blocks
