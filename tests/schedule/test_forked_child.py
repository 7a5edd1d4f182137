"""What a forked child is told of the transfers of its parent, and what it leaves to it."""

from __future__ import annotations

import gc
import os
import signal
import threading

import numpy as np
import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.work import TransferPlan
from paddle_kv.errors import TransferError
from paddle_kv.schedule import resources
from paddle_kv.tracking import group
from paddle_kv.tracking.group import change
from tests.schedule.rig import WAIT_S


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_each_transfer_ends_for_its_own_reason(rig, copies):
    """Not one because of the other: the later one is ended first."""
    copies.hold("offload", 0)
    reading, writing = os.pipe()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([2], [5])
        load = scheduler.onload([5], [3])
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            for transfer in (save, load):
                os.write(writing, f"{transfer.state.value}: {transfer.error}\n".encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            lines = told.read().splitlines()
        os.waitpid(child, 0)
        copies.go_on()
    assert lines == [f"failed: the process forked while the {name} was in flight" for name in ("offload", "onload")]


def test_what_the_parent_holds_is_left_to_it(rig, monkeypatch):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        held = scheduler.resources
        events, streams = held.num_events, dict(held.streams)
        with monkeypatch.context() as as_child:
            as_child.setattr(resources.os, "getpid", lambda: -1)
            held.release()
        assert held.num_events == events
        assert held.streams == streams


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nothing_of_the_parent_is_kept_for_its_end(rig, copies):
    """The thread that would be told of the last reference is the parent's. A lease goes on, with a guard of its own."""
    copies.fail("offload", 0, OSError("lost"))
    reading, writing = os.pipe()
    lease = rig.pool.lease([4], write=True)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        failed = scheduler.offload([2], [5])
        failed.wait_over(WAIT_S)  # and nobody has asked how it ended
        lease.__enter__()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                kept = len(group._guards)
                del lease
                with rig.pool.lease([4], timeout_s=WAIT_S / 2):
                    os.write(writing, f"{kept} {len(group._guards)}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading) as told:
            found = told.read()
        os.waitpid(child, 0)
        lease.__exit__(None, None, None)
        with pytest.raises(TransferError, match="lost"):
            failed.wait(WAIT_S)
    assert found == "1 1"


def test_what_is_the_parents_is_not_told_by_the_child_and_holds_no_block_there(rig, copies, caplog):
    """Here in the process itself, of which the device goes on."""
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        movement = load._movement
        change(scheduler, movement.abandon)
        assert (load.state.value, movement.retired) == ("failed", True)
        assert rig.pool.domain.busy(range(17)) == rig.cache.domain.busy(range(13)) == []
        copies.go_on()
        assert movement.events[4].wait(WAIT_S)
        del load, movement
        gc.collect()
        scheduler.offload([], []).wait(WAIT_S)
    assert caplog.records == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_reads_a_plan_while_a_thread_of_the_parent_was_at_one() -> None:
    """As the thread of a stream is: what it holds there stays held in the child."""
    reached, go_on = threading.Event(), threading.Event()

    class Slow:
        def tolist(self) -> list[int]:
            reached.set()
            go_on.wait(WAIT_S)
            return [1]

    plans = [TransferPlan("offload", np.array([1]), np.array([2]), num_layers=3, layers_per_event=1) for _ in range(2)]
    vars(plans[0])["device_ids"] = Slow()
    thread = threading.Thread(target=lambda: plans[0].id_lists)
    thread.start()
    assert reached.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        os._exit(0 if plans[1].id_lists == ([1], [2]) else 1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0
    assert plans[0].id_lists == ([1], [2])
