"""What the calls of a Mooncake Store cost by themselves: python tools/bench_mooncake_calls.py HOST:PORT

256 objects of 1 MiB in one call each, with and without a header of 4 KiB in memory of its own. Each round runs every
call once; the first round does not count. The store needs room for 1 GiB. Nothing has checksums but the two ways that
say so, which bound what a tier can reach that has them: those of all layers made by a second thread during the call of
a store, as if they were not needed before it, and behind that of a load.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np

from paddle_kv.tiers.checksum import checksums
from paddle_kv.tiers.mooncake_store import connect

OBJECTS, OBJECT_BYTES, HEADER_BYTES, ROUNDS = 256, 1 << 20, 4096, 7
STAGES = (1, 4, 11, 16)  # layers
LAYER_BYTES = OBJECT_BYTES // sum(STAGES)

Found = dict[str, list[tuple[float, float]]]


def run_round(
    store: Any, number: int, headers: list[int], blocks: list[int], contents: memoryview, found: Found
) -> None:
    kinds = ("plain", "one", "two", "beside")
    plain, one, two, beside = ([f"{kind}-{number}-{i}" for i in range(OBJECTS)] for kind in kinds)
    sizes, pairs = [OBJECT_BYTES] * OBJECTS, [[HEADER_BYTES, OBJECT_BYTES]] * OBJECTS
    alone, both = [[block] for block in blocks], [list(pair) for pair in zip(headers, blocks, strict=True)]

    def sums() -> None:
        checksums([(contents, LAYER_BYTES)])

    def put_beside_sums() -> None:
        with ThreadPoolExecutor(1) as other:
            summed = other.submit(sums)
            store.batch_put_from(beside, blocks, sizes)
            summed.result()

    def session(stages: tuple[int, ...]) -> None:
        store.batch_get_session_start(two)
        first = 0
        for layers in stages:
            at, size = first * OBJECT_BYTES // sum(stages), layers * OBJECT_BYTES // sum(stages)
            head = [] if first else [(0, HEADER_BYTES)]
            starts = [[h] * len(head) + [block + at] for h, block in zip(headers, blocks, strict=True)]
            lengths = [[length for _, length in head] + [size]] * OBJECTS
            offsets = [[offset for offset, _ in head] + [HEADER_BYTES + at]] * OBJECTS
            store.batch_get_into_multi_buffer_ranges(two, starts, lengths, offsets)
            first += layers
        store.batch_get_session_end(two)

    calls: dict[str, Callable[[], object]] = {
        "batch_put_from": lambda: store.batch_put_from(plain, blocks, sizes),
        "put, one buffer an object": lambda: store.batch_put_from_multi_buffers(one, alone, [[OBJECT_BYTES]] * OBJECTS),
        "put, header and block": lambda: store.batch_put_from_multi_buffers(two, both, pairs),
        "batch_get_into": lambda: store.batch_get_into(plain, blocks, sizes),
        "get, header and block": lambda: store.batch_get_into_multi_buffers(two, both, pairs),
        "session, header and block": lambda: session((1,)),
        f"session, stages of {STAGES} layers": lambda: session(STAGES),
        "batch_put_from, checksums during it": put_beside_sums,
        "session, header and block, checksums then": lambda: (session((1,)), sums()),
        "checksums alone": sums,
    }
    for name, call in calls.items():
        cpu_s, began_s = time.process_time(), time.perf_counter()
        call()
        taken_s = time.perf_counter() - began_s
        gib = OBJECTS * OBJECT_BYTES / 2**30
        if number:
            found.setdefault(name, []).append((gib * 1024 / taken_s, (time.process_time() - cpu_s) / gib))
    for names in (plain, one, two, beside):
        store.batch_remove(names, True)


def main() -> None:
    local = {"hostname": "127.0.0.1", "segment_bytes": 0, "protocol": "tcp", "devices": "", "metadata": "P2PHANDSHAKE"}
    store = connect(sys.argv[1], **local)  # type: ignore[arg-type]
    memory = [np.frombuffer(mmap.mmap(-1, OBJECTS * size), np.uint8) for size in (HEADER_BYTES, OBJECT_BYTES)]
    for one in memory:
        one[:] = 7
        store.register_buffer(one.ctypes.data, one.nbytes)
    headers, blocks = ([int(one.ctypes.data) + i * one.nbytes // OBJECTS for i in range(OBJECTS)] for one in memory)
    found: Found = {}
    for number in range(ROUNDS):
        run_round(store, number, headers, blocks, memoryview(memory[1]), found)
    for name, results in found.items():
        rate, cpu = map(statistics.median, zip(*results, strict=True))
        print(f"{name:44s} {rate:6.0f} MiB/s  {cpu:.2f} s of processor for a GiB", flush=True)
    os._exit(0)  # leaving the store takes a second


if __name__ == "__main__":
    main()
