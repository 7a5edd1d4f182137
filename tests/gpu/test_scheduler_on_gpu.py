"""The scheduler on a real device: every byte, overlap, streams, threads, refusals, the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, streams  # noqa: E402
from paddle_kv.backend.cupy_backend import CupyBackend  # noqa: E402
from tests.gpu import delay  # noqa: E402
from tests.gpu.capture import capture  # noqa: E402
from tests.gpu.scheduler_rig import (  # noqa: E402
    DELAY_MS,
    OFFLOAD,
    ONLOAD,
    WAIT_S,
    GpuRig,
    Watched,
    block,
    filled,
    is_equal,
)
from tests.schedule.rig import make_spec, moved  # noqa: E402

ROOT = __file__.rsplit("/tests/", 1)[0]


@pytest.fixture
def rig():
    return GpuRig()


# ---- every byte ----
@pytest.mark.parametrize("layers_per_event", [1, 2, 7])
@pytest.mark.parametrize("pool_layout", ["layer_first", "block_first", "page_first_direct"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "NHD", "dtype": "float32"},
        {"latent": True, "extra": {}, "dtype": "uint8", "block_size": 64, "head_dim": 9000},
        {"num_layers": 1, "dtype": "int8", "extra": {}},
    ],
    ids=["odd sizes", "NHD", "large blocks", "one layer"],
)
def test_every_byte_arrives_and_no_other_changes(changes, pool_layout, layers_per_event):
    rig = GpuRig(make_spec(**changes), layout=pool_layout)
    rng = np.random.default_rng(3)
    with rig.scheduler(layers_per_event=layers_per_event) as scheduler:
        for _ in range(3):
            device_ids, host_ids = rng.permutation(9)[:5], rng.permutation(11)[:5]
            scheduler.offload(device_ids, host_ids).wait(WAIT_S)
            rig.host = moved(rig.device, rig.host, device_ids, host_ids)
            device_ids, host_ids = rng.permutation(9)[:4], rng.permutation(11)[:4]
            load = scheduler.onload(host_ids, device_ids)
            for layer in range(rig.spec.num_layers):
                load.wait_layer(layer)
            load.wait(WAIT_S)
            rig.device = moved(rig.host, rig.device, host_ids, device_ids)
            save = scheduler.offload([1, 1], [2, 7], layerwise=True)
            for layer in reversed(range(rig.spec.num_layers)):
                save.mark_layer_written(layer)
            save.wait(WAIT_S)
            rig.host = moved(rig.device, rig.host, [1, 1], [2, 7])
        rig.check()


def test_more_than_ten_thousand_ids():
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=5, block_size=3, dtype="uint8", latent=True)
    rig = GpuRig(spec, device_blocks=12_000, host_blocks=12_500)
    rng = np.random.default_rng(4)
    device_ids, host_ids = rng.permutation(12_000)[:11_111], rng.permutation(12_500)[:11_111]
    with rig.scheduler() as scheduler:
        scheduler.offload(device_ids, host_ids).wait(WAIT_S)
        rig.host["latent"][:, host_ids] = rig.device["latent"][:, device_ids]
        rig.check()
        host_ids = rng.permutation(12_500)[:11_111]
        scheduler.onload(host_ids, device_ids).wait(WAIT_S)
        rig.device["latent"][:, device_ids] = rig.host["latent"][:, host_ids]
        rig.check()


def test_threads_share_a_scheduler(rig):
    failures = []

    def work(scheduler, number):
        try:
            stream = cupy.cuda.Stream(non_blocking=True)
            for _ in range(20):
                scheduler.offload([number], [number]).wait(WAIT_S)
                load = scheduler.onload([number], [number + 4])
                for layer in range(3):
                    load.wait_layer(layer, stream=stream)
                load.wait(WAIT_S)
                save = scheduler.offload([number + 4], [number + 4], layerwise=True)
                for layer in range(3):
                    save.mark_layer_written(layer, stream=stream.ptr)
                save.wait(WAIT_S)
        except BaseException as error:
            failures.append(error)
            raise

    with rig.scheduler() as scheduler:
        threads = [threading.Thread(target=work, args=(scheduler, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert scheduler.stats()["failed"] == 0
    numbers = np.arange(4)
    rig.host = moved(rig.device, rig.host, numbers, numbers)
    rig.device = moved(rig.host, rig.device, numbers, numbers + 4)
    rig.host = moved(rig.device, rig.host, numbers + 4, numbers + 4)
    rig.check()


# ---- overlap ----
@pytest.mark.concurrent_kernels
def test_waits_on_the_device_do_not_block_the_host(rig):
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[ONLOAD], 4 * DELAY_MS)
        started = time.perf_counter()
        load = scheduler.onload([5, 6], [3, 1])
        for layer in range(3):
            load.wait_layer(layer)
        load.wait_on()
        save = scheduler.offload([3], [7])
        called_ms = (time.perf_counter() - started) * 1e3
        assert not load.done()
        assert called_ms < DELAY_MS, "a call has waited for the device"
        assert not rig.compute.done, "compute does not wait for the load"
        save.wait(WAIT_S)


@pytest.mark.concurrent_kernels
def test_a_load_runs_while_compute_runs(rig):
    """Times of both from CUDA events: layer by layer, compute starts behind its layer and hides the next ones."""
    spec = KVCacheSpec(num_layers=6, num_kv_heads=8, head_dim=128, block_size=64, dtype="float16")
    blocks = 320  # 10 ms over the link: longer than the time that another process may have the GPU for itself
    rig = GpuRig(spec, device_blocks=blocks, host_blocks=blocks)
    backend = Watched()
    with rig.scheduler(backend, record_layer_times=True) as scheduler:
        rig.busy(backend.streams[ONLOAD], 200)  # all is enqueued before any of it runs, on a busy host too
        ids = np.random.default_rng(0).permutation(blocks)
        load = scheduler.onload(ids, ids[::-1])
        events = []
        for layer in range(6):
            load.wait_layer(layer)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(rig.compute)
            rig.busy(milliseconds=20)
            end.record(rig.compute)
            events.append((start, end))
        load.wait(WAIT_S)
        rig.compute.synchronize()
        origin = scheduler.origin_event
        compute = [[runtime.eventElapsedTime(origin, event.ptr) for event in pair] for pair in events]
        copies = load.layer_times_ms
        for (compute_start, _), (_, copy_end) in zip(compute, copies, strict=True):
            assert compute_start >= copy_end - 0.01, "compute has started before its layer was there"
        assert copies[1][0] < compute[0][1], "the second layer was loaded only behind the computation of the first"
        assert copies[-1][1] < compute[-2][1], "nothing was hidden"
        hidden_ms = sum(max(0.0, min(end, compute[-1][1]) - max(start, compute[0][0])) for start, end in copies)
        assert hidden_ms > 0
        assert load.elapsed_ms == pytest.approx(copies[-1][1] - copies[0][0], abs=0.1)


@pytest.mark.concurrent_kernels
def test_a_save_runs_while_later_layers_are_computed(rig):
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        save = scheduler.offload([3], [5], layerwise=True)
        rig.write(3, 1, [0])
        save.mark_layer_written(0)
        rig.busy()
        for layer in (1, 2):
            rig.write(3, 1, [layer])
            save.mark_layer_written(layer)
        behind = rig.compute.record()
        deadline = time.perf_counter() + WAIT_S
        while not (rig.pool.view("key", 0, 5).reshape(-1).view(np.uint8) == 1).all():
            assert time.perf_counter() < deadline
        assert not behind.done, "the first layer came only behind the computation of the others"
        save.wait(WAIT_S)


# ---- which stream is compute ----
@pytest.mark.concurrent_kernels
@pytest.mark.parametrize("inside", [False, True])
def test_without_a_name_compute_is_paddles_stream(rig, inside):
    """Inside a CuPy stream it is that one, and Paddle's all the same."""
    other = cupy.cuda.Stream(non_blocking=True)
    paddles = streams.paddle_stream(0)
    with rig.scheduler(compute_stream=None) as scheduler:
        delay.busy(paddles, DELAY_MS)
        rig.write(3, 1, [0, 1], stream=paddles)
        if inside:
            delay.busy(other, DELAY_MS)
            rig.write(3, 1, [2], stream=other.ptr)
            with other:
                save = scheduler.offload([3], [5])
        else:
            rig.write(3, 1, [2], stream=paddles)
            save = scheduler.offload([3], [5])
        save.wait(WAIT_S)
        assert is_equal(block(rig.host_now(), 5), filled(rig.device, 1))


@pytest.mark.parametrize("form", ["handle", "cupy", "none"])
def test_forms_of_a_stream(rig, form):
    stream = {"handle": rig.compute.ptr, "cupy": rig.compute, "none": None}[form]
    with rig.scheduler(compute_stream=stream) as scheduler:
        load = scheduler.onload([5], [3])
        load.wait_layer(0, stream=stream)
        load.wait_on(stream)
        load.wait(WAIT_S)
        rig.device = moved(rig.host, rig.device, [5], [3])
        rig.check()
        for wrong in ("7", 1.5, True):
            with pytest.raises(TypeError, match=r"stream is"):
                load.wait_layer(0, stream=wrong)


@pytest.mark.concurrent_kernels
def test_record_event_covers_what_was_submitted(rig):
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        rig.busy(backend.streams[OFFLOAD])
        save = scheduler.offload([3], [5])
        event, other = scheduler.record_event("offload"), scheduler.record_event("onload")
        other.synchronize()
        assert not event.done
        assert not save.done()
        event.synchronize()
        assert is_equal(block(rig.host_now(), 5), block(rig.device, 3))
        assert save.done()


# ---- refusals; afterwards the process works ----
def works(rig):
    with rig.scheduler() as scheduler:
        scheduler.onload([5], [3]).wait(WAIT_S)
    rig.device = moved(rig.host, rig.device, [5], [3])
    rig.check()


def test_pageable_host_memory_is_refused(rig):
    memory = {
        name: [np.zeros(11 * rig.spec.tensor_block_bytes(name), np.uint8) for _ in range(3)]
        for name in rig.spec.tensor_names
    }
    pointers = {name: [array.ctypes.data for array in layers] for name, layers in memory.items()}
    pool = HostPool.adopt(rig.spec, pointers, 11)
    with pytest.raises(ValueError, match=r"host_pool: the .* are not all host memory that the GPU can reach"):
        LayerwiseScheduler(rig.cache, pool)
    pool.close()
    works(rig)


def test_adopted_pinned_memory(rig):
    pinned = {
        name: [cupy.cuda.PinnedMemory(11 * rig.spec.tensor_block_bytes(name)) for _ in range(3)]
        for name in rig.spec.tensor_names
    }
    rig.pool = HostPool.adopt(rig.spec, {name: [m.ptr for m in layers] for name, layers in pinned.items()}, 11)
    with rig.scheduler() as scheduler:
        scheduler.offload(range(9), range(9)).wait(WAIT_S)
        host = rig.host_now()
        assert all(is_equal(block(host, number), block(rig.device, number)) for number in range(9))
    rig.pool.close()


@pytest.mark.parametrize("backend", ["cupy", CupyBackend])
def test_a_cache_on_the_cpu_is_refused(rig, backend):
    cache = DeviceCache(rig.spec, 9, "cpu")
    backend = backend if isinstance(backend, str) else backend(0)
    with pytest.raises(ValueError, match=r"on the CPU"):
        LayerwiseScheduler(cache, rig.pool, backend=backend)
    works(rig)


def test_a_cache_on_the_gpu_is_refused_by_the_cpu_backend(rig):
    with pytest.raises(ValueError, match=r"the device cache is on GPU 0; the cpu backend needs it on the CPU"):
        LayerwiseScheduler(rig.cache, rig.pool, backend="cpu")
    works(rig)


def test_a_device_that_is_not_there():
    count = runtime.getDeviceCount()
    with pytest.raises(ValueError, match=rf"device = 'gpu:{count}' must name one of the {count} GPUs"):
        DeviceCache(make_spec(), 3, f"gpu:{count}")


@pytest.mark.parametrize("ids", [([9], [0]), ([0], [11]), ([-1], [0]), ([0, 1], [2, 2])])
def test_wrong_ids_move_nothing(rig, ids):
    with rig.scheduler() as scheduler:
        with pytest.raises((IndexError, ValueError), match=r"block_ids"):
            scheduler.offload(*ids)
        rig.check()
    works(rig)


def test_more_pinned_memory_than_there_is():
    with pytest.raises(MemoryError, match=r"\d+ bytes of page-locked host memory were asked for, \d+ bytes are"):
        HostPool(make_spec(), 1 << 40)


def test_a_cache_and_its_pool_on_the_cpu_with_a_gpu_beside(rig):
    """The CPU backend works on a machine with a GPU too."""
    from tests.schedule.rig import Rig

    cpu = Rig(make_spec(num_layers=2))
    with LayerwiseScheduler(cpu.cache, cpu.pool) as scheduler:
        scheduler.offload([1], [2]).wait(WAIT_S)
    cpu.expect_offload([1], [2])
    cpu.check()


# ---- the end of the interpreter ----
PROGRAM = """
import atexit, sys
seen = {}
def last():  # registered first: runs behind all that paddle_kv does at exit
    print("arrived" if (seen["host"] == 7).all() else "lost", flush=True)
atexit.register(last)
import zlib, warnings
warnings.simplefilter("ignore")
import numpy as np
from tests.gpu.scheduler_rig import GpuRig, Watched, OFFLOAD
from paddle_kv.schedule import at_exit as module
rig, backend = GpuRig(), Watched()
made = rig.scheduler(backend)
rig.write(3, 7)
rig.compute.synchronize()
seen["host"] = rig.pool.view("key", 2, 5).reshape(-1).view(np.uint8)
rig.busy(backend.streams[OFFLOAD], 400)
made.offload([3], [5])
made.offload([4], [6], layerwise=True)
assert not (seen["host"] == 7).all()
"""


@pytest.mark.parametrize(
    ("end", "result"),
    [
        ("", "arrived"),
        ("del made, rig\n", "arrived"),
        ("raise KeyError('the end')\n", "arrived"),
        ("atexit.unregister(module.close_all)\n", "lost"),
    ],
    ids=["end of the program", "everything deleted", "exception", "without the wait"],
)
def test_the_interpreter_ends_only_behind_the_copies(end, result):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM + end],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])},
    )
    assert ran.stdout.split()[-1:] == [result], ran.stdout + ran.stderr
    assert ran.returncode == (1 if "raise" in end else 0), ran.stderr


# ---- the submitting thread ----
def test_an_event_is_not_used_anew_while_an_enqueued_transfer_may_wait_for_it():
    """A is over before B, which waits for it, is submitted. With A's events C would be what B waits for, and B what C
    waits for."""
    spec = KVCacheSpec(num_layers=4, num_kv_heads=1, head_dim=1024, block_size=256, dtype="uint8", latent=True)
    rig = GpuRig(spec, device_blocks=1200, host_blocks=1200)
    with rig.scheduler(engine="copy_engine") as scheduler:
        bulk = scheduler.onload(range(1100), range(1100))  # 1.1 GiB: far more than may be in flight
        a = scheduler.offload([1150], [1150])
        b = scheduler.onload([1160], [1150], urgent=False)
        a.wait(WAIT_S)
        assert a.done()
        assert not bulk.done(), "the bulk was over too soon to show anything"
        c = scheduler.offload([1160], [1151])
        c.wait(WAIT_S)
        b.wait(WAIT_S)
        rig.host = moved(rig.device, rig.host, [1150], [1150])
        rig.device = moved(rig.host, rig.device, [*range(1100), 1160], [*range(1100), 1150])
        rig.host = moved(rig.device, rig.host, [1160], [1151])
        bulk.wait(WAIT_S)
        rig.check()


@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
def test_every_engine_through_the_scheduler(engine):
    rig = GpuRig(device_blocks=40, host_blocks=50)
    rng = np.random.default_rng(5)
    with rig.scheduler(engine=engine, layers_per_event=2) as scheduler:
        for _ in range(5):
            device_ids, host_ids = rng.permutation(40)[:33], rng.permutation(50)[:33]
            save = scheduler.offload(device_ids, host_ids)
            rig.host = moved(rig.device, rig.host, device_ids, host_ids)
            host_ids = rng.permutation(50)[:33]
            load = scheduler.onload(host_ids, device_ids)
            load.wait_on()
            save.wait(WAIT_S)
            load.wait(WAIT_S)
            rig.device = moved(rig.host, rig.device, host_ids, device_ids)
        rig.check()


@pytest.mark.parametrize("engine", ["auto", "copy_engine", "kernel", "staging"])
def test_all_calls_work_beside_a_capture(rig, engine):
    """Of another stream; nothing of the engines has been made before."""
    scheduler = rig.scheduler(engine=engine, record_layer_times=True)
    with capture():
        save = scheduler.offload([1, 4], [3, 8])
        save.wait(WAIT_S)
        rig.host = moved(rig.device, rig.host, [1, 4], [3, 8])
        load = scheduler.onload([3, 6], [5, 2])
        for layer in range(rig.spec.num_layers):
            load.wait_layer(layer)
        load.wait_on()
        while not load.done():
            pass
        rig.device = moved(rig.host, rig.device, [3, 6], [5, 2])
        assert save.elapsed_ms >= 0
        assert load.elapsed_ms >= 0
        assert len(load.layer_times_ms) == rig.spec.num_layers
        save = scheduler.offload([7], [9], layerwise=True)
        for layer in range(rig.spec.num_layers):
            save.mark_layer_written(layer)
        urgent = scheduler.onload([1], [0], urgent=True)
        scheduler.drain(WAIT_S)
        rig.host = moved(rig.device, rig.host, [7], [9])
        rig.device = moved(rig.host, rig.device, [1], [0])
        assert save.done()
        assert urgent.done()
        assert scheduler.stats()["in_flight"] == 0
        rig.pool.free(rig.pool.allocate(2))
        scheduler.close()
    rig.check()
