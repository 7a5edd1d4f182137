"""What fails, is cancelled or left undone: who hears of it, what is poisoned, what stays in use, what is given back."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddle_kv import BackendError, CancelledError, CudaError, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.movement import Failure, Movement, State
from paddle_kv.schedule.transfer import Transfer
from tests.schedule import rig as rig_module
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, settles, threads_since


def test_what_the_device_reported_is_the_cause_with_its_name_number_and_text():
    reported = CudaError("cudaErrorLaunchFailure", 719, "onload: cudaErrorLaunchFailure")
    told = Failure.of("onload failed", 2, reported).exception([5]).__cause__
    assert isinstance(told, CudaError) and told is not reported
    assert (told.name, told.code, str(told)) == ("cudaErrorLaunchFailure", 719, "onload: cudaErrorLaunchFailure")
    other = Failure.of("onload failed", 2, RuntimeError("broken")).exception([5]).__cause__
    assert type(other) is BackendError and str(other) == "RuntimeError: broken"


def test_damaged_host_blocks_are_told_by_a_failure():
    told = Failure(State.FAILED, "wrong", damaged=(3, 5)).exception([1])
    assert (told.block_ids, told.damaged_host_blocks) == ([1], [3, 5])


def test_a_transfer_that_is_over_stays_over(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [2])
        save.wait(WAIT_S)
        for state in State:
            with pytest.raises(AssertionError, match=f"a transfer cannot be {state.value} behind done"):
                save._movement.enter(state)


class Broken(RuntimeError):
    pass


class LostDevice(CpuBackend):
    """Each call that needs the device fails from a moment on."""

    lost = False

    def _check(self) -> None:
        if self.lost:
            raise Broken("lost")

    def record(self, event, stream):
        self._check()
        super().record(event, stream)

    def copy_layers(self, binding, work, stream):
        self._check()
        super().copy_layers(binding, work, stream)

    def wait(self, event, timeout_s):
        self._check()
        return super().wait(event, timeout_s)

    def is_complete(self, *events):
        self._check()
        return super().is_complete(*events)

    def destroy_stream(self, stream):
        super().destroy_stream(stream)
        self._check()


class FailingBackend(CpuBackend):
    """Fails the n-th call from now of a method, before or after it has done its work."""

    def __init__(self) -> None:
        self.plan: dict[str, tuple[int, bool, BaseException]] = {}
        self.calls: dict[str, int] = {}

    def fail(self, method: str, call: int, error: BaseException, *, after: bool = False) -> None:
        self.plan[method] = (self.calls.get(method, 0) + call, after, error)

    def _run(self, method, *arguments):
        number = self.calls[method] = self.calls.get(method, 0) + 1
        at, after, error = self.plan.get(method, (0, False, None))
        if number == at and not after:
            raise error
        result = getattr(super(), method)(*arguments)
        if number == at:
            raise error
        return result

    def create_event(self):
        return self._run("create_event")

    def create_stream(self):
        return self._run("create_stream")

    def record(self, event, stream):
        return self._run("record", event, stream)

    def copy_layers(self, binding, work, stream):
        return self._run("copy_layers", binding, work, stream)

    def elapsed_ms(self, start, end):
        return self._run("elapsed_ms", start, end)

    def wait(self, event, timeout_s):
        return self._run("wait", event, timeout_s)

    def destroy_stream(self, stream):
        return self._run("destroy_stream", stream)

    def unbind(self, binding):
        return self._run("unbind", binding)


def assert_works(rig: Rig, scheduler: LayerwiseScheduler) -> None:
    """A correct transfer in both directions, on blocks of its own."""
    scheduler.offload([11, 12], [15, 13]).wait(WAIT_S)
    rig.expect_offload([11, 12], [15, 13])
    scheduler.onload([16], [10]).wait(WAIT_S)
    rig.expect_onload([16], [10])
    rig.check()


# ---- a copy fails on the device ----
@pytest.mark.parametrize("direction", ["onload", "offload"])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_copy_that_fails(rig, copies, direction, layer):
    copies.fail(direction, layer, Broken("the link is down"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        if direction == "onload":
            transfer, targets = scheduler.onload([4, 9], [1, 0]), [1, 0]
            rig.expect_onload([4, 9], [1, 0], layers=range(layer))
        else:
            transfer, targets = scheduler.offload([1, 0], [4, 9]), [4, 9]
            rig.expect_offload([1, 0], [4, 9], layers=range(layer))
        for early in range(layer):
            try:
                transfer.wait_layer(early, timeout_s=WAIT_S)
            except TransferError:  # known already: also that is right
                break
        with pytest.raises(TransferError, match=rf"{direction} failed at layer {layer}: the link is down") as error:
            transfer.wait(WAIT_S)
        assert error.value.layer == layer
        assert error.value.block_ids == targets
        assert isinstance(error.value.__cause__, BackendError)
        assert str(error.value.__cause__) == "Broken: the link is down"
        for call in (
            transfer.wait,
            transfer.wait_on,
            lambda: transfer.wait_layer(0),
            lambda: transfer.wait_layer(4),
        ):
            with pytest.raises(TransferError) as again:
                call()
            assert again.value is not error.value
            assert (str(again.value), again.value.layer) == (str(error.value), layer)
        assert transfer.done()
        assert str(transfer.error) == str(error.value)
        assert scheduler.stats()["failed"] == 1
        assert scheduler.stats()["in_flight"] == 0
        rig.check()
        copies.heal()
        assert_works(rig, scheduler)


def test_wait_layer_raises_a_failure_of_a_later_layer_only_when_it_is_known(rig, copies):
    copies.hold("onload", 2)
    copies.fail("onload", 2, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        load.wait_layer(1, timeout_s=WAIT_S)
        copies.go_on()
        with pytest.raises(TransferError, match=r"onload failed at layer 2: x"):
            load.wait_layer(2, timeout_s=WAIT_S)
        with pytest.raises(TransferError, match=r"onload failed at layer 2: x"):
            load.wait_layer(1)


def test_a_failed_layer_of_a_layerwise_save(rig, copies):
    copies.fail("offload", 1, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        save.mark_layer_written(1)
        with pytest.raises(TransferError, match=r"offload failed at layer 1: x"):
            save.wait_layer(1, timeout_s=WAIT_S)
        with pytest.raises(TransferError, match=r"offload failed at layer 1"):
            save.mark_layer_written(0)
        with pytest.raises(TransferError):
            save.wait(WAIT_S)
        rig.check()


def test_a_failure_that_no_event_tells_is_at_the_first_layer_that_is_not_there(rig, copies):
    """The device reports it once, to whoever asks next; the events only say which layers have arrived."""

    class Once(CpuBackend):
        error = None

        def is_complete(self, *events):
            error, self.error = self.error, None
            if error is not None:
                raise error
            return super().is_complete(*events)

    backend = Once()
    copies.hold("onload", 2)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        load = scheduler.onload([4], [1])
        assert copies.arrived.acquire(timeout=WAIT_S)
        backend.error = Broken("x")
        assert str(load.error).startswith("onload failed at layer 2: x")
        assert load.error.layer == 2
        copies.go_on()
    rig.expect_onload([4], [1])
    rig.check()


def test_an_earlier_layer_that_failed_is_not_forgotten_when_later_ones_succeed(rig, copies):
    """Each layer is a submission of its own here; the last one is fine."""
    copies.fail("offload", 1, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        for layer in (1, 0, 2, 3, 4):
            save.mark_layer_written(layer)
        with pytest.raises(TransferError, match=r"offload failed at layer 1"):
            save.wait(WAIT_S)
        rig.expect_offload([1], [4], layers=[0, 2, 3, 4])
        rig.check()


# ---- poison ----
def test_poisoned_host_blocks_until_they_are_rewritten(rig, copies):
    copies.fail("offload", 2, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        with pytest.raises(TransferError):
            scheduler.offload([1, 2, 3], [4, 9, 5]).wait(WAIT_S)
        rig.expect_offload([1, 2, 3], [4, 9, 5], layers=[0, 1])
        copies.heal()
        with pytest.raises(TransferError, match=r"block 9 of the host pool holds no usable data") as error:
            scheduler.onload([0, 9, 5], [6, 7, 8])
        assert error.value.block_ids == [9, 5]
        rig.check()
        scheduler.offload([2], [9]).wait(WAIT_S)
        rig.expect_offload([2], [9])
        scheduler.onload([9], [7]).wait(WAIT_S)
        rig.expect_onload([9], [7])
        rig.pool.mark_rewritten([5])
        scheduler.onload([5], [8]).wait(WAIT_S)
        rig.expect_onload([5], [8])
        with pytest.raises(TransferError, match=r"block 4 of the host pool"):
            scheduler.onload([4], [6])
        assert_works(rig, scheduler)


def test_poisoned_device_blocks_until_they_are_rewritten(rig, copies):
    copies.fail("onload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        with pytest.raises(TransferError):
            scheduler.onload([4, 9], [1, 0]).wait(WAIT_S)
        copies.heal()
        with pytest.raises(TransferError, match=r"block 0 of the device cache holds no usable data"):
            scheduler.offload([0], [3])
        rig.check()
        scheduler.onload([9], [0]).wait(WAIT_S)
        rig.expect_onload([9], [0])
        scheduler.offload([0], [3]).wait(WAIT_S)
        rig.expect_offload([0], [3])
        rig.write_device(1)
        rig.cache.mark_rewritten([1])
        scheduler.offload([1], [4]).wait(WAIT_S)
        rig.expect_offload([1], [4])
        assert_works(rig, scheduler)


def test_poison_is_known_to_every_scheduler_on_the_memory(rig, copies):
    copies.fail("onload", 4, Broken("x"))
    with (
        LayerwiseScheduler(rig.cache, rig.pool) as one,
        LayerwiseScheduler(rig.cache, rig.pool) as two,
    ):
        with pytest.raises(TransferError):
            one.onload([4], [1]).wait(WAIT_S)
        with pytest.raises(TransferError, match=r"block 1 of the device cache"):
            two.offload([1], [3])


def test_the_error_of_a_transfer_that_nobody_waits_for(rig, copies):
    copies.fail("onload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        assert scheduler.record_event("onload").wait(WAIT_S)
        assert load.error is not None
        assert load.error.layer == 0


def test_a_failed_transfer_that_is_cancelled_counts_as_failed(rig, copies):
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        copies.hold("offload", 0)
        save = scheduler.offload([1], [4], layerwise=True)
        save.mark_layer_written(0)
        backend.fail("copy_layers", 1, Broken("x"))
        save.mark_layer_written(1)
        with pytest.raises(TransferError, match="x"):
            save.wait_layer(1, timeout_s=WAIT_S)
        save.cancel()
        copies.go_on()
        scheduler.drain(WAIT_S)
        assert [scheduler.stats()[name] for name in ("failed", "cancelled")] == [1, 0]


def test_a_layer_that_waits_for_its_mark_hears_of_a_failed_source(rig, copies):
    """Nobody else asks: the wait itself has to look at the load that the save reads."""
    copies.fail("onload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("onload", 0)
        scheduler.onload([4], [1])
        save = scheduler.offload([1], [5], layerwise=True)
        threading.Timer(SHORT_S, copies.go_on).start()
        with pytest.raises(TransferError, match="reads blocks of a transfer that failed"):
            save.wait_layer(0, timeout_s=WAIT_S)


def test_only_the_targets_of_the_failed_one_are_poisoned(rig, copies):
    copies.fail("onload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        with pytest.raises(TransferError):
            scheduler.onload([4], [1]).wait(WAIT_S)
        copies.heal()
        scheduler.onload([4], [2]).wait(WAIT_S)  # the source is fine
        rig.expect_onload([4], [2])
        rig.check()


def test_what_reads_the_result_of_a_failed_transfer_fails_too(rig, copies):
    copies.hold("offload", 3)
    copies.fail("offload", 3, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4])
        load = scheduler.onload([4], [2])
        again = scheduler.offload([2], [5])
        free = scheduler.onload([6], [7])
        copies.go_on()
        for transfer in (again, load, save):
            with pytest.raises(TransferError, match=r"offload failed at layer 3: x"):
                transfer.wait(WAIT_S)
        free.wait(WAIT_S)
        rig.expect_onload([6], [7])
        copies.heal()
        for source, target in ((scheduler.onload, 4), (scheduler.offload, 2), (scheduler.onload, 5)):
            with pytest.raises(TransferError, match=r"holds no usable data"):
                source([target], [0])
        assert scheduler.stats()["failed"] == 3


def test_what_only_follows_a_failed_transfer_does_not_fail(rig, copies):
    """A rewrite of its target, and a save over a block that it was reading."""
    copies.hold("onload", 1)
    copies.fail("onload", 1, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        rewrite = scheduler.onload([9], [1])
        save = scheduler.offload([2], [4])
        copies.go_on()
        with pytest.raises(TransferError):
            load.wait(WAIT_S)
        with pytest.raises(TransferError):  # the injected failure hits every onload's layer 1
            rewrite.wait(WAIT_S)
        save.wait(WAIT_S)
        rig.expect_onload([4], [1], layers=[0])
        rig.expect_onload([9], [1], layers=[0])
        rig.expect_offload([2], [4])
        rig.check()


def test_a_rewrite_clears_what_an_earlier_one_poisoned_in_flight(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [4], layerwise=True)
        second = scheduler.offload([2], [4])
        first.cancel()
        second.wait(WAIT_S)
        rig.expect_offload([2], [4])
        scheduler.onload([4], [0]).wait(WAIT_S)
        rig.expect_onload([4], [0])
        rig.check()


# ---- cancel ----
def test_cancel_before_anything_moved(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        save.cancel()
        save.cancel()
        assert save.done()
        assert copies.done == []
        for call in (
            lambda: save.wait(WAIT_S),
            lambda: save.wait_layer(0),
            lambda: save.mark_layer_written(0),
            save.wait_on,
        ):
            with pytest.raises(CancelledError, match=r"offload was cancelled before layer 0 was moved") as error:
                call()
            assert error.value.layer == 0
            assert error.value.block_ids == [4]
        with pytest.raises(TransferError, match=r"block 4 of the host pool holds no usable data"):
            scheduler.onload([4], [0])
        assert (scheduler.stats()["cancelled"], scheduler.stats()["failed"]) == (1, 0)
        rig.check()
        scheduler.offload([1], [4]).wait(WAIT_S)
        rig.expect_offload([1], [4])
        rig.check()


def test_cancel_in_the_middle_keeps_the_blocks_until_what_runs_is_done(rig, copies):
    copies.hold("offload", 1)
    ids = rig.pool.allocate(17)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1, 2], [4, 9], layerwise=True)
        for layer in (3, 1):
            save.mark_layer_written(layer)
        assert copies.arrived.acquire(timeout=WAIT_S)
        save.cancel()
        assert not save.done()
        rig.pool.free(ids)
        assert rig.pool.num_free_blocks == 15
        with pytest.raises(TimeoutError), rig.pool.lease([9], timeout_s=SHORT_S):
            pass
        with pytest.raises(TransferError, match=r"block 4 of the host pool holds no usable data"):
            scheduler.onload([4], [0])
        with pytest.raises(TimeoutError):
            save.wait(SHORT_S)
        copies.go_on()
        with pytest.raises(CancelledError, match=r"offload was cancelled before layer 0 was moved"):
            save.wait(WAIT_S)
        rig.expect_offload([1, 2], [4, 9], layers=[1, 3])
        rig.check()
        assert rig.pool.num_free_blocks == 17
        with pytest.raises(CancelledError):
            save.mark_layer_written(0)


def test_cancel_of_what_has_not_begun_ends_it(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        save.cancel()
        assert rig_module.in_flight() == []
        assert rig.pool.domain.busy([4]) == []


def test_cancel_drops_the_layers_that_have_not_begun(rig, copies):
    """All are submitted; layer 1 is being copied."""
    copies.hold("onload", 1)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        behind = scheduler.onload([9], [2])
        assert copies.arrived.acquire(timeout=WAIT_S)
        load.cancel()
        assert not load.done()
        assert rig.pool.domain.busy([4]) == [4]
        copies.go_on()
        with pytest.raises(CancelledError, match=r"onload was cancelled before layer 2 was moved") as error:
            load.wait(WAIT_S)
        assert (error.value.layer, error.value.block_ids) == (2, [1])
        with pytest.raises(TransferError, match=r"block 1 of the device cache holds no usable data"):
            scheduler.offload([1], [5])
        behind.wait(WAIT_S)
        rig.expect_onload([4], [1], layers=[0, 1])
        rig.expect_onload([9], [2])
        rig.check()


def test_cancel_of_what_has_begun_completely_does_nothing(rig, copies):
    copies.hold("onload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        assert copies.arrived.acquire(timeout=WAIT_S)
        load.cancel()
        copies.go_on()
        load.wait(WAIT_S)
        load.cancel()
        assert load.error is None
        assert scheduler.stats()["cancelled"] == 0
        rig.expect_onload([4], [1])
        rig.check()


def test_those_behind_a_cancelled_one_keep_its_order(rig, copies):
    """A waits; B waits for A and is cancelled; C waits for B, so it must still wait for A."""
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])  # reads host 4
        save = scheduler.offload([2], [4], layerwise=True)  # writes host 4 after that
        last = scheduler.offload([3], [4])  # and again
        save.cancel()
        assert save.done()
        assert (
            not last._movement.num_unsubmitted
        )  # behind the load: the device waits, nobody has to look when that is over
        assert not rig.pool.domain.try_lease([4], write=False)
        time.sleep(SHORT_S)
        rig.check()
        copies.go_on()
        last.wait(WAIT_S)
        load.wait(WAIT_S)
        rig.expect_onload([4], [1])
        rig.expect_offload([3], [4])
        rig.check()


def test_those_behind_a_cancelled_one_follow_layer_by_layer(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [4], layerwise=True)
        cancelled = scheduler.offload([2], [4], layerwise=True)
        last = scheduler.offload([3], [4])
        cancelled.cancel()
        with pytest.raises(TimeoutError):
            last.wait_layer(2, timeout_s=SHORT_S)
        first.mark_layer_written(2)
        last.wait_layer(2, timeout_s=WAIT_S)
        rig.expect_offload([3], [4], layers=[2])
        rig.check()
        first.cancel()


def test_those_behind_a_cancelled_one_follow_when_what_it_read_is_cancelled_too(rig):
    """B reads what A writes and is cancelled; C waits for B, so for the marks of A, which never come."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [4], layerwise=True)
        middle = scheduler.onload([4], [2])
        last = scheduler.onload([5], [2])
        middle.cancel()
        with pytest.raises(TimeoutError):
            last.wait_layer(0, timeout_s=SHORT_S)
        first.cancel()
        last.wait(WAIT_S)
        rig.expect_onload([5], [2])
        rig.check()


def test_the_first_error_stays(rig, copies):
    copies.hold("offload", 0)
    copies.fail("offload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1], [4], layerwise=True)
        save.mark_layer_written(0)
        assert copies.arrived.acquire(timeout=WAIT_S)
        save.cancel()
        cancelled = str(save.error)
        copies.go_on()
        with pytest.raises(CancelledError, match="cancelled before layer 1") as error:
            save.wait(WAIT_S)
        assert str(error.value) == str(save.error) == cancelled


def test_many_cancelled_ones_in_a_row_cost_no_more_than_their_number(rig):
    """A writer and two readers a round, all cancelled: the ways back to the first one double with each round."""
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=5) as scheduler:
        first = scheduler.offload([0], [0], layerwise=True)
        transfers = []
        for _ in range(30):
            transfers += [
                scheduler.onload([0], [1]),
                scheduler.onload([0], [2]),
                scheduler.offload([3], [0], layerwise=True),
            ]
        for transfer in transfers:
            transfer.cancel()
        last = scheduler.offload([4], [0])
        started_s = time.thread_time()  # what others do meanwhile does not count
        for layer in range(5):
            first.mark_layer_written(layer)
        last.wait(WAIT_S)
        assert time.thread_time() - started_s < 5
        rig.expect_offload([4], [0])
        rig.check()


# ---- calls of the backend that fail ----
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("direction", ["onload", "offload"])
def test_a_submission_that_fails_raises_at_the_call(rig, direction, after):
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("copy_layers", 1, Broken("x"), after=after)
        with pytest.raises(TransferError, match=rf"{direction} failed at layer 0: x") as error:
            getattr(scheduler, direction)([4, 9], [1, 0])
        assert str(error.value.__cause__) == "Broken: x"
        assert error.value.block_ids == [1, 0]
        scheduler.drain(WAIT_S)
        if after and direction == "onload":
            rig.expect_onload([4, 9], [1, 0])
        elif after:
            rig.expect_offload([4, 9], [1, 0])
        rig.check()
        with pytest.raises(TransferError, match=r"holds no usable data"):
            (scheduler.offload if direction == "onload" else scheduler.onload)([1], [5])
        assert scheduler.stats()["failed"] == 1
        assert settles(lambda: scheduler.stats()["events"] == 1)
        assert_works(rig, scheduler)
    assert scheduler.stats()["events"] == 0


def test_half_of_a_failed_submission_still_runs(rig, copies):
    """The blocks stay in use until a fence behind it is passed, for every scheduler; the caller gets no handle, so the
    error comes when compute may touch the blocks again."""
    copies.hold("onload", 3)
    backend = FailingBackend()
    with (
        LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as one,
        LayerwiseScheduler(rig.cache, rig.pool) as two,
        ThreadPoolExecutor() as callers,
    ):
        backend.fail("copy_layers", 1, Broken("x"), after=True)
        failing = callers.submit(one.onload, [4], [1])
        assert copies.arrived.acquire(timeout=WAIT_S)
        time.sleep(SHORT_S)
        assert not failing.done()
        assert one.stats()["in_flight"] == 1
        with pytest.raises(TimeoutError), rig.pool.lease([4], write=True, timeout_s=SHORT_S):
            pass
        rewrite = two.offload([2], [4])  # over the host block that the half is still reading
        time.sleep(SHORT_S)
        assert not rewrite.done()
        rig.expect_onload([4], [1], layers=range(3))
        rig.check()
        copies.go_on()
        with pytest.raises(TransferError):
            failing.result(WAIT_S)
        rewrite.wait(WAIT_S)
        one.drain(WAIT_S)
        rig.expect_onload([4], [1], layers=[3, 4])
        rig.expect_offload([2], [4])
        rig.check()


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_record_that_fails_before_the_transfer_exists(rig, layerwise):
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("record", 1, Broken("x"))
        if layerwise:
            save = scheduler.offload([1], [4], layerwise=True)
            with pytest.raises(Broken):
                save.mark_layer_written(2)
            time.sleep(SHORT_S)
            rig.check()  # a mark that is not recorded is no mark
            for layer in range(5):
                save.mark_layer_written(layer)
            save.wait(WAIT_S)
            rig.expect_offload([1], [4])
        else:
            with pytest.raises(Broken):
                scheduler.onload([4], [1])
            assert scheduler.stats()["in_flight"] == 0
        assert settles(lambda: scheduler.stats()["events"] == 1)
        assert_works(rig, scheduler)


@pytest.mark.parametrize("call", range(1, 9))
def test_every_event_that_cannot_be_made(rig, call):
    """One for the compute stream, one for the start, one for each layer: whichever fails, nothing is stuck or lost."""
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("create_event", call, Broken("x"))
        try:
            scheduler.onload([4], [1]).wait(WAIT_S)
        except (Broken, TransferError):
            assert call <= 7
            scheduler.drain(WAIT_S)
        else:
            assert call == 8
            rig.expect_onload([4], [1])
        backend.plan.clear()
        rig.check()
        assert settles(lambda: scheduler.stats()["events"] == 1)
        assert scheduler.stats()["in_flight"] == 0
        assert_works(rig, scheduler)
    assert scheduler.stats()["events"] == 0


@pytest.mark.parametrize("marked_first", [False, True])
def test_a_device_that_is_lost(rig, copies, marked_first):
    """Not even a fence can be recorded or waited for. Everything ends, and what was asked for is told."""
    backend = LostDevice()
    copies.hold("offload", 0)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    save = scheduler.offload([1], [4], layerwise=True)
    if marked_first:
        save.mark_layer_written(0)
        assert copies.arrived.acquire(timeout=WAIT_S)
    load = scheduler.onload([5], [2])
    load.wait(WAIT_S)
    backend.copy_layers = lambda *_: setattr(backend, "lost", True) or backend._check()
    with pytest.raises(TransferError, match="onload failed at layer 0: lost"):
        scheduler.onload([6], [3])
    with pytest.raises(Broken, match="lost"):
        save.mark_layer_written(1)
    with pytest.raises(TimeoutError):
        save.wait(SHORT_S)
    copies.go_on()
    with pytest.raises(Broken):
        scheduler.close(WAIT_S)  # the streams cannot be given back; everything else is
    assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    assert rig.pool.domain.busy(range(17)) == rig.cache.domain.busy(range(13)) == []
    assert rig.cache.domain.poisoned(range(13)) == [3]
    assert rig.pool.domain.poisoned(range(17)) == [4]


def test_a_wait_that_fails_behind_a_failed_submission(rig):
    """Compute is to be held until what runs of it is done; that this fails, too, must not keep its blocks for ever."""
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("copy_layers", 1, Broken("x"))
        backend.fail("wait", 1, Broken("y"))
        with pytest.raises(TransferError, match="onload failed at layer 0: x"):
            scheduler.onload([4], [1])
        scheduler.drain(WAIT_S)
        assert settles(lambda: scheduler.stats()["events"] == 1)
        assert_works(rig, scheduler)


def test_nothing_more_is_submitted_behind_a_failed_submission(rig):
    """Layers 0 and 2 are marked while another save is first: two submissions, of which the first fails."""
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        first = scheduler.offload([1], [4], layerwise=True)
        second = scheduler.offload([2], [4], layerwise=True)
        for layer in (0, 2):
            second.mark_layer_written(layer)
        assert "copy_layers" not in backend.calls
        backend.fail("copy_layers", 1, Broken("x"))
        first.cancel()
        assert second.failed
        assert backend.calls["copy_layers"] == 1


def test_a_submission_that_ends_in_any_way_ends_as_failed(rig):
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("copy_layers", 1, KeyboardInterrupt("x"), after=True)
        with pytest.raises(TransferError, match="failed at layer 0: x") as error:
            scheduler.onload([4], [1])
        assert str(error.value.__cause__) == "KeyboardInterrupt: x"
        scheduler.drain(WAIT_S)
        rig.expect_onload([4], [1])
        with pytest.raises(TransferError, match=r"holds no usable data"):
            scheduler.offload([1], [5])
        assert scheduler.stats()["failed"] == 1
        assert_works(rig, scheduler)


def test_times_that_cannot_be_had_are_no_failure(rig):
    backend = FailingBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        backend.fail("elapsed_ms", 1, Broken("x"))
        load = scheduler.onload([4], [1])
        load.wait(WAIT_S)
        assert load.elapsed_ms != load.elapsed_ms
        rig.expect_onload([4], [1])
        assert_works(rig, scheduler)


@pytest.mark.parametrize(
    ("method", "call"), [("create_stream", 1), ("create_stream", 2), ("create_event", 1), ("record", 1), ("wait", 1)]
)
def test_a_scheduler_that_cannot_be_made_leaves_nothing(rig, method, call):
    backend = FailingBackend()
    backend.fail(method, call, Broken("x"))
    before = set(threading.enumerate())
    with pytest.raises(Broken):
        LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    assert threads_since(before) == set()
    assert backend.calls["unbind"] == 1
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        assert_works(rig, scheduler)


def test_close_frees_the_rest_when_one_step_fails(rig):
    backend = FailingBackend()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    backend.fail("destroy_stream", 1, Broken("x"), after=True)
    with pytest.raises(Broken):
        scheduler.close()
    assert backend.calls == {**backend.calls, "destroy_stream": 2, "unbind": 1}
    assert [scheduler.stats()[name] for name in ("events", "streams")] == [0, 0]
    scheduler.close()


# ---- what errors keep alive ----
def test_raising_the_same_error_again_keeps_no_frames(rig, copies):
    copies.fail("onload", 0, Broken("x"))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        depths = []
        for _ in range(5):
            with pytest.raises(TransferError) as error:
                load.wait(WAIT_S)
            depth, trace = 0, error.value.__traceback__
            while trace is not None:
                depth, trace = depth + 1, trace.tb_next
            depths.append(depth)
        assert len(set(depths[1:])) == 1, depths


def test_transfers_that_are_over_keep_nothing_alive(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([1], [4])
        for _ in range(20):
            scheduler.onload([4], [1])
            scheduler.offload([1], [4])
        last = scheduler.offload([1], [5])
        last.wait(WAIT_S)
        scheduler.drain(WAIT_S)
        kinds = (Transfer, Movement)

        def alive() -> set[object]:
            gc.collect()
            return {
                t
                for t in gc.get_objects()
                if isinstance(t, kinds) and vars(t).get("scheduler", vars(t).get("_scheduler")) is scheduler
            }

        kept = {first, last, first._movement, last._movement}
        assert settles(lambda: alive() == kept)
