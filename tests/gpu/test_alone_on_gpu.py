"""Transfers that come alone: with the event of the compute stream and the wait for a layer, and without; every byte."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from paddle_kv import CancelledError, CaptureError, KVCacheSpec  # noqa: E402
from paddle_kv.backend.cupy_backend import CupyBackend  # noqa: E402
from tests.gpu.scheduler_rig import ONLOAD, WAIT_S, GpuRig, block, filled, is_equal  # noqa: E402
from tests.schedule.rig import in_threads, make_spec, moved  # noqa: E402

NEW = 0x5A  # what compute writes


class Counting(CupyBackend):
    def __init__(self) -> None:
        super().__init__(0)
        self.streams: list = []
        self.num_alone = 0

    def create_stream(self, *, urgent: bool = False):
        self.streams.append(super().create_stream(urgent=urgent))
        return self.streams[-1]

    def start_alone(self, *given) -> bool:
        is_started = super().start_alone(*given)
        self.num_alone += is_started
        return is_started


class BehindAnotherStream(Counting):
    """The event of compute is one of a stream that has nothing to do."""

    def _known_stream(self, stream) -> int:
        self.idle = cupy.cuda.Stream(non_blocking=True)
        return self.idle.ptr


class WithoutLayerWait(Counting):
    def wait_on_compute(self, stream, event, timeout_s) -> int:
        return self.compute_stream(stream)


@pytest.fixture
def rig():
    return GpuRig(make_spec(num_layers=5))


def warm_up(rig, scheduler) -> None:
    scheduler.offload([0], [0]).wait(WAIT_S)
    rig.host = moved(rig.device, rig.host, [0], [0])
    ends = time.monotonic() + WAIT_S
    while not scheduler.resources.reserve:
        assert time.monotonic() < ends
        time.sleep(0.001)


def assert_one_of(seen, *, right, wrong, is_right) -> None:
    assert not is_equal(right, wrong)
    assert is_equal(seen, right if is_right else wrong)


@pytest.mark.concurrent_kernels
@pytest.mark.parametrize("backend_type", [Counting, BehindAnotherStream])
def test_a_save_sees_what_compute_wrote_before_the_call(rig, backend_type):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        warm_up(rig, scheduler)
        rig.busy()
        rig.write(3, NEW)
        scheduler.offload([3], [5]).wait(WAIT_S)
        seen = block(rig.host_now(), 5)
    assert backend.num_alone == 1
    is_right = backend_type is Counting
    assert_one_of(seen, right=filled(rig.device, NEW), wrong=block(rig.device, 3), is_right=is_right)


@pytest.mark.concurrent_kernels
@pytest.mark.parametrize("backend_type", [Counting, BehindAnotherStream])
def test_a_load_leaves_the_block_to_those_who_still_read_it(rig, backend_type):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        warm_up(rig, scheduler)
        rig.busy()
        rig.read(3)
        scheduler.onload([5], [3]).wait(WAIT_S)
        seen = rig.what_was_read()
    assert backend.num_alone == 1
    assert_one_of(seen, right=block(rig.device, 3), wrong=block(rig.host, 5), is_right=backend_type is Counting)


@pytest.mark.concurrent_kernels
@pytest.mark.parametrize("backend_type", [Counting, WithoutLayerWait])
def test_compute_behind_the_wait_sees_the_layer(rig, backend_type):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        warm_up(rig, scheduler)
        rig.busy(backend.streams[ONLOAD])
        load = scheduler.onload([5], [3])
        for layer in range(5):
            load.wait_layer(layer)
            rig.read(3, [layer])
        assert backend.num_alone == 1 and load._alone is not None
        seen = rig.what_was_read()
        load.wait(WAIT_S)
    assert_one_of(seen, right=block(rig.host, 5), wrong=block(rig.device, 3), is_right=backend_type is Counting)


@pytest.mark.parametrize("layers_per_event", [1, 2, 7])
def test_every_byte_of_many_one_behind_the_other(rig, layers_per_event):
    backend = Counting()
    host, device = np.random.default_rng(5), np.random.default_rng(6)
    with rig.scheduler(backend, layers_per_event=layers_per_event) as scheduler:
        warm_up(rig, scheduler)
        for number in range(60):
            count = 1 + number % 9
            host_ids, device_ids = host.permutation(11)[:count].tolist(), device.permutation(9)[:count].tolist()
            if number % 2:
                scheduler.offload(device_ids, host_ids).wait(WAIT_S)
                rig.host = moved(rig.device, rig.host, device_ids, host_ids)
            else:
                load = scheduler.onload(host_ids, device_ids)
                load.wait_layer(number % 5, timeout_s=WAIT_S)
                load.wait(WAIT_S)
                rig.device = moved(rig.host, rig.device, host_ids, device_ids)
                assert load.elapsed_ms > 0
        stats = scheduler.stats()
        assert stats["in_flight"] == 0 and stats["events"] == 1
        assert (stats["onload_transfers"], stats["offload_transfers"]) == (30, 31)
    assert backend.num_alone > 30
    rig.check()


def test_those_that_come_meanwhile_stand_behind_it(rig):
    backend = Counting()
    with rig.scheduler(backend) as scheduler:
        warm_up(rig, scheduler)
        rig.busy(backend.streams[ONLOAD])
        load = scheduler.onload([5, 3], [2, 4])
        save = scheduler.offload([2, 7], [6, 3])
        assert backend.num_alone == 1
        save.wait(WAIT_S)
        load.wait(WAIT_S)
    rig.device = moved(rig.host, rig.device, [5, 3], [2, 4])
    rig.host = moved(rig.device, rig.host, [2, 7], [6, 3])
    rig.check()


def test_cancelled():
    """What an engine was given arrives; of a load of many calls most was not."""
    rig = GpuRig(KVCacheSpec(num_layers=64, num_kv_heads=1, head_dim=128, block_size=1024, dtype="float16"))
    backend = Counting()
    with rig.scheduler(backend) as scheduler:
        warm_up(rig, scheduler)
        rig.busy()
        load = scheduler.onload(range(9), range(9))
        assert backend.num_alone == 1
        load.cancel()
        with pytest.raises(CancelledError) as error:
            load.wait(WAIT_S)
        assert 0 < error.value.layer < 64 and error.value.block_ids == list(range(9))
        assert scheduler.stats()["cancelled"] == 1
        rig.device = moved(rig.host, rig.device, range(9), range(9), range(error.value.layer))
        rig.check()
        scheduler.onload(range(9), range(9)).wait(WAIT_S)
    rig.device = moved(rig.host, rig.device, range(9), range(9))
    rig.check()


def test_on_a_stream_that_is_captured(rig):
    with rig.scheduler() as scheduler:
        warm_up(rig, scheduler)
        rig.compute.begin_capture()
        try:
            with pytest.raises(CaptureError):
                scheduler.onload([5], [3])
        finally:
            rig.compute.end_capture()
        scheduler.onload([5], [3]).wait(WAIT_S)
    rig.device = moved(rig.host, rig.device, [5], [3])
    rig.check()


def test_threads_that_start_at_once(rig):
    """Each with blocks of its own, and one that asks."""
    is_over = threading.Event()

    def run(number: int) -> None:
        for _ in range(100):
            scheduler.onload([number], [number]).wait(WAIT_S)
            scheduler.offload([number], [number + 5]).wait(WAIT_S)

    def ask() -> None:
        while not is_over.is_set():
            scheduler.stats()
            time.sleep(0.001)

    with rig.scheduler() as scheduler:
        warm_up(rig, scheduler)
        asking = threading.Thread(target=ask)
        asking.start()
        in_threads(*(lambda number=number: run(number) for number in range(4)))
        is_over.set()
        asking.join()
        stats = scheduler.stats()
        assert (stats["onload_transfers"], stats["offload_transfers"], stats["in_flight"]) == (400, 401, 0)
    for number in range(4):
        rig.device = moved(rig.host, rig.device, [number], [number])
        rig.host = moved(rig.device, rig.host, [number], [number + 5])
    rig.check()
