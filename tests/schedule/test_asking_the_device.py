"""A device of which nobody reports anything: which transfers are asked, and what is found out by it."""

from __future__ import annotations

import functools
import weakref

import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.movement import Follower
from paddle_kv.tracking.group import _guards, change
from tests.schedule.rig import WAIT_S, Rig, are_collected, make_spec


class Silent(CpuBackend):
    def __init__(self) -> None:
        self.asked, self.together = [], []

    def watch(self, events, report):
        pass

    def is_complete(self, *events):
        self.asked.append(events[0])
        self.together.append(events)
        return super().is_complete(*events)


@pytest.fixture
def backend():
    return Silent()


@pytest.fixture
def scheduler(rig, backend):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as made:
        yield made


def a_ladder(scheduler, num_steps=4):
    """Two transfers a step; each reads what both of the step before move."""
    found = []
    for step in range(num_steps):
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


def test_a_high_ladder_is_not_gone_down_on_each_of_its_ways(copies, backend):
    """Of which there are as many as two to the power of its steps."""
    rig = Rig(make_spec(num_layers=1), device_blocks=64, host_blocks=64)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        copies.hold("offload", 0)
        ladder = a_ladder(scheduler, num_steps=30)
        copies.go_on()
        assert all(transfer._movement.last_event.wait(WAIT_S) for transfer in ladder)
        assert ladder[-1].done()


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


def test_a_wait_that_meets_a_failure_ends_the_transfer(copies, scheduler):
    copies.fail("onload", 0, RuntimeError("broken"))
    load = scheduler.onload([3], [2])
    assert load._movement.last_event.wait(WAIT_S)
    with pytest.raises(TransferError, match="onload failed at layer 0: broken"):
        load.wait_layer(4, timeout_s=WAIT_S)
    assert load.state.value == "failed"  # which looks at no device


def test_a_failure_that_a_reader_finds_is_that_of_its_source(copies, scheduler):
    copies.hold("offload", 0)
    copies.fail("offload", 2, RuntimeError("broken"))
    save, load = scheduler.offload([3], [2]), scheduler.onload([2], [5])
    copies.go_on()
    assert load._movement.last_event.wait(WAIT_S)
    assert isinstance(load.error, TransferError)
    assert "it reads blocks of a transfer that failed (offload failed at layer 2: broken)" in str(load.error)
    assert [save.state.value, load.state.value] == ["failed", "failed"]


def test_who_reads_what_failed_ends_with_it_though_what_both_are_behind_is_not_looked_at(copies, scheduler):
    copies.hold("offload", 0)
    copies.fail("onload", 2, RuntimeError("broken"))
    save, load = scheduler.offload([3], [2]), scheduler.onload([4], [3])
    again = scheduler.offload([3], [5], layerwise=True)
    copies.go_on()
    assert load._movement.last_event.wait(WAIT_S)
    with pytest.raises(TransferError, match="onload failed at layer 2: broken"):
        load.wait(WAIT_S)
    assert [one.state.value for one in (save, load, again)] == ["arriving", "failed", "failed"]  # no device is asked
    assert save.done()


class Holder(Follower):
    """Uses the blocks of a transfer when its copies are through."""

    busy = True

    def holds(self, movement):
        return self.busy


def test_it_is_over_when_a_follower_has_done_with_its_blocks(rig, scheduler):
    save, holder = scheduler.offload([3], [2], layerwise=True), Holder()
    change(save._movement, functools.partial(save._movement.followers.append, holder))
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait_on(timeout_s=WAIT_S)
    assert not save.done()
    with pytest.raises(LeasedError):
        rig.pool.close()
    holder.busy, known = False, weakref.ref(holder)
    assert save.done()
    assert save.error is None
    del holder
    assert known() is None  # whoever keeps the handle keeps nobody who followed


def test_it_is_over_when_the_last_of_several_followers_has_done_with_its_blocks(scheduler):
    save, holders = scheduler.offload([3], [2], layerwise=True), [Holder(), Holder()]
    change(save._movement, functools.partial(save._movement.followers.extend, holders))
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait_on(timeout_s=WAIT_S)
    for holder in holders:
        assert save._movement.last_event.wait(WAIT_S) and not save.done()
        holder.busy = False
    assert save.done()


def test_a_cancel_ends_what_a_follower_still_does_with_its_blocks(scheduler):
    save, holder = scheduler.offload([3], [2], layerwise=True), Holder()
    change(save._movement, functools.partial(save._movement.followers.append, holder))
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait_on(timeout_s=WAIT_S)
    assert save._movement.last_event.wait(WAIT_S)
    save.cancel()
    assert not save.done()
    holder.busy = False
    with pytest.raises(CancelledError, match="offload was cancelled before it was over"):
        save.wait(WAIT_S)


def test_what_is_done_gives_its_blocks_back_whatever_else_is_not_looked_at(copies, scheduler):
    copies.hold("offload", 0)
    save, load = scheduler.offload([3], [2]), scheduler.onload([4], [3])  # over the block that is saved
    copies.go_on()
    assert load._movement.last_event.wait(WAIT_S)
    assert load.done()
    assert load._movement.retired
    assert save.state.value == "arriving"
    assert save._movement.dependents == {}  # nobody waits for it any more
    assert save.done()


def test_what_was_cancelled_does_not_wait_for_what_it_would_have_read(scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    load = scheduler.onload([2], [5])
    load.cancel()
    assert load.state.value == "cancelled"
    assert not save.done()
    save.cancel()


@pytest.mark.parametrize("record_layer_times", [False, True])
def test_all_events_are_asked_where_times_are_to_be_told(rig, backend, record_layer_times):
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, record_layer_times=record_layer_times) as scheduler:
        load = scheduler.onload([3], [2])
        save = scheduler.offload([3], [2], layerwise=True)
        for layer in (1, 4):
            save.mark_layer_written(layer)
            save.wait_layer(layer, timeout_s=WAIT_S)
        save.cancel()
        for transfer, groups in ((load, range(5)), (save, (1, 4))):
            movement = transfer._movement
            assert movement.last_event.wait(WAIT_S)
            events, last = [movement.events[group] for group in groups], movement.last_event
            assert transfer.done()
            ends = events if record_layer_times or transfer is save else [last]
            assert (last, *(event for event in ends if event is not last)) in backend.together
        assert [len(load.layer_times_ms), len(save.layer_times_ms)] == [5 * record_layer_times, 0]


def test_what_is_over_keeps_no_event_and_no_stream(rig, scheduler):
    save = scheduler.offload([3], [2], layerwise=True)
    save.mark_layer_written(1)
    save.wait_layer(1, timeout_s=WAIT_S)
    save.cancel()
    movement = save._movement
    assert save.state.value == "cancelled"  # which looks at no device
    held = (movement.held, movement.after, movement.starts, movement.stream, movement.callbacks)
    assert held == ((), (), [], None, [])
    assert set(movement.marks) == {None}
    assert movement.unmarked == dict.fromkeys([0, 2, 3, 4])


@pytest.mark.parametrize("ask", [lambda scheduler: scheduler.stats(), lambda scheduler: scheduler.drain(WAIT_S)])
def test_whoever_asks_for_all_transfers_looks_at_them(scheduler, ask):
    save = scheduler.offload([3], [2])
    assert save._movement.last_event.wait(WAIT_S)
    ask(scheduler)
    assert save._movement.over
    assert scheduler.in_flight() == []


def test_those_in_flight_are_the_handles_that_were_given_out(copies, scheduler):
    copies.hold("offload", 0)
    save = scheduler.offload([3], [2])
    scheduler.offload([4], [5])
    [first, second] = scheduler.in_flight()
    assert first is save
    copies.go_on()
    assert second._movement.last_event.wait(WAIT_S)
    assert second.done()


def test_a_time_out_that_makes_no_sense_drops_nothing(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        with pytest.raises(TypeError, match="timeout_s"):
            scheduler.close("soon")
        for layer in range(5):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
    with pytest.raises(ClosedError):
        scheduler.fileno()


def test_a_transfer_that_is_done_leaves_nothing_to_do_when_its_handle_goes(rig, copies):
    copies.hold("onload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([3], [2])
        guard = load._movement.guard
        assert guard in _guards
        copies.go_on()
        load.wait(WAIT_S)
        assert guard not in _guards


def test_a_handle_that_somebody_keeps_keeps_none_of_the_transfers_behind_it(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save, load = scheduler.offload([3], [2]), scheduler.onload([2], [5])
        for transfer in (save, load):
            transfer.wait(WAIT_S)
        scheduler.drain(WAIT_S)
        behind = weakref.ref(load._movement)
        del load, transfer
        assert save.done() and are_collected(behind)
