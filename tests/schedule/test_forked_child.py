"""What a forked child is told of the transfers of its parent, and what it leaves to it."""

from __future__ import annotations

import os
import signal

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.schedule import resources


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
