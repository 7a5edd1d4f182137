"""Saves and loads of an asyncio server: no thread waits, nothing polls.

    python examples/async_server.py

Each request saves its blocks, does something else while they move, loads them again and compares.
"""

import asyncio

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler

SPEC = KVCacheSpec(num_layers=4, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")
REQUESTS, BLOCKS = 16, 3


async def serve(scheduler: LayerwiseScheduler, number: int) -> bool:
    """One request: its blocks leave the device and come back to other places."""
    cache, pool = scheduler.device_cache, scheduler.host_pool
    device = list(range(number * BLOCKS, (number + 1) * BLOCKS))
    for layer in range(SPEC.num_layers):
        cache.tensor("key", layer)[device[0] : device[-1] + 1] = float(number + layer)
    host = pool.allocate(BLOCKS)
    await scheduler.offload(device, host)
    elsewhere = [block + REQUESTS * BLOCKS for block in device]
    await asyncio.wait_for(scheduler.onload(host, elsewhere), timeout=10)
    pool.free(host)
    return all(
        bool((cache.tensor("key", layer).numpy()[elsewhere] == np.float32(number + layer)).all())
        for layer in range(SPEC.num_layers)
    )


async def main() -> int:
    """How many requests found what they had saved."""
    pool = HostPool(SPEC, REQUESTS * BLOCKS)
    with LayerwiseScheduler(DeviceCache(SPEC, 2 * REQUESTS * BLOCKS, "cpu"), pool) as scheduler:
        right = await asyncio.gather(*(serve(scheduler, number) for number in range(REQUESTS)))
    pool.close()
    return sum(right)


if __name__ == "__main__":
    print(f"{asyncio.run(main())} of {REQUESTS} requests have their blocks back")
