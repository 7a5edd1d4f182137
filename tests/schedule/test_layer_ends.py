"""Saves that tell when each layer is in host memory."""

from __future__ import annotations

import functools
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import LayerwiseScheduler, Transfer
from paddle_kv.backend.work import TransferPlan
from paddle_kv.schedule import layer_ends
from paddle_kv.schedule.movement import State
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig


class Heard:
    """``told``: lists of layers, and the transfer at its end."""

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

    def next(self, num_layers: int, *, end: bool = False) -> list[Any]:
        """So many layers, and the transfer, in whatever portions."""
        layers: list[Any] = []
        while len(layers) < num_layers + end:
            what = self.told.get(timeout=WAIT_S)
            layers += what if isinstance(what, list) else [what]
        return layers


def test_each_group_is_told_once_while_later_ones_are_on_their_way(rig: Rig, copies: Copies) -> None:
    copies.hold("offload", 3)
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        heard = Heard(scheduler)
        save = heard.start(scheduler.plan("offload", [3, 1], [2, 7]))
        assert save._movement.stream is scheduler.resources.streams["offload"]
        assert save.unmarked_layers == [0, 1, 2, 3, 4]
        for layer in (4, 0, 1, 2, 3):
            save.mark_layer_written(layer)
        assert heard.next(3) == [4, 0, 1]
        with pytest.raises(queue.Empty):
            heard.told.get(timeout=SHORT_S)
        copies.go_on()
        save.wait(WAIT_S)
        last = heard.next(2, end=True)
        assert last in ([2, 3, save._movement], [save._movement, 2, 3])
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
        told = heard.next(4, end=True)
        assert movement in told
        assert [one for one in told if one is not movement] == [0, 1, 3, 4]
        assert movement.state is State.FAILED

        error = movement.events[2].error
        late = layer_ends._LayerEnds(heard.hear)
        late._report(movement, (), 2)
        late._report(movement, (), 1).soon()
        assert heard.next(1) == [1]
        assert error.__traceback__ is None
        assert save.error is not None  # asked for: it is not logged
    assert heard.told.empty()
    assert caplog.messages == []


def test_what_has_ended_by_then_is_told_by_one_call(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3, 1], [2, 7])
        save.wait(WAIT_S)
        told: list[list[int]] = []
        ends = layer_ends._LayerEnds(told.append)
        busy = threading.Event()
        scheduler.group.host.post(lambda: busy.wait(WAIT_S))
        for group in (2, 0, 4):
            ends._report(save._movement, (), group).soon()
        busy.set()
        keeper.call(list)  # behind it
        assert told == [[2, 0, 4]]
        for group in (1, 3):
            later = ends._report(save._movement, (), group)
        later.now()
        assert told[1:] == [[1, 3]]
        later.now()
        assert len(told) == 2


def test_what_ends_until_its_host_comes_to_it_is_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ends, "change", lambda movement, section: section())
    jobs: list[Any] = []
    told: list[list[int]] = []
    movement: Any = SimpleNamespace(
        group=SimpleNamespace(host=SimpleNamespace(post=jobs.append)),
        plan=SimpleNamespace(layers_of=lambda group: [2 * group, 2 * group + 1]),
        events=range(3),
        scheduler=SimpleNamespace(backend=SimpleNamespace(is_complete=lambda event: True)),
    )
    ends = layer_ends._LayerEnds(told.append)
    for group in (2, 0):
        ends._report(movement, (), group).soon()
    assert len(jobs) == 1
    jobs.pop()()
    assert told == [[4, 5, 0, 1]]
    ends._report(movement, (), 1).soon()
    jobs.pop()()
    assert told[1:] == [[2, 3]]
    assert jobs == []
