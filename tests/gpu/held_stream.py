"""What goes on while a stream is held for two seconds, or while a kernel moves layers: asked in a process of its own,
since CUDA reads its environment once.

    python -m tests.gpu.held_stream saves --engine copy_engine
    CUDA_DEVICE_MAX_CONNECTIONS=1 python -m tests.gpu.held_stream model --engine kernel
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable

import cupy
import paddle
from cupy.cuda import runtime

from paddle_kv import devices
from paddle_kv.backend import transfer_queue
from tests.gpu.delay import busy, warm_up
from tests.gpu.engine_rig import TO_DEVICE, TO_HOST, Pools, Queue

HOLD_MS = 2000.0
PIECE_BYTES = 24 << 10  # where a channel fills with copies long before the bytes are many
LAYERS = 16


def took_ms(over: Callable[[], object]) -> float:
    started = time.perf_counter()
    while not over():
        pass
    return (time.perf_counter() - started) * 1e3


def saves(engine: str) -> dict[str, float | bool]:
    """Saves of small pieces wait for a stream that is held: does the caller, or an urgent load, wait with them?"""
    held = Pools([PIECE_BYTES], layers=LAYERS, device_blocks=1024, host_blocks=1024, fill=False)
    small = Pools([PIECE_BYTES], layers=LAYERS, device_blocks=8, host_blocks=8)
    bulk, urgent = Queue(), Queue(urgent=True)
    ids, urgent_ids = held.ids(1024), small.ids(4)
    urgent.submit(small, TO_DEVICE, *urgent_ids)  # loads what it needs
    urgent.finish()
    bulk.submit(held, TO_HOST, *ids, engine=engine)
    bulk.finish()
    small.refill()
    gate, producer = cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    busy(producer, HOLD_MS)
    gate.record(producer)
    started = time.perf_counter()
    bulk.submit(held, TO_HOST, *ids, engine=engine, waits=[[gate], *[[]] * (LAYERS - 1)])
    submit_ms = (time.perf_counter() - started) * 1e3
    time.sleep(0.2)  # the thread that submits fills what it may
    events = urgent.submit(small, TO_DEVICE, *urgent_ids)
    urgent_ms = took_ms(lambda: transfer_queue.query(0, events[-1].ptr))
    still_held = not gate.done
    bulk.finish()
    urgent.finish()
    small.check(TO_DEVICE, *urgent_ids)
    return {"submit_ms": submit_ms, "urgent_ms": urgent_ms, "still_held": still_held}


def model(engine: str) -> dict[str, float | bool]:
    """Layers are loaded while a stream waits for each in turn: do kernels of other streams wait for the load?"""
    pools = Pools([1 << 20], layers=LAYERS, device_blocks=256, host_blocks=256, fill=False)
    ids = pools.ids(256)
    queue = Queue()
    compute, reader = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    queue.submit(pools, TO_DEVICE, *ids, engine=engine)
    queue.finish()
    kernel_ms, beside = [], 0
    started = time.perf_counter()
    events = queue.submit(pools, TO_DEVICE, *ids, engine=engine)

    def follow() -> None:
        for event in events:
            transfer_queue.wait_stream(0, reader.ptr, event.ptr, 10.0)

    follower = threading.Thread(target=follow)  # it blocks while a layer is not submitted
    follower.start()
    while not transfer_queue.query(0, events[-1].ptr):
        begun = time.perf_counter()
        busy(compute, 0.1)
        compute.synchronize()
        kernel_ms.append((time.perf_counter() - begun) * 1e3)
        beside += not transfer_queue.query(0, events[-1].ptr)
    load_ms = (time.perf_counter() - started) * 1e3
    follower.join()
    queue.finish()
    reader.synchronize()
    return {"load_ms": load_ms, "longest_kernel_ms": max(kernel_ms, default=0.0), "kernels_beside_it": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["saves", "model"])
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    paddle.set_device(devices.name_of(0))
    warm_up()
    runtime.deviceSynchronize()
    print(json.dumps({"saves": saves, "model": model}[given.what](given.engine)))


if __name__ == "__main__":
    main()
