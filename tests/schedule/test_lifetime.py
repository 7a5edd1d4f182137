"""The end: of a scheduler, of a with block, of a thread, of a forked child, of the interpreter."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

from paddle_kv import CancelledError, HostPool, LayerwiseScheduler, TransferError
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule.resources import release_abandoned
from paddle_kv.tracking.keeper import Deadline
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, are_collected, make_spec, threads_since

ROOT = __file__.rsplit("/tests/", 1)[0]


# ---- close ----
def test_close_waits_for_what_runs_and_drops_the_rest(rig, copies):
    copies.hold("onload", 4)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])
    assert copies.arrived.acquire(timeout=WAIT_S)
    save = scheduler.offload([2], [5], layerwise=True)
    save.mark_layer_written(0)
    save.wait_layer(0, timeout_s=WAIT_S)  # or it would be one of those that are not over
    rig.expect_offload([2], [5], layers=[0])
    with pytest.raises(TimeoutError, match=r"1 transfers were not over after timeout_s"):
        scheduler.close(SHORT_S)
    free = scheduler.offload([7], [8])  # it stays open then
    free.wait(WAIT_S)
    rig.expect_offload([7], [8])
    copies.go_on()
    scheduler.close(WAIT_S)
    load.wait(0)
    rig.expect_onload([4], [1])
    with pytest.raises(CancelledError, match=r"offload was cancelled before layer 1 was moved"):
        save.wait(0)
    assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    scheduler.close()
    rig.check()
    rig.pool.close()
    assert scheduler.stats()["pinned_bytes"] == 0


def test_streams_end_with_the_scheduler(rig):
    before = set(threading.enumerate())
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    assert len(threads_since(before)) == 2
    scheduler.close()
    assert threads_since(before) == set()


def test_a_with_block_that_raises_still_closes(rig, copies):
    def go_on() -> None:
        deadline = Deadline(WAIT_S)
        while load.error is None and not deadline.over:  # close drops the layers that have not begun
            time.sleep(0.001)
        time.sleep(SHORT_S)
        copies.go_on()

    copies.hold("onload", 1)
    with pytest.raises(KeyError), LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4], [1])
        save = scheduler.offload([2], [5], layerwise=True)
        assert copies.arrived.acquire(timeout=WAIT_S)
        going_on = threading.Thread(target=go_on)
        going_on.start()
        raise KeyError
    going_on.join(WAIT_S)
    assert load.done()
    assert save.done()
    assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    rig.expect_onload([4], [1], layers=[0, 1])
    rig.check()


def test_close_does_not_wait_for_the_marks_of_another_scheduler(rig):
    """Its own transfer depends on one that is not marked yet: dropped, with nothing of it running."""
    with LayerwiseScheduler(rig.cache, rig.pool) as one:
        save = one.offload([1], [4], layerwise=True)
        two = LayerwiseScheduler(rig.cache, rig.pool)
        load = two.onload([4], [2])
        two.close(WAIT_S)
        with pytest.raises(CancelledError, match=r"cancelled"):
            load.wait(0)
        assert [two.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
        for layer in range(5):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        rig.expect_offload([1], [4])
        one.onload([4], [2]).wait(WAIT_S)
        rig.expect_onload([4], [2])
    rig.check()


def test_a_scheduler_that_is_closing_takes_nothing_more(rig, copies):
    copies.hold("onload", 4)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])
    assert copies.arrived.acquire(timeout=WAIT_S)
    save = scheduler.offload([2], [5], layerwise=True)
    closer = threading.Thread(target=scheduler.close, args=(WAIT_S,))
    closer.start()
    started_s = time.monotonic()
    while save.error is None:  # close drops it first
        assert time.monotonic() - started_s < WAIT_S
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match=r"the scheduler is closed"):
        scheduler.offload([7], [8])
    assert not load.done()
    copies.go_on()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    load.wait(0)
    rig.expect_onload([4], [1])
    rig.check()


def test_closing_while_others_submit(rig):
    """Each call either works and is waited for, or says that the scheduler is closed; close comes to an end."""
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    transfers, unexpected, started = [], [], threading.Event()

    def submit() -> None:
        try:
            while len(transfers) < 100_000:
                transfers.append(scheduler.onload([4], [1]))
                started.set()
        except RuntimeError as error:
            if "the scheduler is closed" not in str(error):
                unexpected.append(error)

    threads = [threading.Thread(target=submit) for _ in range(2)]
    closers = [threading.Thread(target=scheduler.close, args=(WAIT_S,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(WAIT_S)
    for thread in closers:
        thread.start()
    for thread in threads + closers:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert unexpected == []
    for transfer in transfers:
        assert transfer.done()
        assert transfer.error is None or isinstance(transfer.error, CancelledError)
    assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
    if transfers[0].error is None:
        rig.expect_onload([4], [1])
        rig.check()


# ---- memory in use ----
def test_a_block_in_flight_is_not_given_out(rig, copies):
    copies.hold("offload", 4)
    ids = rig.pool.allocate(17)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([1, 2], [4, 9])
        rig.pool.free([4, 9, 10])
        assert rig.pool.num_free_blocks == 1
        with pytest.raises(MemoryError, match=r"2 blocks were asked for, 1 of 17 are free"):
            rig.pool.allocate(2)
        with pytest.raises(ValueError, match=r"block_ids\[0\] = 4 is not allocated"):
            rig.pool.free([4])
        with pytest.raises(RuntimeError, match=r"2 blocks \(first: 4\) are held by transfers or leases"):
            rig.pool.close()
        copies.go_on()
        save.wait(WAIT_S)
        assert rig.pool.allocate(3) == [4, 9, 10]
    assert len(ids) == 17


def test_a_pool_closes_behind_a_transfer_that_nobody_has_looked_at(rig):
    """It is over on the device: that nobody has asked must not keep the memory."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1, 2], [4, 9])
        assert scheduler.record_event("offload").wait(WAIT_S)
        rig.expect_offload([1, 2], [4, 9])
        rig.check()
        rig.pool.close()
        assert rig.pool.pinned_bytes == 0


def test_a_lease_waits_for_a_transfer(rig, copies):
    copies.hold("offload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload([1], [4])
        with pytest.raises(TimeoutError, match=r"blocks \[4\] were still in use after timeout_s = 0.05"):
            rig.pool.lease([4], timeout_s=SHORT_S).__enter__()
        threading.Timer(SHORT_S, copies.go_on).start()
        with rig.pool.lease([4], timeout_s=WAIT_S):
            rig.expect_offload([1], [4])
            rig.check()


def test_a_transfer_keeps_what_it_touches(copies):
    """The caller has dropped everything."""
    rig = Rig()
    copies.hold("offload", 0)
    array = rig.pool.view("key", 4, 9)
    expected = rig.device["key"][4, 1]
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    scheduler.offload([1], [9])
    alive = [weakref.ref(thing) for thing in (rig.cache, rig.pool, scheduler)]
    event = scheduler.record_event("offload")
    del rig, scheduler
    gc.collect()
    assert all(reference() is not None for reference in alive)
    copies.go_on()
    assert event.wait(WAIT_S)
    np.testing.assert_array_equal(array.reshape(-1).view(np.uint8), expected)
    gc.collect()
    release_abandoned()


# ---- dropped without close ----
class Counting(CpuBackend):
    """Knows what was taken and not given back."""

    def __init__(self) -> None:
        self.bindings: list[int] = []
        self.streams: list[object] = []
        self.num_events = 0

    @property
    def held(self) -> list[int]:
        return [len(self.bindings), len(self.streams), self.num_events]

    def bind(self, device_cache, host_pool):
        self.bindings.append(super().bind(device_cache, host_pool))
        return self.bindings[-1]

    def unbind(self, binding):
        super().unbind(binding)
        self.bindings.remove(binding)

    def create_stream(self):
        self.streams.append(super().create_stream())
        return self.streams[-1]

    def destroy_stream(self, stream):
        super().destroy_stream(stream)
        self.streams.remove(stream)

    def create_event(self):
        self.num_events += 1
        return super().create_event()

    def destroy_event(self, event):
        super().destroy_event(event)
        self.num_events -= 1


def test_what_a_dropped_scheduler_held_is_given_back(rig):
    backend, before = Counting(), set(threading.enumerate())
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    scheduler.onload([4], [1]).wait(WAIT_S)
    dropped = weakref.ref(scheduler)
    del scheduler
    assert are_collected(dropped)
    with LayerwiseScheduler(rig.cache, rig.pool) as other:
        assert backend.held == [0, 0, 0]
        assert len(threads_since(before)) == 2
        rig.expect_onload([4], [1])
        other.offload([1], [3]).wait(WAIT_S)
        rig.expect_offload([1], [3])
    assert threads_since(before) == set()
    rig.check()


def test_nothing_of_a_dropped_scheduler_is_given_back_while_it_moves(rig, copies):
    """What ends its transfer, under the lock, is a call of somebody else."""
    copies.hold("onload", 2)
    backend = Counting()
    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    scheduler.onload([4], [1])
    event = scheduler.record_event("onload")
    dropped = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    with LayerwiseScheduler(rig.cache, rig.pool) as other:
        other.offload([5], [6]).wait(WAIT_S)
        rig.expect_offload([5], [6])
        assert dropped() is not None
        assert backend.held[:2] == [1, 2]
        copies.go_on()
        assert event.wait(WAIT_S)
        other.onload([4], [1]).wait(WAIT_S)
        assert are_collected(dropped)
    assert backend.held == [0, 0, 0]
    rig.expect_onload([4], [1])
    rig.check()


def test_a_scheduler_may_be_dropped_in_its_own_stream_thread(rig, copies):
    backend = Counting()
    cycle = [LayerwiseScheduler(rig.cache, rig.pool, backend=backend)]
    cycle.append(cycle)
    stream = backend.streams[0]
    dropped, collected = weakref.ref(cycle[0]), threading.Event()
    gc.disable()
    try:
        del cycle
        stream.submit(lambda: (gc.collect(), collected.set()))
        assert collected.wait(WAIT_S)
    finally:
        gc.enable()
    assert dropped() is None
    LayerwiseScheduler(rig.cache, rig.pool).close()
    assert backend.held == [0, 0, 0]


def test_a_dropped_scheduler_whose_device_is_lost_is_in_nobodys_way(rig):
    class Lost(CpuBackend):
        def unbind(self, binding):
            super().unbind(binding)
            raise RuntimeError("lost")

    scheduler = LayerwiseScheduler(rig.cache, rig.pool, backend=Lost())
    backend = Counting()
    behind = LayerwiseScheduler(rig.cache, rig.pool, backend=backend)
    del scheduler, behind
    gc.collect()
    LayerwiseScheduler(rig.cache, rig.pool).close()
    assert backend.held == [0, 0, 0]


# ---- fork ----
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_scheduler(rig, copies):
    copies.hold("onload", 1)
    copies.hold("offload", 0)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])
    for _ in range(1):
        assert copies.arrived.acquire(timeout=WAIT_S)
    save = scheduler.offload([2], [5], layerwise=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            copies.go_on()
            _child(rig, scheduler, load, save)
            code = 0
        except BaseException as error:  # noqa: BLE001
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    copies.go_on()
    load.wait(WAIT_S)
    rig.expect_onload([4], [1])
    scheduler.close(WAIT_S)
    rig.check()


def _child(rig, scheduler, load, save):
    for transfer in (load, save):
        with pytest.raises(TransferError, match=r"the process forked while"):
            transfer.wait(1)
        assert transfer.done()
    for call in (
        lambda: scheduler.onload([4], [1]),
        lambda: scheduler.record_event("onload"),
    ):
        with pytest.raises(RuntimeError, match=r"the scheduler was made before a fork; make one in this process"):
            call()
    scheduler.drain(1)
    scheduler.close(1)
    with LayerwiseScheduler(rig.cache, rig.pool) as own:
        with pytest.raises(TransferError, match=r"block 1 of the device cache holds no usable data"):
            own.offload([1], [3])
        own.onload([4], [1]).wait(WAIT_S)
        rig.expect_onload([4], [1])
        rig.check()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_holds_the_lock(rig):
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with rig.pool.domain.group.lock:
            held.set()
            end.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(WAIT_S)
    threading.Timer(SHORT_S, end.set).start()
    child = os.fork()  # waits for it
    if child == 0:
        signal.alarm(20)
        os._exit(0 if end.is_set() and rig.pool.allocate(3) == [0, 1, 2] else 1)
    _, status = os.waitpid(child, 0)
    thread.join(WAIT_S)
    assert os.waitstatus_to_exitcode(status) == 0


# ---- interpreter exit ----
PROGRAM = """
import sys, threading, time, zlib, warnings
warnings.simplefilter("ignore")
import numpy as np
from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, PaddleKVError
from paddle_kv.backend import binding
from paddle_kv.schedule import at_exit

spec = KVCacheSpec(num_layers=4, num_kv_heads=1, head_dim=8, block_size=16, dtype="uint8", latent=True)
file = np.memmap(sys.argv[1], np.uint8, "r+", shape=(4, 6, spec.block_bytes))
pool = HostPool.adopt(spec, {"latent": [file[layer].ctypes.data for layer in range(4)]}, 6)
cache = DeviceCache(spec, 3, "cpu")
for layer in range(4):
    for block in range(3):
        cache.tensor("latent", layer)[block] = 10 * layer + block + 1
copy = binding.copy
def slow(number, plan, layers):
    time.sleep(0.15)
    copy(number, plan, layers)
binding.copy = slow
scheduler = LayerwiseScheduler(cache, pool)
"""
ENDS = {
    "end of the program": "scheduler.offload([2, 0], [5, 1])",
    "everything deleted": "scheduler.offload([2, 0], [5, 1])\ndel scheduler, pool, cache",
    "exception": "scheduler.offload([2, 0], [5, 1])\nraise KeyError('the end')",
    "a layer that is never marked": (
        "scheduler.offload([2, 0], [5, 1])\nsave = scheduler.offload([1], [3], layerwise=True)\n"
        "scheduler.onload([3], [2])"
    ),
    "a daemon thread that waits for ever": (
        "save = scheduler.offload([1], [3], layerwise=True)\nscheduler.offload([2, 0], [5, 1])\n"
        "def wait():\n    try:\n        save.wait()\n    except RuntimeError:\n        pass\n"
        "threading.Thread(target=wait, daemon=True).start(); time.sleep(0.1)"
    ),
    "a thread that goes on submitting": (
        "scheduler.offload([2, 0], [5, 1])\n"
        "def submit():\n    loads = []\n    try:\n        while True:\n"
        "            loads.append(scheduler.onload([4], [1]))\n"
        "            len(loads) < 3 or loads.pop(0).wait()\n"  # never idle, and never many: the end waits for them
        "    except PaddleKVError:\n        pass\n"
        "threading.Thread(target=submit, daemon=True).start(); time.sleep(0.1)\n"
        "at_exit.release_abandoned = submit"  # the last thing done at exit: it must be refused by then
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_only_behind_the_copies(tmp_path, end):
    spec_bytes = 16 * 8
    path = tmp_path / "host"
    path.write_bytes(b"\xde" * (4 * 6 * spec_bytes))
    program = textwrap.dedent(PROGRAM) + ENDS[end] + "\n"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert ran.returncode == (1 if "exception" in end else 0), ran.stderr
    if "exception" in end:
        assert "KeyError: 'the end'" in ran.stderr
    else:
        assert "Traceback" not in ran.stderr, ran.stderr
    host = np.frombuffer(path.read_bytes(), np.uint8).reshape(4, 6, spec_bytes)
    expected = np.full_like(host, 0xDE)
    for layer in range(4):
        expected[layer, 5] = 10 * layer + 3
        expected[layer, 1] = 10 * layer + 1
    np.testing.assert_array_equal(host, expected)


def test_a_pool_may_be_dropped_in_a_stream_thread(rig, copies):
    """The collector may run anywhere, also in the thread that copies while another one waits for it to end."""
    dropped = []

    def copy_and_drop(*arguments) -> None:
        pool = HostPool(make_spec(), 3)
        pool.itself = pool
        dropped.append(weakref.ref(pool))
        del pool
        gc.collect()
        copies(*arguments)

    from paddle_kv.backend import binding

    binding.copy = copy_and_drop  # the fixture puts the real one back
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    load = scheduler.onload([4], [1])
    started = time.monotonic()
    scheduler.drain(WAIT_S)
    scheduler.close(WAIT_S)
    assert time.monotonic() - started < WAIT_S
    load.wait(0)
    assert len(dropped) == 5
    assert all(reference() is None for reference in dropped)
    rig.expect_onload([4], [1])
    rig.check()
