"""The thread that submits: who waits for whom, what is bounded, what a failure leaves behind."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv.backend import transfer_queue  # noqa: E402
from paddle_kv.errors import CudaError  # noqa: E402
from tests.gpu.capture import capture  # noqa: E402
from tests.gpu.delay import busy  # noqa: E402
from tests.gpu.engine_rig import TO_DEVICE, TO_HOST, Pools, Queue  # noqa: E402

LONG_MS = 100.0


@pytest.fixture
def queue(machine, paddle_stream):
    queue = Queue()
    yield queue
    queue.close()


def test_a_call_returns_before_the_copies_are_submitted(queue):
    """More bytes than may be in flight: the last event is recorded only when the first copies are done."""
    pools = Pools([1 << 20], layers=8, device_blocks=64, host_blocks=64)
    ids = pools.ids(64)
    gate, producer = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    busy(producer, LONG_MS)
    gate.record(producer)
    started = time.perf_counter()
    events = queue.submit(pools, TO_DEVICE, *ids, engine="copy_engine", waits=[[gate], *[[]] * 7])
    assert time.perf_counter() - started < LONG_MS / 1e3 / 2
    reader = cupy.cuda.Stream(non_blocking=True)
    assert not transfer_queue.wait_stream(0, reader.ptr, events[-1].ptr, 0.01)
    assert not transfer_queue.flush(queue.stream.ptr, 0.01)
    assert not transfer_queue.query(0, events[-1].ptr)
    assert not gate.done, "the delay is too short to show anything"
    assert transfer_queue.wait_stream(0, reader.ptr, events[-1].ptr, 10.0)
    queue.finish()
    pools.check(TO_DEVICE, *ids)
    pools.close()


def test_a_transfer_may_wait_for_one_that_is_not_submitted_yet(queue):
    """What is saved on one stream is loaded on another, layer by layer, while the first still waits."""
    pools = Pools([65536], layers=4, device_blocks=20, host_blocks=20)
    (source, *_), (host, *_) = pools.ids(20)
    other = Queue()
    gate, producer = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    busy(producer, LONG_MS)
    gate.record(producer)
    saved = queue.submit(pools, TO_HOST, [source], [host], waits=[[gate], [], [], []])
    target = (source + 1) % 20
    loaded = other.submit(pools, TO_DEVICE, [target], [host], waits=[[event] for event in saved])
    assert not gate.done, "the delay is too short to show anything"
    assert not transfer_queue.query(0, loaded[0].ptr)
    other.finish()
    for layer in range(4):
        bits = pools.device[layer][0].get()
        first = 256 + source * 65536
        np.testing.assert_array_equal(
            bits[256 + target * 65536 : 256 + (target + 1) * 65536], pools.device_bits[layer][0][first : first + 65536]
        )
    other.close()
    pools.close()


def test_one_that_waits_does_not_hold_other_streams(queue):
    pools = Pools([65536], layers=2, device_blocks=20, host_blocks=20)
    other = Queue()
    gate, producer = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    busy(producer, LONG_MS)
    gate.record(producer)
    queue.submit(pools, TO_HOST, [1], [1], waits=[[gate], []])
    done = other.submit(pools, TO_HOST, [2], [2])
    while not transfer_queue.query(0, done[-1].ptr):
        pass
    assert not gate.done
    queue.finish()
    pools.check(TO_HOST, [1, 2], [1, 2])
    other.close()
    pools.close()


@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
def test_an_urgent_load_does_not_queue_behind_bulk(queue, engine):
    """Alone and behind 8 GiB in the same direction: what it waits longer is the share of what is in flight."""
    bulk = Pools([1 << 20], layers=16, device_blocks=256, host_blocks=256, fill=False)
    small = Pools([65536], layers=16, device_blocks=4, host_blocks=4)
    urgent = Queue(urgent=True)

    def wait_ms() -> float:
        started = time.perf_counter()
        events = urgent.submit(small, TO_DEVICE, *small.ids(4))
        while not transfer_queue.query(0, events[-1].ptr):
            pass
        return (time.perf_counter() - started) * 1e3

    wait_ms()
    alone = min(wait_ms() for _ in range(5))
    events = queue.submit(bulk, TO_DEVICE, *bulk.ids(256), engine=engine)
    time.sleep(0.01)
    beside = wait_ms()
    assert not transfer_queue.query(0, events[-1].ptr), "the bulk was over too soon to show anything"
    bulk_ms = 16 * 256 / 55.0
    print(
        f"urgent load alone {alone:.2f} ms, beside bulk by {engine} {beside:.2f} ms; all of the bulk {bulk_ms:.0f} ms"
    )
    assert beside < bulk_ms / 4
    queue.finish()
    urgent.close()
    bulk.close()
    small.close()


def test_copies_of_others_are_let_in_between(queue):
    """The copy engine stays with a stream as long as that has copies: a model's own would wait for the end of all."""
    bulk = Pools([1 << 20], layers=16, device_blocks=256, host_blocks=256, fill=False)
    source, target = cupy.cuda.PinnedMemory(65536), cupy.cuda.Memory(65536)
    stream = cupy.cuda.Stream(non_blocking=True)

    def wait_ms() -> float:
        started = time.perf_counter()
        runtime.memcpyAsync(target.ptr, source.ptr, 65536, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()
        return (time.perf_counter() - started) * 1e3

    wait_ms()
    events = queue.submit(bulk, TO_DEVICE, *bulk.ids(256), engine="copy_engine")
    time.sleep(0.01)
    waits_ms = [wait_ms() for _ in range(5)]
    over = transfer_queue.query(0, events[-1].ptr)
    bulk_ms = 16 * 256 / 55.0
    print(f"copies of 64 KiB beside the bulk: {[round(ms, 2) for ms in waits_ms]} ms; all of the bulk {bulk_ms:.0f} ms")
    assert not over, "the bulk was over too soon to show anything"
    assert max(waits_ms) < bulk_ms / 8
    queue.finish()
    bulk.close()


def test_a_submission_that_fails_is_told_by_its_events_and_leaves_the_rest_alone(queue):
    """No memory on the GPU for an engine that needs some: the transfer ends as failed, the next one works."""
    pools = Pools([4096], layers=3)
    ids = pools.ids(5)
    hog = []
    for size_bytes in (1 << shift for shift in range(36, 19, -1)):
        with contextlib.suppress(runtime.CUDARuntimeError):
            while True:
                hog.append(runtime.malloc(size_bytes))
    events = queue.submit(pools, TO_HOST, *ids, engine="staging")
    transfer_queue.flush(queue.stream.ptr)
    queue.stream.synchronize()
    for address in hog:
        runtime.free(address)
    for event in events:
        with pytest.raises(CudaError, match="cudaErrorMemoryAllocation"):
            transfer_queue.query(0, event.ptr)
        assert transfer_queue.forget(event.ptr)
        assert not transfer_queue.forget(event.ptr)
        assert transfer_queue.query(0, event.ptr)
    queue.finish()
    pools.check(TO_HOST, *ids, [])
    queue.submit(pools, TO_HOST, *ids, engine="staging")
    queue.finish()
    pools.check(TO_HOST, *ids)
    pools.close()


def test_what_the_queue_does_not_know(queue):
    pools = Pools([4096], layers=1)
    number, pools.number = pools.number, -7
    with pytest.raises(RuntimeError, match="plan = -7 is not registered"):
        queue.submit(pools, TO_HOST, [1], [1])
    pools.number = number
    closed = Queue()
    closed.close()
    with pytest.raises(RuntimeError, match=r"stream = \d+ is not open on GPU 0"):
        closed.submit(pools, TO_HOST, [1], [1])
    pools.check(TO_HOST, [], [])
    pools.close()


def test_capture_in_another_thread_is_not_broken(queue):
    """The queue goes on beside it."""
    pools = Pools([65536], layers=4, device_blocks=20, host_blocks=20)
    ids = pools.ids(20)
    with capture():
        events = queue.submit(pools, TO_HOST, *ids)
        while not transfer_queue.query(0, events[-1].ptr):
            pass
    pools.check(TO_HOST, *ids)
    pools.close()


@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
def test_a_stream_is_closed_beside_a_capture(machine, paddle_stream, engine):
    """What the engines hold is freed, which a capture forbids."""
    pools = Pools([65536], layers=4, device_blocks=20, host_blocks=20)
    ids = pools.ids(20)
    closed = Queue()
    closed.submit(pools, TO_HOST, *ids, engine=engine)
    closed.finish()
    with capture():
        closed.close()
    pools.check(TO_HOST, *ids)
    pools.close()
