"""Saves that tell when each layer is in host memory."""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler, Transfer
from paddle_kv.backend.work import TransferPlan
from paddle_kv.schedule import layer_ends
from paddle_kv.schedule.movement import State
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig


class Heard:
    """``told``: ranges of layers, and the transfer at its end."""

    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        self.scheduler = scheduler
        self.told: queue.Queue[Any] = queue.Queue()
        self.threads: set[threading.Thread] = set()

    def hear(self, what: Any) -> None:
        assert not self.scheduler.group.inside
        self.threads.add(threading.current_thread())
        self.told.put(what)

    def start(self, plan: TransferPlan) -> Transfer:
        section = functools.partial(
            layer_ends.start, self.scheduler, plan, self.scheduler.compute_stream(None), self.hear, self.hear
        )
        save: Transfer = change(self.scheduler, section)
        return save

    def next(self, count: int = 1) -> list[Any]:
        return [self.told.get(timeout=WAIT_S) for _ in range(count)]


def test_each_group_is_told_once_while_later_ones_are_on_their_way(rig: Rig, copies: Copies) -> None:
    copies.hold("offload", 3)
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        heard = Heard(scheduler)
        save = heard.start(scheduler.plan("offload", [3, 1], [2, 7]))
        assert save._movement.stream is scheduler.resources.streams["offload"]
        assert save.unmarked_layers == [0, 1, 2, 3, 4]
        for layer in (4, 0, 1, 2, 3):
            save.mark_layer_written(layer)
        assert sorted(heard.next(2), key=lambda layers: layers.start) == [range(2), range(4, 5)]
        with pytest.raises(queue.Empty):
            heard.told.get(timeout=SHORT_S)
        copies.go_on()
        save.wait(WAIT_S)
        last = heard.next(2)  # in either order
        assert range(2, 4) in last
        assert save._movement in last
        assert threading.current_thread() not in heard.threads
    assert heard.told.empty()
    rig.expect_offload([3, 1], [2, 7])
    rig.check()


def test_a_group_that_failed_is_not_told_and_nothing_is_kept_or_logged(
    rig: Rig, copies: Copies, caplog: pytest.LogCaptureFixture
) -> None:
    copies.fail("offload", 2, OSError("lost"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        heard = Heard(scheduler)
        save = heard.start(scheduler.plan("offload", [3], [2]))
        movement = save._movement
        copies.hold("offload", 0)
        for layer in range(5):
            save.mark_layer_written(layer)
        copies.go_on()
        save.wait_over(WAIT_S)
        told = heard.next(5)
        assert movement in told
        assert [one for one in told if one is not movement] == [range(1), range(1, 2), range(3, 4), range(4, 5)]
        assert movement.state is State.FAILED

        error = movement.events[2].error
        layer_ends._passed(heard.hear, movement, (), 2)  # heard of late
        assert error.__traceback__ is None
        layer_ends._passed(heard.hear, movement, (), 1)
        assert heard.next() == [range(1, 2)]
        assert save.error is not None  # asked for: it is not logged
    assert heard.told.empty()
    assert caplog.messages == []
