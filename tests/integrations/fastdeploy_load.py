"""FastDeploy's pool of four threads on ours, at length: ``python -m tests.integrations.fastdeploy_load``.

*Loads*: each of the four threads loads a host block of known content into a device block of its own, with a callback
that yields at random, waits for the events layer by layer, compares every tensor of the layer, and writes over the
block. *Evictions*: a device block is saved by a call whose result is dropped, and written over at once; the bytes on
the host are compared later. Copies are late at random.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.backend import binding
from paddle_kv.integrations import CacheTransferManager
from tests.schedule.rig import bytes_at

THREADS, HOST_BLOCKS, LAYERS = 4, 64, 4
BLOCKS_OF_THREAD = 3
SPEC = KVCacheSpec(
    num_layers=LAYERS,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype="uint8",
    extra={"key_cache_scales": ((2, 4), "float32")},
)
POISON = 0xDE


class Bench:
    """A cache and a pool as rows of bytes, and what is counted."""

    def __init__(self, seed: int) -> None:
        self.cache, self.pool = DeviceCache(SPEC, THREADS * BLOCKS_OF_THREAD, "cpu"), HostPool(SPEC, HOST_BLOCKS)
        self.seed = seed
        self.device = [[self._rows(name, layer) for name in SPEC.tensor_names] for layer in range(LAYERS)]

    def _rows(self, name: str, layer: int) -> np.ndarray:
        size = SPEC.tensor_block_bytes(name)
        address = self.cache.tensor(name, layer).data_ptr()
        return bytes_at(address, self.cache.num_blocks * size).reshape(-1, size)

    def host(self, block: int) -> list[list[np.ndarray]]:
        return [
            [self.pool.view(name, layer, block).reshape(-1).view(np.uint8) for name in SPEC.tensor_names]
            for layer in range(LAYERS)
        ]

    def fill(self, block: int, content: int) -> None:
        for layer, rows in enumerate(self.device):
            for row in rows:
                row[block] = (content + 37 * layer) % 251


@contextmanager
def late_copies(seed: int) -> Iterator[None]:
    copy, choose = binding.copy, random.Random(seed)

    def late(*given: Any) -> None:
        if choose.random() < 0.02:
            time.sleep(0.0005)
        copy(*given)

    binding.copy = late
    try:
        yield
    finally:
        binding.copy = copy


@contextmanager
def at_work(bench: Bench, seed: int) -> Iterator[tuple[CacheTransferManager, Callable[[Callable[[int], int]], int]]]:
    """The adapter, and what sums up the results of a function of the thread's number."""

    def total(serve: Callable[[int], int]) -> int:
        with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="cache_transfer") as executor:
            return sum(executor.map(serve, range(THREADS)))

    with LayerwiseScheduler(bench.cache, bench.pool) as scheduler, late_copies(seed):
        yield CacheTransferManager(scheduler), total
    bench.pool.close()


def stale_tensors(count: int, seed: int = 0) -> int:
    """Of so many loads, over all threads: tensors of a layer that were not what the host has, behind their event."""
    bench = Bench(seed)
    contents = np.random.default_rng(seed).integers(0, 256, HOST_BLOCKS)
    for block in range(HOST_BLOCKS):
        for layer, views in enumerate(bench.host(block)):
            for view in views:
                view[:] = contents[block] ^ layer

    def serve(thread: int) -> int:
        choose, stale = random.Random(1000 * seed + thread), 0
        for number in range(thread, count, THREADS):
            host, device = (
                choose.randrange(HOST_BLOCKS),
                thread * BLOCKS_OF_THREAD + number // THREADS % BLOCKS_OF_THREAD,
            )
            events: dict[int, Any] = {}

            def on_layer_complete(layer: int, events: dict[int, Any] = events) -> None:
                if choose.random() < 0.3:
                    time.sleep(0)
                events[layer] = manager.record_input_stream_event()
                if choose.random() < 0.3:
                    time.sleep(0)

            manager.load_layers_to_device_async(range(LAYERS), [host], [device], on_layer_complete)
            for layer in range(LAYERS):
                events[layer].synchronize()
                expected = contents[host] ^ layer
                stale += sum(bool((row[device] != expected).any()) for row in bench.device[layer])
                for row in bench.device[layer]:
                    row[device] = POISON
        return stale

    with at_work(bench, seed) as (manager, total):
        found = total(serve)
        manager.sync_input_stream()
    return found


def wrong_bytes(count: int, seed: int = 0) -> int:
    """Of so many evictions, over all threads: bytes on the host that are not what the block had at the call."""
    bench = Bench(seed)

    def serve(thread: int) -> int:
        choose, wrong = random.Random(1000 * seed + thread), 0
        own = range(thread * HOST_BLOCKS // THREADS, (thread + 1) * HOST_BLOCKS // THREADS)
        saved: dict[int, int] = {}
        for number in range(thread, count, THREADS):
            device = thread * BLOCKS_OF_THREAD + choose.randrange(BLOCKS_OF_THREAD)
            host, content = choose.choice(own), choose.randrange(251)
            bench.fill(device, content)
            manager.evict_to_host_async([device], [host])  # nobody keeps it
            saved[host] = content
            for rows in bench.device:
                for row in rows:
                    row[device] = POISON
            if number // THREADS % 50 == 49 or number + THREADS >= count:
                with bench.pool.lease(list(saved)):
                    wrong += sum(compare(block, content) for block, content in saved.items())
        return wrong

    def compare(block: int, content: int) -> int:
        return sum(
            int((view != (content + 37 * layer) % 251).sum())
            for layer, views in enumerate(bench.host(block))
            for view in views
        )

    with at_work(bench, seed) as (manager, total):
        found = total(serve)
        manager.sync_output_stream()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=100_000)
    parser.add_argument("--evictions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin_s = time.monotonic()
    found = stale_tensors(given.loads, given.seed), wrong_bytes(given.evictions, given.seed)
    print(
        f"{given.loads} loads: {found[0]} stale tensors; {given.evictions} evictions: {found[1]} wrong bytes; ", end=""
    )
    print(f"{time.monotonic() - begin_s:.0f} s")
    sys.exit(1 if any(found) else 0)


if __name__ == "__main__":
    main()
