"""Cancelling where the device does not take part, and what later transfers wait for behind a cancelled one."""

from __future__ import annotations

import random

import pytest

from paddle_kv import LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import submission
from tests.schedule.rig import WAIT_S


class Watched(CpuBackend):
    """Keeps what each submission waits for."""

    def __init__(self) -> None:
        self.waits = {}

    def copy_layers(self, binding, work, stream):
        self.waits.setdefault(work.number, []).extend(event for events in work.waits for event in events)
        super().copy_layers(binding, work, stream)


class Refusing(CpuBackend):
    """Cancels nothing."""

    def cancel(self, stream, number):
        raise RuntimeError("refused")


def test_a_cancel_that_the_device_refuses_is_a_failure(rig, copies):
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Refusing()) as scheduler:
        load = scheduler.onload([3], [2])
        load.cancel()
        assert load.failed
        copies.go_on()
        with pytest.raises(TransferError, match="the onload could not be cancelled: refused") as caught:
            load.wait(WAIT_S)
        assert caught.value.block_ids == [2]
        with pytest.raises(TransferError, match="block 2 of the device cache holds no usable data"):
            scheduler.offload([2], [1])


def test_events_that_were_given_back_are_not_waited_for(rig, copies):
    backend = Watched()
    copies.hold("onload", 1)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        load = scheduler.onload([4], [1])
        cancelled = scheduler.offload([1], [5], layerwise=True)
        cancelled.mark_layer_written(0)
        cancelled.wait_layer(0, timeout_s=WAIT_S)
        given_back = [event for event in cancelled._movement.events if event is not None]
        cancelled.cancel()
        behind_the_load = cancelled.done() and not cancelled._movement.retired
        save = scheduler.offload([3], [5])
        compute, waits = list(save._movement.after), backend.waits[save._movement.number]
        copies.go_on()
        save.wait(WAIT_S)
    assert behind_the_load
    assert given_back and not set(given_back) & set(waits)
    assert compute and set(compute) <= set(waits)
    assert set(load._movement.events[1:]) <= set(waits)
    rig.expect_onload([4], [1])
    rig.expect_offload([3], [5])
    rig.check()


def test_behind_a_cancelled_one_that_still_runs_the_order_is_kept(rig, copies):
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [5], layerwise=True)
        cancelled = scheduler.offload([2], [5], layerwise=True)
        for save in (first, cancelled):
            save.mark_layer_written(0)
        cancelled.cancel()
        last = scheduler.offload([3], [5])
        left = last._movement.num_unsubmitted
        running = not cancelled._movement.over
        copies.go_on()
        for layer in range(1, 5):
            first.mark_layer_written(layer)
        last.wait(WAIT_S)
        first.wait(WAIT_S)
    assert running and left == 4, "it waits for the marks of the first one"
    rig.expect_offload([3], [5])
    rig.check()


def test_behind_a_cancelled_one_that_lacks_its_last_layer_the_order_is_kept(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [5], layerwise=True)
        cancelled = scheduler.offload([2], [5], layerwise=True)
        for save in (first, cancelled):
            for layer in range(4):
                save.mark_layer_written(layer)
            save.wait_layer(3, timeout_s=WAIT_S)
        cancelled.cancel()
        last = scheduler.offload([3], [5])
        first.mark_layer_written(4)
        for save in (first, last):
            save.wait(WAIT_S)
    rig.expect_offload([3], [5])
    rig.check()


def test_what_is_on_the_same_stream_as_a_cancelled_one_arrives(rig, copies):
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first, dropped, last = (scheduler.onload([host], [device]) for host, device in ((4, 1), (5, 2), (6, 3)))
        assert copies.arrived.acquire(timeout=WAIT_S)
        dropped.cancel()
        copies.go_on()
        for load in (first, last):
            load.wait(WAIT_S)
        dropped.wait_over(WAIT_S)
    rig.expect_onload([4, 6], [1, 3])
    rig.check()


@pytest.mark.parametrize("in_order", [True, False])
def test_the_order_of_many_cancelled_ones_is_handed_on_in_few_steps(rig, monkeypatch, in_order):
    """Each save waits for the load of the round before, each load for the save of this round."""
    steps = []
    depend = submission._depend
    monkeypatch.setattr(submission, "_depend", lambda *what: (steps.append(what), depend(*what)))
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=5) as scheduler:
        first = scheduler.offload([0], [0], layerwise=True)
        transfers = []
        for number in range(50):
            transfers.append(scheduler.offload([number % 3], [number % 2], layerwise=True))
            transfers.append(scheduler.onload([number % 2], [6 + number % 3]))
        if not in_order:
            random.Random(1).shuffle(transfers)
        for transfer in transfers:
            transfer.cancel()
        last = scheduler.offload([4], [0])
        assert len(steps) < 20 * len(transfers)
        with pytest.raises(TimeoutError, match="waits for a layerwise offload of the same blocks"):
            last.wait(0.0)
        for layer in range(5):
            first.mark_layer_written(layer)
        last.wait(WAIT_S)
        rig.expect_offload([4], [0])
        rig.check()
        known = {transfer for transfer in transfers if transfer.error is not None}  # asked for: not logged
        assert len(known) == len(transfers)


def test_what_retired_long_ago_is_passed_over_once_more(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        before = [scheduler.offload([device_id], [host_id], layerwise=True) for device_id, host_id in ((1, 4), (2, 5))]
        last = scheduler.offload([3, 6], [4, 5])
        for one in before:
            one.cancel()
            assert one.state.value == "cancelled"
        last.wait(WAIT_S)
        rig.expect_offload([3, 6], [4, 5])
        rig.check()
