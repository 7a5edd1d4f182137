"""Each clause of the ordering contract, with its wait and without: the right result, then the wrong one."""

from __future__ import annotations

import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv import CancelledError, DeviceCache, HostPool, TransferError  # noqa: E402
from tests.gpu.scheduler_rig import (  # noqa: E402
    DELAY_MS,
    OFFLOAD,
    ONLOAD,
    WAIT_S,
    GpuRig,
    Watched,
    WithoutComputeEvent,
    WithoutDependency,
    WithoutLayerWait,
    WithoutLook,
    block,
    filled,
    is_equal,
)

pytestmark = pytest.mark.concurrent_kernels

NEW = 0x5A  # what compute writes


@pytest.fixture
def rig():
    return GpuRig()


def with_and_without(mutant):
    return pytest.mark.parametrize("backend_type", [Watched, mutant], ids=["with the wait", "without the wait"])


def assert_one_of(seen, *, right, wrong, backend_type) -> None:
    """The right content with the wait, the wrong one without it: a test that is never wrong shows nothing."""
    assert not is_equal(right, wrong)
    if backend_type is Watched:
        assert is_equal(seen, right), "the wait does not protect"
    else:
        assert is_equal(seen, wrong), "without the wait nothing went wrong: this test shows nothing"


# ---- 1: an offload sees every write submitted before the call (layerwise: before the mark) ----
@with_and_without(WithoutComputeEvent)
def test_1_an_offload_sees_what_compute_wrote_before_the_call(rig, backend_type):
    with rig.scheduler(backend_type()) as scheduler:
        rig.busy()
        rig.write(3, NEW)
        scheduler.offload([3], [5]).wait(WAIT_S)
        seen = block(rig.host_now(), 5)
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.device, 3), backend_type=backend_type)


@with_and_without(WithoutComputeEvent)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_1_a_layerwise_offload_sees_what_compute_wrote_before_the_mark(rig, backend_type, order):
    with rig.scheduler(backend_type()) as scheduler:
        save = scheduler.offload([3], [5], layerwise=True)
        rig.busy()
        for layer in order:
            rig.write(3, NEW, [layer])
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        seen = block(rig.host_now(), 5)
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.device, 3), backend_type=backend_type)


@with_and_without(WithoutComputeEvent)
def test_1_a_mark_on_another_stream_counts_for_that_stream(rig, backend_type):
    other = cupy.cuda.Stream(non_blocking=True)
    with rig.scheduler(backend_type()) as scheduler:
        save = scheduler.offload([3], [5], layerwise=True)
        rig.busy(other)
        rig.write(3, NEW, stream=other.ptr)
        for layer in range(3):
            save.mark_layer_written(layer, stream=other)
        save.wait(WAIT_S)
        seen = block(rig.host_now(), 5)
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.device, 3), backend_type=backend_type)


# ---- 2: an onload does not overwrite a block before earlier work has finished with it ----
@with_and_without(WithoutComputeEvent)
def test_2_an_onload_leaves_the_block_to_those_who_still_read_it(rig, backend_type):
    with rig.scheduler(backend_type()) as scheduler:
        rig.busy()
        rig.read(3)
        scheduler.onload([5], [3]).wait(WAIT_S)
        seen = rig.what_was_read()
    assert_one_of(seen, right=block(rig.device, 3), wrong=block(rig.host, 5), backend_type=backend_type)


@with_and_without(WithoutComputeEvent)
def test_2_an_onload_is_not_overwritten_by_an_earlier_write(rig, backend_type):
    with rig.scheduler(backend_type()) as scheduler:
        rig.busy()
        rig.write(3, NEW)
        scheduler.onload([5], [3]).wait(WAIT_S)
        seen = block(rig.device_now(), 3)
    assert_one_of(seen, right=block(rig.host, 5), wrong=filled(rig.device, NEW), backend_type=backend_type)


# ---- 3: work submitted after wait_layer(i) sees layer i ----
@with_and_without(WithoutLayerWait)
@pytest.mark.parametrize("how", ["wait_layer", "wait_on", "named stream"])
def test_3_compute_behind_the_wait_sees_the_layer(rig, backend_type, how):
    backend = backend_type()
    stream = cupy.cuda.Stream(non_blocking=True) if how == "named stream" else None
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[ONLOAD])
        load = scheduler.onload([5], [3])
        if how == "wait_on":
            load.wait_on()
        for layer in range(3):
            if how != "wait_on":
                load.wait_layer(layer, stream=stream)
            rig.read(3, [layer], stream=stream.ptr if stream else None)
        seen = rig.what_was_read()
        load.wait(WAIT_S)
    assert_one_of(seen, right=block(rig.host, 5), wrong=block(rig.device, 3), backend_type=backend_type)


# ---- 4: conflicting transfers run in submission order ----
def conflict(rig, backend, first, second):
    """``first`` is held on its stream; both in flight; what both sides hold at the end."""
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[ONLOAD if first[0] == "onload" else OFFLOAD])
        transfers = [getattr(scheduler, name)(*ids) for name, *ids in (first, second)]
        for transfer in reversed(transfers):
            transfer.wait(WAIT_S)
        return rig.device_now(), rig.host_now()


@with_and_without(WithoutDependency)
def test_4_a_load_of_what_is_being_saved(rig, backend_type):
    device, _ = conflict(rig, backend_type(), ("offload", [3], [5]), ("onload", [5], [4]))
    wrong, right = block(rig.host, 5), block(rig.device, 3)
    assert_one_of(block(device, 4), right=right, wrong=wrong, backend_type=backend_type)


@with_and_without(WithoutDependency)
def test_4_a_load_over_what_is_being_saved(rig, backend_type):
    device, host = conflict(rig, backend_type(), ("offload", [3], [5]), ("onload", [6], [3]))
    wrong, right = block(rig.host, 6), block(rig.device, 3)
    assert_one_of(block(host, 5), right=right, wrong=wrong, backend_type=backend_type)
    assert is_equal(block(device, 3), block(rig.host, 6))


@with_and_without(WithoutDependency)
def test_4_a_save_of_what_is_being_loaded(rig, backend_type):
    _, host = conflict(rig, backend_type(), ("onload", [5], [3]), ("offload", [3], [6]))
    wrong, right = block(rig.device, 3), block(rig.host, 5)
    assert_one_of(block(host, 6), right=right, wrong=wrong, backend_type=backend_type)


@with_and_without(WithoutDependency)
def test_4_a_save_over_what_is_being_loaded(rig, backend_type):
    device, host = conflict(rig, backend_type(), ("onload", [5], [3]), ("offload", [4], [5]))
    wrong, right = block(rig.device, 4), block(rig.host, 5)
    assert_one_of(block(device, 3), right=right, wrong=wrong, backend_type=backend_type)
    assert is_equal(block(host, 5), block(rig.device, 4))


@with_and_without(WithoutDependency)
def test_4_two_schedulers_load_into_one_block(rig, backend_type):
    """The second one has adopted the same tensors."""
    tensors = {name: [rig.cache.tensor(name, layer) for layer in range(3)] for name in rig.spec.tensor_names}
    twin = GpuRig.__new__(GpuRig)
    twin.cache, twin.pool, twin.compute = DeviceCache.adopt(rig.spec, tensors), rig.pool, rig.compute
    first_backend, second_backend = Watched(), backend_type()
    with rig.scheduler(first_backend) as one, twin.scheduler(second_backend) as two:
        rig.busy(first_backend.streams[ONLOAD])
        first, second = one.onload([5], [3]), two.onload([6], [3])
        second.wait(WAIT_S)
        first.wait(WAIT_S)
        seen = block(rig.device_now(), 3)
    assert_one_of(seen, right=block(rig.host, 6), wrong=block(rig.host, 5), backend_type=backend_type)


def test_4_other_blocks_do_not_wait(rig):
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        save, load = scheduler.offload([3], [5]), scheduler.onload([6], [4])
        load.wait(WAIT_S)
        assert not save.done()
        save.wait(WAIT_S)


# ---- 5: what compute has to wait for before it touches the blocks of a transfer ----
@with_and_without(WithoutLayerWait)
@pytest.mark.parametrize("how", ["wait_layer", "wait_on"])
def test_5_compute_writes_a_block_that_is_being_saved_behind_a_wait(rig, backend_type, how):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        save = scheduler.offload([3], [5])
        if how == "wait_on":
            save.wait_on()
        for layer in range(3):
            if how == "wait_layer":
                save.wait_layer(layer)
            rig.write(3, NEW, [layer])
        save.wait(WAIT_S)
        seen = block(rig.host_now(), 5)
    assert_one_of(seen, right=block(rig.device, 3), wrong=filled(rig.device, NEW), backend_type=backend_type)


@with_and_without(WithoutLayerWait)
def test_5_compute_writes_a_block_that_is_being_loaded_behind_a_wait(rig, backend_type):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[ONLOAD])
        load = scheduler.onload([5], [3])
        load.wait_on()
        rig.write(3, NEW)
        load.wait(WAIT_S)
        seen = block(rig.device_now(), 3)
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.host, 5), backend_type=backend_type)


# ---- 6: memory lives, and a block is given out again, only behind the copies ----
@with_and_without(WithoutLook)
def test_6_a_block_is_given_out_again_only_behind_the_copies(rig, backend_type):
    backend = backend_type()
    rig.pool.allocate(11)
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        save = scheduler.offload([3], [5])
        rig.pool.free([5])
        if backend_type is Watched:
            with pytest.raises(MemoryError, match=r"1 blocks were asked for, 0 of 11 are free"):
                rig.pool.allocate(1)
            save.wait(WAIT_S)
        assert rig.pool.allocate(1) == [5]
        for name in rig.spec.tensor_names:
            for layer in range(3):
                rig.pool.view(name, layer, 5).reshape(-1).view(np.uint8)[:] = NEW  # the next owner
        seen = block(rig.host_now(), 5)
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.device, 3), backend_type=backend_type)


@with_and_without(WithoutLook)
def test_6_a_lease_begins_only_behind_the_copies(rig, backend_type):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        scheduler.offload([3], [5])
        with rig.pool.lease([5], timeout_s=WAIT_S):
            seen = {
                name: np.stack([rig.pool.view(name, layer, 5).reshape(-1).view(np.uint8).copy() for layer in range(3)])
                for name in rig.spec.tensor_names
            }
    assert_one_of(seen, right=block(rig.device, 3), wrong=block(rig.host, 5), backend_type=backend_type)


# ---- 7: no failure looks like success ----
class HalfWay(Watched):
    """Enqueues everything, then reports a failure."""

    def copy_layers(self, binding, work, stream):
        super().copy_layers(binding, work, stream)
        raise OSError("the link is down")


class HalfWayWithoutFence(HalfWay):
    def record(self, event, stream):
        if isinstance(stream, int) or not self.streams[OFFLOAD:]:
            super().record(event, stream)


@pytest.mark.parametrize("backend_type", [HalfWay, HalfWayWithoutFence])
def test_7_what_still_runs_of_a_failed_submission_holds_its_blocks(rig, backend_type):
    """With the fence the blocks are held until the half that was enqueued has run; without it they are given back."""
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        with pytest.raises(TransferError, match=r"offload failed at layer 0: the link is down"):
            scheduler.offload([3], [5])
        with pytest.raises(TransferError, match=r"block 5 of the host pool holds no usable data"):
            scheduler.onload([5], [4])
        assert scheduler.stats()["in_flight"] == (1 if backend_type is HalfWay else 0)
        scheduler.drain(WAIT_S)
        runtime.deviceSynchronize()


def test_7_cancel_drops_what_is_not_marked_and_poisons(rig):
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        scheduler.offload([0], [0]).wait(WAIT_S)  # the engine takes its memory, which beside the delay may wait for it
        rig.busy(backend.streams[OFFLOAD], 10 * DELAY_MS)  # a busy host takes its time until the engine has it
        began_s = time.perf_counter()
        save = scheduler.offload([3], [5], layerwise=True)
        save.mark_layer_written(1)
        save.wait_layer(1, timeout_s=WAIT_S)
        save.cancel()
        assert not save.done(), f"{time.perf_counter() - began_s:.3f} s later"
        with pytest.raises(CancelledError, match=r"offload was cancelled before layer 0 was moved"):
            save.wait(WAIT_S)
        with pytest.raises(TransferError, match=r"holds no usable data"):
            scheduler.onload([5], [4])
        host = block(rig.host_now(), 5)
        for name, bits in host.items():
            assert (bits[1] == rig.device[name][1, 3]).all()
            assert (bits[[0, 2]] == rig.host[name][[0, 2], 5]).all()
        scheduler.offload([3], [5]).wait(WAIT_S)
        scheduler.onload([5], [4]).wait(WAIT_S)
        assert is_equal(block(rig.device_now(), 4), block(rig.device, 3))


# ---- 8: every host wait takes a time-out ----
def test_8_host_waits_end(rig):
    backend = Watched()
    scheduler = rig.scheduler(backend)
    rig.busy(backend.streams[ONLOAD], 25 * DELAY_MS)  # longer than all of the waits together, on a slow host too
    load = scheduler.onload([5], [3])
    save = scheduler.offload([4], [6], layerwise=True)
    waits = {
        "wait": lambda: load.wait(0.01),
        "wait of an unmarked one": lambda: save.wait(0.01),
        "wait_layer of an unmarked one": lambda: save.wait_layer(0, timeout_s=0.01),
        "drain": lambda: scheduler.drain(0.01),
        "lease": lambda: rig.pool.lease([5], write=True, timeout_s=0.01).__enter__(),
        "close": lambda: scheduler.close(0.01),
    }
    for name, wait in waits.items():
        started = time.perf_counter()
        with pytest.raises(TimeoutError, match=r"timeout_s = 0.01"):
            wait()
        assert time.perf_counter() - started < 1, name
    assert not load.done()
    load.wait(WAIT_S)
    scheduler.close(WAIT_S)
    assert is_equal(block(rig.device_now(), 3), block(rig.host, 5))


# ---- 9: captured streams ----
@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_9_calls_on_a_captured_stream_raise_and_the_capture_lives(rig, mode):
    with rig.scheduler() as scheduler:
        load = scheduler.onload([5], [3])
        save = scheduler.offload([4], [6], layerwise=True)
        load.wait(WAIT_S)
        calls = [
            lambda: scheduler.onload([5], [2]),
            lambda: scheduler.offload([2], [7]),
            lambda: scheduler.offload([2], [7], layerwise=True),
            lambda: save.mark_layer_written(0),
            lambda: save.wait_layer(0),
            lambda: load.wait_layer(1),
            lambda: load.wait_on(),
        ]
        rig.compute.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
        try:
            rig.write(1, NEW)
            raised = []
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    raised.append("captured into a CUDA graph" in str(error))
            rig.write(2, NEW)
        finally:
            graph = rig.compute.end_capture()
        assert raised == [True] * len(calls)
        graph.launch(rig.compute)
        device = rig.device_now()
        assert is_equal(block(device, 1), filled(rig.device, NEW))
        assert is_equal(block(device, 2), filled(rig.device, NEW))
        for layer in range(3):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        assert is_equal(block(rig.host_now(), 6), block(rig.device, 4))


@with_and_without(WithoutLayerWait)
def test_9_a_replay_is_ordered_by_wait_on_before_it(rig, backend_type):
    backend = backend_type()
    rig.compute.begin_capture()
    rig.read(3)
    graph = rig.compute.end_capture()
    graph.launch(rig.compute)  # uploads it
    runtime.deviceSynchronize()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[ONLOAD])
        load = scheduler.onload([5], [3])
        load.wait_on()
        graph.launch(rig.compute)
        seen = rig.what_was_read()
        load.wait(WAIT_S)
    assert_one_of(seen, right=block(rig.host, 5), wrong=block(rig.device, 3), backend_type=backend_type)


# ---- 10: nothing is left ----
class CountingRuntime:
    """CuPy's runtime with the events that exist counted."""

    def __init__(self) -> None:
        self.events: set[int] = set()

    def __getattr__(self, name):
        return getattr(runtime, name)

    def eventCreateWithFlags(self, flags):
        event = runtime.eventCreateWithFlags(flags)
        self.events.add(event)
        return event

    def eventDestroy(self, event):
        self.events.remove(event)
        runtime.eventDestroy(event)


def test_10_events_streams_and_pinned_memory_are_back_at_zero(rig, monkeypatch):
    from paddle_kv.backend import cupy_backend

    counting = CountingRuntime()
    monkeypatch.setattr(cupy_backend, "runtime", counting)
    pool = HostPool(rig.spec, 7)
    address = pool.pointer("key", 0)
    assert runtime.pointerGetAttributes(address).type == runtime.memoryTypeHost
    rig.pool = pool
    scheduler = rig.scheduler()
    before = len(counting.events)

    def work(times):
        for _ in range(times):
            scheduler.onload([5], [3]).wait_on()
            scheduler.offload([3], [6]).wait(WAIT_S)
        return len(counting.events)

    # How many ends have not been noticed yet depends on the host; events that are lost come to one a round at least.
    in_use = work(200)
    assert in_use - before < 100, "events are not re-used"
    few_transfers = 4 * (rig.spec.num_layers + 3)
    assert work(200) - in_use <= few_transfers, "events are lost"
    assert before >= 1
    scheduler.offload([4], [0], layerwise=True).mark_layer_written(1)
    scheduler.close(WAIT_S)
    stats = scheduler.stats()
    assert [stats[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    assert counting.events == set()
    pool.close()
    assert scheduler.stats()["pinned_bytes"] == 0
    assert runtime.pointerGetAttributes(address).type != runtime.memoryTypeHost
