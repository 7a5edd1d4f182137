"""What the handle of a transfer asks and follows, where others could not tell the difference."""

from __future__ import annotations

import math
import threading

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.offload import KVOffloadManager
from paddle_kv.schedule import marking
from paddle_kv.schedule import transfer as transfers
from paddle_kv.schedule.movement import State
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import Deadline, Waiter
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
        waiters: list[Waiter] = []
        for answers in ([True], [False, True], [False, False, True]):
            found = iter(answers)
            assert load._wait_for(lambda found=found: next(found), Deadline(0.0), waiters) is True  # type: ignore[misc]
        assert not waiters
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


def test_what_waits_for_the_end_of_others_waits_for_all_of_them_and_tells_nobody_how_they_ended(
    rig: Rig, copies: Copies
) -> None:
    copies.hold("offload", 0)
    copies.fail("offload", 1, RuntimeError("broken"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler) as manager:
        saves = [manager.save([key], [block], layerwise=True) for key, block in ((b"a", 3), (b"b", 4))]
        again = manager.save([b"a", b"b"], [3, 4])
        assert again._movement.depends_on == {save._movement for save in saves}
        for save in saves:
            save.mark_layer_written(0)
        assert copies.arrived.acquire(timeout=WAIT_S)
        for save in saves:
            save.cancel()
        for wait in (again.wait_on, lambda timeout_s: again.wait_layer(0, timeout_s=timeout_s)):
            with pytest.raises(TimeoutError):  # the first layer still reads the blocks
                wait(timeout_s=SHORT_S)
        copies.go_on()
        again.wait_on(timeout_s=WAIT_S)
        assert [save._movement.told for save in saves] == [False, False]


def test_a_time_out_of_what_is_submitted_or_cancelled_names_no_layer(rig: Rig, copies: Copies) -> None:
    copies.hold("offload", 1)
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load, save = scheduler.onload([4], [5]), scheduler.offload([3], [2], layerwise=True)
        for layer in (0, 1):
            save.mark_layer_written(layer)
        for _ in range(2):
            assert copies.arrived.acquire(timeout=WAIT_S)
        with pytest.raises(TimeoutError, match="a layer was not submitted"):
            save.wait(SHORT_S)
        save.cancel()
        for transfer in (load, save):
            with pytest.raises(TimeoutError, match="the transfer was not over"):
                transfer.wait(SHORT_S)
        copies.go_on()


def test_a_transfer_tells_what_may_be_marked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load, save = scheduler.onload([4], [1]), scheduler.offload([3], [2], layerwise=True)
        assert (load.layerwise, save.layerwise) == (False, True)
        with monkeypatch.context() as broken:
            broken.setattr(scheduler.backend, "record", lambda event, stream: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                save.mark_layer_written(1)
        assert save.unmarked_layers == [0, 1, 2, 3, 4]
        with pytest.raises(TypeError, match="function is 3"):
            load.add_done_callback(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"behind is .*; a list of Transfer is expected"):
            transfers.transfer_list([load, 3], "behind")
        save.cancel()
        with pytest.raises(CancelledError):
            save.mark_layer_written(0)
        assert save.unmarked_layers == [0, 1, 2, 3, 4]
        with pytest.raises(CancelledError):  # it was cancelled behind the first look
            marking._record(save._movement, 5, None, (), "")


def test_a_cancel_out_of_a_section_is_done_behind_it(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        change(scheduler, save.cancel)
        assert change(scheduler, lambda: save.state.value) == "cancelled"


def test_a_layer_is_marked_once_whoever_is_at_it(rig: Rig) -> None:
    """Two threads, or a signal handler between two instructions of a mark."""

    class Interrupted(Exception):
        pass

    class Racing(dict):  # type: ignore[type-arg]
        raised: type[Exception] = KeyError

        def __getitem__(self, layer: int) -> object:
            raise self.raised

    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([3], [2], layerwise=True)
        movement = save._movement
        unmarked = movement.unmarked
        movement.unmarked = Racing(unmarked)
        with pytest.raises(ValueError, match="layer = 0 is marked as written already"):
            save.mark_layer_written(0)
        movement.unmarked.raised = Interrupted
        with pytest.raises(Interrupted):
            save.mark_layer_written(0)
        assert movement.unmarked.get(0) is not None
        movement.unmarked = unmarked
        event = unmarked[0]
        save.mark_layer_written(0)
        save.wait_layer(0, timeout_s=WAIT_S)
        movement.unmarked[0] = event  # an exception came behind the hand-over
        change(scheduler, lambda: marking._note(movement, 0, event, ()))
        assert (save.unmarked_layers, movement.num_unsubmitted) == ([1, 2, 3, 4], 4)
        save.cancel()


def test_a_layer_that_a_failed_load_leaves_out_is_not_waited_for_in_vain(rig: Rig, copies: Copies) -> None:
    copies.fail("onload", 1, RuntimeError("broken"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1], layers=[1])
        load.wait_over(WAIT_S)
        with pytest.raises(TransferError, match="broken"):
            load.wait_layer(0)


def test_layers_of_events_that_others_do_not_share_are_waited_for(rig: Rig) -> None:
    with (
        LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as one,
        LayerwiseScheduler(rig.cache, rig.pool) as two,
    ):
        save, load = one.offload([1], [4], layerwise=True), two.onload([4], [2])
        for layer, left in ((0, 5), (1, 3), (3, 3), (2, 1)):
            save.mark_layer_written(layer)
            change(two, list)  # behind the mark
            assert load._movement.num_unsubmitted == left
        save.mark_layer_written(4)
        load.wait(WAIT_S)
        save.wait(WAIT_S)
    rig.expect_offload([1], [4])
    rig.expect_onload([4], [2])
    rig.check()


def test_the_time_of_a_transfer_is_known_when_it_is_over(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [2], layerwise=True)
        assert math.isnan(save.elapsed_ms)
        for layer in range(LAYERS):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        assert save.elapsed_ms > 0.0


def test_which_states_are_ends() -> None:
    assert {state for state in State if state.is_end} == {State.DONE, State.FAILED, State.CANCELLED}


def test_of_a_save_of_nothing_no_layer_is_to_be_marked(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([], [], layerwise=True)
        assert save.unmarked_layers == []
        assert scheduler.stats()["events"] == 1  # the scheduler's own
        save.wait(WAIT_S)


class HalfSubmitted(Named):
    def record(self, event, stream):
        super().record(event, None if stream == "model" else stream)

    def copy_layers(self, binding, work, stream):
        super().copy_layers(binding, work, stream)
        raise RuntimeError("the link is down")


def test_the_compute_stream_waits_for_what_runs_of_a_submission_that_failed(rig: Rig, copies: Copies) -> None:
    """The caller has no handle by which it could."""
    copies.hold("onload", 0)
    backend = HalfSubmitted()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, compute_stream="model") as scheduler:
        with pytest.raises(TransferError, match="the link is down"):
            scheduler.onload([4], [1])
        assert backend.waiting == ["model"]
        copies.go_on()


def test_what_a_layer_is_said_to_wait_for(rig: Rig, copies: Copies) -> None:
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        loading = scheduler.onload([4], [1])  # all of it is submitted
        unmarked = scheduler.offload([1], [9], layerwise=True)
        load, save = scheduler.onload([5], [1]), scheduler.offload([2], [9], layerwise=True)
        save.mark_layer_written(0)
        for behind in (load, save):
            with pytest.raises(TimeoutError, match="it waits for a layerwise offload of the same blocks"):
                behind.wait_layer(0, timeout_s=SHORT_S)
        with pytest.raises(TimeoutError, match="mark_layer_written was not called for layer 0"):
            unmarked.wait_layer(0, timeout_s=SHORT_S)
        for one in (load, save, unmarked):
            one.cancel()
        copies.go_on()
        loading.wait(WAIT_S)
