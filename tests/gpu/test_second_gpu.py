"""A process that works on the second GPU: threads that never chose a device, and no context on the first GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy")

ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = r"""
import ctypes, threading, zlib
import numpy as np
import paddle
from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices, ops

driver = ctypes.CDLL("libcuda.so.1")
contexts = []

def look(what):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
    contexts.append((what, active.value))
    print(what, "and GPU 0 has", "a context" if active.value else "no context", flush=True)

def in_a_thread(work):
    failures = []
    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]

LAYERS, DEVICE_BLOCKS, HOST_BLOCKS = 3, 11, 13
paddle.set_device(devices.name_of(1))
spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=2, head_dim=16, block_size=4, dtype="float16")
bits = np.random.default_rng(5)
before = [bits.integers(0, 1 << 10, (DEVICE_BLOCKS, 2, 4, 16)).astype(np.float16) for _ in range(2 * LAYERS)]
tensors = [paddle.to_tensor(array, place=devices.place_of(1)) for array in before]
keys, values = tensors[:LAYERS], tensors[LAYERS:]
look("tensors of Paddle are on GPU 1")
pool = HostPool(spec, HOST_BLOCKS)
look("a pool is allocated")
cache = DeviceCache.adopt(spec, {"key": keys, "value": values})
scheduler = LayerwiseScheduler(cache, pool)
look("a scheduler is made")

def transfer():
    save = scheduler.offload([1, 4, 9], [7, 2, 12])
    save.wait(60)
    load = scheduler.onload([7, 2, 12], [3, 0, 10])
    for layer in range(LAYERS):
        load.wait_layer(layer)
    load.wait(60)

def check(sources, targets):
    for tensor, array in zip(tensors, before):
        array[targets] = array[sources]
        assert tensor.numpy().tobytes() == array.tobytes()

in_a_thread(transfer)
look("a thread has saved and loaded")
check([1, 4, 9], [3, 0, 10])
in_a_thread(lambda: ops.copy_blocks(keys, values, [(3, 5), (0, 8)]))
look("a thread has copied")
check([3, 0], [5, 8])
def copy_by_address():
    block_bytes = before[0][0].nbytes
    pointers = [tensor.data_ptr() for tensor in tensors]
    sources, targets = ([pointer + block * block_bytes for pointer in pointers] for block in (5, 6))
    ops.vectorized_copy(sources, targets, block_bytes)

in_a_thread(copy_by_address)
look("a thread has copied by address")
check([5], [6])
in_a_thread(scheduler.close)
look("a thread has closed the scheduler")
in_a_thread(pool.close)
look("a thread has closed the pool")
if not contexts[0][1]:
    assert not any(active for _, active in contexts)
"""


def test_threads_work_on_the_second_gpu_and_leave_the_first_alone() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
