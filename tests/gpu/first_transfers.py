"""The first save and the first load of a process, submitted while a replay waits at a closed gate: what they need of
the driver (kernels that are loaded, memory, streams) must not wait for that replay. In a process of its own, since all
of that happens once.

    python -m tests.gpu.first_transfers --layout block_first --block-kib 4
"""

from __future__ import annotations

import argparse
import json
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first

import cupy
import numpy as np
import paddle
from cupy.cuda import runtime

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices

TIMEOUT_S = 10.0
LAYERS = 4
BLOCKS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="layer_first")
    parser.add_argument("--block-kib", type=int, default=4)
    given = parser.parse_args()
    paddle.set_device(devices.name_of(0))
    spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=128, block_size=given.block_kib * 4, dtype="float16")
    cache, pool = DeviceCache(spec, 2 * BLOCKS, devices.name_of(0)), HostPool(spec, BLOCKS, layout=given.layout)
    memories = [
        cupy.ndarray(
            (2 * BLOCKS, spec.tensor_block_bytes(name)),
            cupy.uint8,
            cupy.cuda.MemoryPointer(
                cupy.cuda.UnownedMemory(cache.pointer(name, layer), 2 * BLOCKS * spec.tensor_block_bytes(name), cache),
                0,
            ),
        )
        for name in spec.tensor_names
        for layer in range(LAYERS)
    ]
    written = np.random.default_rng(0).integers(0, 256, memories[0].shape, np.uint8)
    for memory in memories:
        memory.set(written)
    compute, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with LayerwiseScheduler(cache, pool, compute_stream=compute) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        compute.begin_capture(runtime.streamCaptureModeGlobal)
        for layer in range(LAYERS):
            gates.wait(layer, stream=compute)
        graph = compute.end_capture()
        graph.upload(compute)
        runtime.deviceSynchronize()
        save = scheduler.offload(range(BLOCKS), range(BLOCKS), layerwise=True)
        load = scheduler.onload(range(BLOCKS), range(2 * BLOCKS - 1, BLOCKS - 1, -1))
        gates.arm(loads=[load])
        graph.launch(compute)
        time.sleep(0.1)
        was_closed = not compute.done
        started = time.perf_counter()
        for layer in range(LAYERS):
            save.mark_layer_written(layer, stream=side)
        load.wait(3 * TIMEOUT_S)
        took_ms = (time.perf_counter() - started) * 1e3
        compute.synchronize()
    right = all(bool((memory.get()[BLOCKS:] == written[:BLOCKS][::-1]).all()) for memory in memories)
    print(json.dumps({"was_closed": was_closed, "took_ms": took_ms, "right": right}))


if __name__ == "__main__":
    main()
