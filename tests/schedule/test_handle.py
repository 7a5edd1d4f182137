"""What the handle of a transfer asks and follows, where others could not tell the difference."""

from __future__ import annotations

import threading

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.offload import KVOffloadManager
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import Deadline
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, make_spec
from tests.schedule.test_asking_the_device import a_ladder

LAYERS = 5


class Named(CpuBackend):
    """The caller's streams are names; notes which of them waits."""

    def __init__(self) -> None:
        self.waiting: list[object] = []

    def compute_stream(self, stream):
        return stream

    def wait_on_stream(self, stream, event, timeout_s):
        self.waiting.append(stream)


def test_a_transfer_can_be_asked_in_a_section(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        assert change(scheduler, save.done) is False
        assert change(scheduler, lambda: save.error) is None
        save.cancel()
        assert change(scheduler, save.done) is True


def test_what_comes_true_at_the_last_moment_was_waited_for(rig: Rig) -> None:
    """Between the first look and the sleep."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([2], [3])
        for answers in ([True], [False, True]):
            found = iter(answers)
            assert load._wait_for(lambda found=found: next(found), Deadline(0.0)) is True  # type: ignore[misc]
        assert not load._movement.waiters
        load.wait(WAIT_S)


@pytest.mark.parametrize("call", ["wait_layer", "wait_on"])
def test_the_time_of_one_that_moves_nothing_is_that_of_those_before_it(rig: Rig, copies: Copies, call: str) -> None:
    copies.hold("offload", 2)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler) as manager:
        save = manager.save([b"a", b"b"], [3, 4], layerwise=True)
        again = manager.save([b"a", b"b"], [3, 4])
        assert again.bytes == 0
        timer = threading.Timer(WAIT_S / 4, save.cancel)  # or an edit would never come back
        timer.start()
        with pytest.raises(TimeoutError):
            again.wait_layer(2, timeout_s=SHORT_S) if call == "wait_layer" else again.wait_on(timeout_s=SHORT_S)
        assert timer.is_alive()
        timer.cancel()
        for layer in range(LAYERS):
            save.mark_layer_written(layer)
        copies.go_on()
        again.wait_layer(2, timeout_s=WAIT_S) if call == "wait_layer" else again.wait_on(timeout_s=WAIT_S)


@pytest.mark.parametrize("call", ["wait_layer", "wait_on"])
def test_the_stream_behind_one_that_moves_nothing_is_that_of_the_caller(rig: Rig, copies: Copies, call: str) -> None:
    copies.hold("offload", 4)
    backend = Named()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler, KVOffloadManager(scheduler) as manager:
        manager.save([b"a"], [3])
        again = manager.save([b"a"], [3])
        assert again.bytes == 0
        again.wait_layer(4, stream="a stream") if call == "wait_layer" else again.wait_on("a stream")
        assert backend.waiting == ["a stream"]
        copies.go_on()
        again.wait(WAIT_S)


def test_whether_one_stands_behind_another_is_asked_once_of_each_between_them() -> None:
    """There are as many ways through the ladder as two to the power of its steps."""
    rig = Rig(make_spec(num_layers=1), device_blocks=70, host_blocks=64)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload(range(64, 68), range(4), layerwise=True)  # is not marked: the others stay behind it
        ladder = a_ladder(scheduler, num_steps=30)
        assert ladder[-1].stands_behind(first)
        assert not first.stands_behind(ladder[-1])


def test_one_that_is_submitted_stands_in_front_of_nobody(rig: Rig, copies: Copies) -> None:
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [0])
        load = scheduler.onload([5], [1])  # submitted, behind the copies of the first
        second = scheduler.offload([1], [6], layerwise=True)
        assert second.stands_behind(load)
        assert not second.stands_behind(first)
        second.cancel()
        copies.go_on()
        scheduler.drain(WAIT_S)


def test_behind_a_chain_that_was_dropped_one_stands_behind_what_is_left(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([0], [0], layerwise=True)
        chain = [scheduler.onload([3 + number], [0]) for number in range(6)]
        for load in chain:
            load.cancel()
        last = scheduler.onload([1], [0])
        assert last._movement.depends_on == {first._movement}
        assert last.stands_behind(first)
        for layer in range(LAYERS):
            first.mark_layer_written(layer)
        last.wait(WAIT_S)
        for load in chain:
            with pytest.raises(CancelledError):
                load.wait(WAIT_S)
    rig.expect_offload([0], [0])
    rig.expect_onload([1], [0])
    rig.check()
