"""A device of which nobody reports anything: which transfers are asked, and what is found out by it."""

from __future__ import annotations

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from tests.schedule.rig import WAIT_S


class Silent(CpuBackend):
    def __init__(self) -> None:
        self.asked = []

    def watch(self, events, report):
        pass

    def is_complete(self, *events):
        self.asked.append(events[0])
        return super().is_complete(*events)


@pytest.fixture
def backend():
    return Silent()


@pytest.fixture
def scheduler(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as made:
        yield made


def a_ladder(scheduler):
    """Two transfers a step; each reads what both of the step before move."""
    found = []
    for step in range(4):
        start = scheduler.onload if step % 2 else scheduler.offload
        source, target = step // 2 * 4, (step + 1) // 2 * 4
        found.append(start([source, source + 2], [target, target + 1]))
        found.append(start([source + 1, source + 3], [target + 2, target + 3]))
    return found


def test_those_that_are_read_from_are_asked_with_it_each_once(copies, backend, scheduler):
    copies.hold("offload", 0)
    ladder = a_ladder(scheduler)
    copies.go_on()
    events = [transfer._movement.last_event for transfer in ladder]
    assert all(event.wait(WAIT_S) for event in events)
    backend.asked.clear()
    assert ladder[-1].done()
    assert all(transfer._movement.over for transfer in ladder)
    assert [backend.asked.count(event) for event in events] == [1] * 8


def test_behind_copies_that_run_nobody_is_asked(copies, backend, scheduler):
    copies.hold("onload", 4)
    save, load, again = scheduler.offload([3], [2]), scheduler.onload([2], [5]), scheduler.offload([5], [7])
    assert save._movement.last_event.wait(WAIT_S)
    backend.asked.clear()
    assert not again.done()
    assert backend.asked == [again._movement.last_event]
    copies.go_on()
    assert again._movement.last_event.wait(WAIT_S)
    again.wait(WAIT_S)
    assert load.done()
