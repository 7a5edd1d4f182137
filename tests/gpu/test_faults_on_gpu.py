"""What the CUDA calls refuse, what is killed half way, and pointers that lead nowhere: typed errors or a death that
nobody else notices; nothing stays behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")

from paddle_kv import CudaError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
from paddle_kv.memory import host_memory
from tests.gpu.scheduler_rig import WAIT_S, GpuRig
from tests.schedule.rig import make_spec, moved

ROOT = str(Path(__file__).resolve().parents[2])
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@pytest.fixture
def rig() -> GpuRig:
    return GpuRig()


def refuse(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, nth: int) -> list[int]:
    """The nth call of ``owner.name`` fails as CUDA would. Counts the calls."""
    import cupy

    real, calls = getattr(owner, name), [0]

    def refusing(*arguments, **options):
        calls[0] += 1
        if calls[0] == nth:
            raise cupy.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, refusing)
    return calls


def assert_works(rig: GpuRig) -> None:
    with rig.scheduler() as scheduler:
        scheduler.onload([5], [2]).wait(WAIT_S)
    rig.device = moved(rig.host, rig.device, [5], [2])
    rig.check()


# ---- CUDA refuses ----
def test_each_pinned_allocation_that_fails(rig, monkeypatch):
    import cupy

    owned = []
    add, remove = host_memory._page_lock_functions()
    asked_for = 0

    def counted(address, size_bytes):
        nonlocal asked_for
        asked_for += 1
        if asked_for == nth:
            return OUT_OF_MEMORY
        owned.append(address)
        return add(address, size_bytes)

    spec = make_spec(num_layers=3)
    for nth in itertools.count(1):
        owned.clear()
        asked_for = 0
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "_page_lock_functions", lambda: (counted, remove))
            try:
                pool = HostPool(spec, 7, layout="layer_first")  # a piece for each layer
            except MemoryError as error:
                asked = 7 * 3 * spec.block_bytes
                assert f"{asked} bytes of page-locked host memory were asked for" in str(error)
                assert "cudaErrorMemoryAllocation" in str(error)
                assert len(owned) == nth - 1
                for address in owned:
                    attributes = cupy.cuda.runtime.pointerGetAttributes(address)
                    assert attributes.type != cupy.cuda.runtime.memoryTypeHost, "a piece was kept"
                continue
        assert asked_for == nth - 1
        pool.close()
        break
    assert nth == 4
    assert_works(rig)


def test_each_stream_that_cannot_be_made(rig, monkeypatch):
    from paddle_kv.backend import cupy_backend

    for nth in (1, 2):
        with monkeypatch.context() as patch:
            refuse(patch, cupy_backend, "transfer_stream", nth)
            with pytest.raises(CudaError, match="cudaErrorMemoryAllocation") as caught:
                rig.scheduler()
            assert caught.value.code == OUT_OF_MEMORY
    assert_works(rig)


class Runtime:
    """CuPy's runtime, to be patched where the backend looks."""

    def __getattr__(self, name):
        import cupy

        return getattr(cupy.cuda.runtime, name)

    def eventCreateWithFlags(self, flags):
        import cupy

        return cupy.cuda.runtime.eventCreateWithFlags(flags)


def test_each_event_that_cannot_be_made(rig, monkeypatch):
    """A load, a save layer by layer: whichever event it is, the call or the transfer says so, and all is given back."""
    from paddle_kv.backend import cupy_backend

    failures = 0
    for nth in itertools.count(1):
        runtime, scheduler, save = Runtime(), None, None
        with monkeypatch.context() as patch:
            patch.setattr(cupy_backend, "runtime", runtime)
            calls = refuse(patch, runtime, "eventCreateWithFlags", nth)
            try:
                with rig.scheduler() as scheduler:
                    try:
                        scheduler.onload([5], [3]).wait(WAIT_S)
                        save = scheduler.offload([4], [6], layerwise=True)
                        for layer in range(3):
                            save.mark_layer_written(layer)
                        save.wait(WAIT_S)
                    except (TransferError, CudaError) as error:
                        failures += 1
                        assert "cudaErrorMemoryAllocation" in str(error)
                        if save is not None:
                            save.cancel()  # a mark that could not be made is no mark: it would wait for another one
                        scheduler.drain(WAIT_S)
            except CudaError as error:  # the scheduler could not be made
                failures += 1
                assert error.name == "cudaErrorMemoryAllocation"
            if scheduler is not None:
                assert [scheduler.stats()[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]
        rig.cache.mark_rewritten([3])
        rig.pool.mark_rewritten([6])
        if calls[0] < nth:
            break
    assert failures == nth - 1 >= 6
    rig.device = moved(rig.host, rig.device, [5], [3])
    rig.host = moved(rig.device, rig.host, [4], [6])
    rig.check()


# ---- other processes ----
HEAD = """
import sys, threading, time, warnings, zlib
warnings.simplefilter("ignore")
import numpy as np, paddle, cupy
from paddle_kv import CudaError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError, devices, ops
from tests.gpu import delay
paddle.set_device(devices.name_of(0))
spec = KVCacheSpec(num_layers=8, num_kv_heads=4, head_dim=128, block_size=32, dtype="float16")
cache, pool = DeviceCache(spec, 512, "gpu:0"), HostPool(spec, 1024)
"""


def start(program: str) -> subprocess.Popen:
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )


def run(program: str, timeout_s: float = 120) -> tuple[int, str]:
    child = start(program)
    try:
        out, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"the process does not end: {child.communicate()}")
    return child.returncode, out + errors


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def test_a_process_that_is_killed_leaves_nothing(rig):
    """Transfers of 1 GiB in both directions are running when it dies."""
    import cupy

    files = shared_files()
    cupy.cuda.runtime.deviceSynchronize()
    free, _ = cupy.cuda.runtime.memGetInfo()
    child = start("""
with LayerwiseScheduler(cache, pool) as scheduler:
    for number in range(1_000_000):
        scheduler.offload(list(range(256)), list(range(256)))
        scheduler.onload(list(range(256, 512)), list(range(256, 512)))
        if number == 5:
            print("moving", flush=True)
        while scheduler.stats()["in_flight"] > 6:
            time.sleep(0.0005)
""")
    assert child.stdout.readline() == "moving\n", child.communicate()
    during, _ = cupy.cuda.runtime.memGetInfo()
    assert during < free - (1 << 28), "the other process uses the GPU"
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    child.communicate()
    deadline = time.monotonic() + 20
    while cupy.cuda.runtime.memGetInfo()[0] < free and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cupy.cuda.runtime.memGetInfo()[0] >= free
    assert shared_files() <= files
    assert_works(rig)


ENDS = {
    "threads that go on submitting": """
scheduler = LayerwiseScheduler(cache, pool)
def submit():
    try:
        while True:
            scheduler.onload(list(range(64)), list(range(64)))
    except RuntimeError as error:
        assert "closed" in str(error), error
threading.Thread(target=submit, daemon=True).start()
time.sleep(0.3)
""",
    "two schedulers, a layer that is never marked": """
first, second = LayerwiseScheduler(cache, pool), LayerwiseScheduler(cache, pool)
first.offload(list(range(256)), list(range(256)))
save = first.offload([300], [300], layerwise=True)
save.mark_layer_written(0)
second.onload([300], [301])
""",
    "sys.exit in the middle": """
scheduler = LayerwiseScheduler(cache, pool)
scheduler.offload(list(range(256)), list(range(256)))
sys.exit(0)
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_in_mid_transfer(end):
    code, text = run(ENDS[end])
    assert code == 0, text
    assert "Traceback" not in text


WRONG = {
    "an address in the pages that nobody has": """
try:
    ops.swap_cache_per_layer(cache.tensor("key", 0), 0x10000, 16, [0], [0], 0, 0)
except ValueError as error:
    print("typed", error)
""",
    "a pointer of the device for one of the host": """
try:
    ops.swap_cache_per_layer(cache.tensor("key", 0), cache.tensor("key", 1).data_ptr(), 16, [0], [0], 0, 0)
except ValueError as error:
    print("typed", error)
""",
    "a range that ends behind its memory": """
memory = cupy.cuda.PinnedMemory(1 << 20)
try:
    ops.swap_cache_per_layer(cache.tensor("key", 0), memory.ptr, 1 << 20, [0], [0], 0, 0)
except ValueError as error:
    print("typed", error)
""",
    "a pool of wrong addresses": """
wrong = HostPool.adopt(spec, {name: [0x7000_0000_0000 + i * (1 << 30) + (1 << 40) * (name == "key")
                                     for i in range(8)] for name in ("key", "value")}, 64)
try:
    LayerwiseScheduler(cache, wrong)
except ValueError as error:
    print("typed", error)
""",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_pointer_is_refused(what):
    code, text = run(WRONG[what])
    assert code == 0, text
    assert "typed" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("engine", ["kernel", "copy_engine"])
def test_memory_that_went_away_under_an_adopted_pool(rig, engine):
    """The caller's fault, and nobody can see it beforehand: a typed error or the end of that process, in time; the GPU
    and this process go on."""
    code, text = run(
        f"""
memories = [cupy.cuda.PinnedMemory(64 * spec.tensor_block_bytes("key")) for _ in range(16)]
adopted = HostPool.adopt(spec, {{"key": [m.ptr for m in memories[:8]], "value": [m.ptr for m in memories[8:]]}}, 64)
scheduler = LayerwiseScheduler(cache, adopted, engine={engine!r})
scheduler.onload(list(range(0, 64, 2)), list(range(32))).wait(30)
del memories[:]
try:
    scheduler.onload(list(range(0, 64, 2)), list(range(32))).wait(30)
    print("typed: nothing happened")
except TransferError as error:
    print("typed", error, repr(error.__cause__), flush=True)
"""
    )
    assert code < 0 or "typed" in text, text
    print(f"{engine}: exit code {code}: {text.strip().splitlines()[-1] if text.strip() else ''}")
    assert_works(rig)


def test_a_fault_in_a_kernel_of_the_model(rig):
    """It takes the CUDA context with it: each later call of a transfer raises a typed error, none hangs, and the
    process ends by itself."""
    code, text = run("""
compute = cupy.cuda.Stream(non_blocking=True)
scheduler = LayerwiseScheduler(cache, pool, compute_stream=compute)
scheduler.onload([1], [1]).wait(30)
with compute:
    cupy.RawModule(code='extern "C" __global__ void fault(int* p) { *p = 1; }').get_function("fault")(
        (1,), (1,), (np.uint64(0x10),))
kinds = []
for call in (lambda: scheduler.onload([1], [2]).wait(30), lambda: scheduler.offload([3], [3]).wait(30)):
    try:
        call()
    except (TransferError, CudaError) as error:
        kinds.append(type(error).__name__)
        print("typed", error, flush=True)
assert len(kinds) == 2, kinds
""")
    assert "Traceback" not in text.split("typed")[0], text
    assert text.count("typed") == 2, text
    assert code in (0, 1) or code < 0, text
    assert_works(rig)


def test_more_than_the_gpu_can_reach(rig):
    """An id beyond the pool is refused before anything is enqueued, also by the largest pools."""
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, dtype="uint8", latent=True)
    cache, pool = DeviceCache(spec, 1 << 20, "gpu:0"), HostPool(spec, 1 << 20)
    with LayerwiseScheduler(cache, pool) as scheduler:
        for ids in ([1 << 20], [-1], [1 << 40]):
            with pytest.raises(IndexError, match=r"must be in \[0, 1048576\)"):
                scheduler.onload([0], np.array(ids))
        scheduler.onload([(1 << 20) - 1], [(1 << 20) - 1]).wait(WAIT_S)
    pool.close()
    assert_works(rig)
