"""What is done when the interpreter ends, called here in the midst of its life; test_lifetime.py lets programs end."""

from __future__ import annotations

import gc
import threading

import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler
from paddle_kv.schedule import at_exit
from tests.schedule.rig import SHORT_S, WAIT_S, threads_since


def at_the_end(monkeypatch, *schedulers) -> None:
    """Of a process that has these alone."""
    monkeypatch.setattr(at_exit, "schedulers", [one for one in at_exit.schedulers if one in schedulers])
    at_exit.close_all()


def test_what_is_submitted_arrives_and_what_is_not_is_dropped(rig, copies, monkeypatch):
    copies.hold("onload", 0)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])  # the first layer is being copied, the others have not begun
    assert copies.arrived.acquire(timeout=WAIT_S)
    save = scheduler.offload([2], [5], layerwise=True)
    threading.Timer(SHORT_S, copies.go_on).start()
    at_the_end(monkeypatch, scheduler)
    load.wait(0)
    with pytest.raises(CancelledError, match=r"offload was cancelled before layer 0 was moved"):
        save.wait(0)
    assert scheduler.stats()["streams"] == 0
    rig.expect_onload([4], [1])
    rig.check()


def test_nothing_is_taken_any_more_even_if_a_copy_did_not_end_in_time(rig, copies, monkeypatch):
    copies.hold("onload", 0)
    monkeypatch.setattr(at_exit, "EXIT_TIMEOUT_S", SHORT_S)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        at_the_end(monkeypatch, scheduler)
        assert not load.done()
        with pytest.raises(ClosedError, match=r"the scheduler is closed"):
            scheduler.offload([2], [5])
        copies.go_on()
        load.wait(WAIT_S)
    rig.expect_onload([4], [1])
    rig.check()


def test_what_a_dropped_scheduler_held_is_given_back(rig, monkeypatch):
    before = set(threading.enumerate())
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    assert len(threads_since(before)) == 2
    del scheduler
    gc.collect()
    at_the_end(monkeypatch)
    assert threads_since(before) == set()
