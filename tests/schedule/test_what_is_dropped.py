"""Cancelled transfers among others: what each of them says, and what those behind wait for."""

from __future__ import annotations

import functools
import threading

import pytest

from paddle_kv import BackendError, CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.uses import Use
from paddle_kv.tracking.group import change
from tests.schedule.rig import SHORT_S, WAIT_S
from tests.schedule.test_cancelled_before import Refusing, Watched


def test_a_reader_that_was_cancelled_stays_cancelled_when_its_source_fails(rig, copies):
    copies.hold("offload", 0)
    copies.fail("offload", 0, RuntimeError("broken"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save, load = scheduler.offload([3], [2]), scheduler.onload([2], [5])
        load.cancel()
        copies.go_on()
        with pytest.raises(TransferError, match="broken"):
            save.wait(WAIT_S)
        with pytest.raises(CancelledError, match="onload was cancelled before layer 0 was moved"):
            load.wait(WAIT_S)


def test_events_given_back_behind_the_start_of_a_save_are_not_waited_for(rig, copies):
    backend = Watched()
    copies.hold("onload", 1)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        load = scheduler.onload([4], [1])
        cancelled = scheduler.offload([1], [5], layerwise=True)
        cancelled.mark_layer_written(0)
        cancelled.wait_layer(0, timeout_s=WAIT_S)
        save = scheduler.offload([3], [5], layerwise=True)
        given_back = {event for event in cancelled._movement.events if event is not None}
        cancelled.cancel()
        behind_the_load = cancelled.done() and not cancelled._movement.retired
        for layer in range(save.num_layers):
            save.mark_layer_written(layer)
        scheduler.stats()  # behind the marks
        waits = set(backend.waits[save._movement.number])
        copies.go_on()
        save.wait(WAIT_S)
    assert behind_the_load
    assert given_back and not given_back & waits
    assert set(load._movement.events[1:]) <= waits
    rig.expect_onload([4], [1])
    rig.expect_offload([3], [5])
    rig.check()


def test_a_refused_cancel_keeps_what_the_device_has_told(rig, copies):
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Refusing()) as scheduler:
        load = scheduler.onload([3], [2])
        load.cancel()
        copies.go_on()
        with pytest.raises(TransferError) as caught:
            load.wait(WAIT_S)
    assert isinstance(caught.value.__cause__, BackendError)
    assert str(caught.value.__cause__) == "RuntimeError: refused"


def test_a_save_is_pending_until_something_of_it_is_submitted(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        states = [save.state.value]
        for layer in range(save.num_layers - 1):
            save.mark_layer_written(layer)
            save.wait_layer(layer, timeout_s=WAIT_S)
            states.append(save.state.value)
        save.mark_layer_written(save.num_layers - 1)
        save.wait(WAIT_S)
    assert [*states, save.state.value] == ["pending", *["submitted"] * 4, "done"]


def test_of_five_layers_that_lack_a_mark_three_are_named(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        for text in ("layers 0, 1, 2 and 2 more", "layers 1, 2, 3, 4"):
            with pytest.raises(TimeoutError, match=f"was not called for {text}$"):
                save.wait(0.0)
            save.mark_layer_written(0 if save.state.value == "pending" else 1)
            save.wait_layer(0, timeout_s=WAIT_S)
        save.cancel()


@pytest.mark.parametrize("kind", ["events", "call"])
def test_close_waits_for_what_is_in_use_and_hears_of_its_end(rig, kind):
    """Also where it ends by an exception, which lets go of it and tells nobody."""
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    if kind == "events":
        held = change(scheduler, functools.partial(scheduler.resources.take_events, 2))
    else:
        held = Use(scheduler.group)
        change(scheduler, functools.partial(scheduler._users.add, held))
    closing = threading.Thread(target=scheduler.close, daemon=True)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive()
    del held
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_use_that_a_signal_keeps_from_beginning_goes_without_a_word(monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    Use.__new__(Use)
    assert told == []


def test_behind_three_that_were_dropped_from_the_last_to_the_first(rig, copies):
    """What the first of them was behind still writes the block."""
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([5], [5], layerwise=True)
        save.mark_layer_written(0)
        writing = scheduler.onload([5], [0])
        for load in reversed([scheduler.onload([block], [0]) for block in (6, 7, 8)]):
            load.cancel()
        last = scheduler.onload([9], [0])
        for layer in range(1, save.num_layers):
            save.mark_layer_written(layer)
        copies.go_on()
        for transfer in (save, writing, last):
            transfer.wait(WAIT_S)
    rig.expect_offload([5], [5])
    rig.expect_onload([9], [0])
    rig.check()


class Counting(CpuBackend):
    """How many events there are."""

    num_events = 0

    def create_event(self):
        self.num_events += 1
        return super().create_event()

    def destroy_event(self, event):
        self.num_events -= 1
        super().destroy_event(event)


def test_a_scheduler_that_is_never_asked_keeps_no_events_of_what_is_over(rig):
    backend = Counting()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        for _ in range(10):
            scheduler.offload([1], [2]).wait(WAIT_S)
        assert backend.num_events < 30
        assert len(scheduler.resources._ties) < 10
    assert backend.num_events == 0 and not scheduler.resources._ties


def test_what_fails_with_another_one_is_no_longer_waiting_to_be_submitted(copies, rig):
    class Lost(CpuBackend):
        def copy_layers(self, binding, work, stream):
            if work.plan.direction == "offload" and work.first_group:
                raise RuntimeError("lost")
            super().copy_layers(binding, work, stream)

    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=Lost()) as scheduler:
        save, load = scheduler.offload([3], [2], layerwise=True), scheduler.onload([2], [5])
        save.mark_layer_written(0)
        assert copies.arrived.acquire(timeout=WAIT_S)
        with pytest.raises(TransferError, match="lost"):
            save.mark_layer_written(1)
            save.wait_layer(1, timeout_s=WAIT_S)
        assert load.failed
        assert load.state.value == "arriving"  # its first layer is behind that of the save
        copies.go_on()
        for transfer in (save, load):
            with pytest.raises(TransferError, match="lost"):
                transfer.wait(WAIT_S)


def test_behind_one_that_failed_with_another_the_order_of_both_is_kept(rig):
    """A load of some layers reads what the others of the block hold."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [9], layerwise=True)
        whole, some = scheduler.onload([2], [1]), scheduler.onload([3], [1], layers=[2])
        whole.cancel()
        assert some.failed
        last = scheduler.onload([4], [1])
        for layer in range(5):
            save.mark_layer_written(layer)
        for transfer in (save, last):
            transfer.wait(WAIT_S)
    rig.expect_offload([1], [9])
    rig.expect_onload([4], [1])
    rig.check()


def test_the_order_is_kept_also_where_another_one_has_passed_them_over(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [9], layerwise=True)
        whole, some = scheduler.onload([2], [1]), scheduler.onload([3, 6], [1, 7], layers=[2])
        whole.cancel()
        assert some.failed
        other = scheduler.onload([5], [7])
        last = scheduler.onload([4], [1])
        for layer in range(5):
            save.mark_layer_written(layer)
        for transfer in (save, other, last):
            transfer.wait(WAIT_S)
    rig.expect_offload([1], [9])
    rig.expect_onload([5], [7])
    rig.expect_onload([4], [1])
    rig.check()


def test_a_cancel_names_the_first_layer_of_what_was_queued_and_what_was_not_marked(rig, copies):
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [9])
        assert copies.arrived.acquire(timeout=WAIT_S)
        save = scheduler.offload([2], [5], layerwise=True)
        save.mark_layer_written(3)
        scheduler.stats()  # behind the mark
        save.cancel()
        copies.go_on()
        with pytest.raises(CancelledError, match="cancelled before layer 0 was moved"):
            save.wait(WAIT_S)
