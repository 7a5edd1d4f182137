"""What it costs to know what lies in a folder of the engine "files": python tools/bench_tier_index.py FOLDER

Makes a folder of so many objects inside FOLDER (their tables alone: no payload is written), opens it as after a
restart, and tells time and memory of the index for an object. Then a manager stands on it, whose prompt of so many
blocks lies in host memory, in the tier, half here and half there, or nowhere: how long a `lookup` holds the caller, the
processor time of the process, and how often it reads or writes files meanwhile, which Linux counts: the bars are 2 ms
and never.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.offload import KVOffloadManager
from paddle_kv.tiers import FilesEngine, Tier
from paddle_kv.tiers.folder import Folder
from paddle_kv.tiers.slab import create

SLOTS = 8192  # of a slab
SLOT_BYTES = 4096
ROOM_BYTES = 1 << 30  # for the objects of the prompt
WAIT_S = 120.0
WARM_UP = 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def calls_of_files() -> int:
    """Reads and writes of all threads so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["syscr"]) + int(counts["syscw"])


def fill(path: Path, objects: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for number in range(-(-objects // SLOTS)):
        first = number * SLOTS
        count = min(SLOTS, objects - first)
        slab = create(descriptor, number, SLOT_BYTES, SLOTS, direct=False, allocate=False)
        records = [((first + at).to_bytes(16, "big"), first + at + 1, SLOT_BYTES) for at in range(count)]
        slab.write_records(range(count), records)
        for one in slab.descriptors():
            os.close(one)
    os.close(descriptor)


def index(path: Path, objects: int, capacity_bytes: int) -> None:
    gc.collect()
    before, clock_s, processor_s = resident_bytes(), time.perf_counter(), time.process_time()
    folder = Folder(path, capacity_bytes)
    clock_s, processor_s = time.perf_counter() - clock_s, time.process_time() - processor_s
    gc.collect()
    resident = resident_bytes() - before
    assert len(folder) == objects
    folder.close()
    del folder
    gc.collect()
    tracemalloc.start()
    folder = Folder(path, capacity_bytes)
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    folder.close()
    print(f"{objects} objects are known after {clock_s:.2f} s ({processor_s:.2f} s of processor)")
    print(f"bytes an object: {traced / objects:.0f} by Python's count, {resident / objects:.0f} by the system's")


def lookups(path: Path, blocks: int, repeats: int, capacity_bytes: int) -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float16")
    pool = HostPool(spec, 2 * blocks, layout="block_first")
    engine = FilesEngine({path: capacity_bytes})
    tier = Tier(engine, pool, model=b"bench")
    scheduler = LayerwiseScheduler(DeviceCache(spec, blocks, "cpu"), pool)
    manager = KVOffloadManager(scheduler, tier=tier)
    hashes = manager.block_hashes(range(blocks * spec.block_size))
    absent = manager.block_hashes(range(1, 1 + blocks * spec.block_size))
    manager.save(hashes, list(range(blocks))).wait(WAIT_S)
    manager.flush(WAIT_S)
    gc.collect()
    gc.freeze()  # as a server does: the collector need not look at what stays
    for name, evicted, asked in (
        ("all in host memory", 0, hashes),
        ("half in host memory, half in the tier", blocks // 2, hashes),
        ("all in the tier", blocks, hashes),
        ("absent", blocks, absent),
    ):
        manager.evict(evicted - (blocks - manager.stats()["blocks"]))
        assert manager.stats()["blocks"] == blocks - evicted
        of_asking = -calls_of_files() + calls_of_files()
        clock_ms, processor_ms, calls = [], [], 0
        for _ in range(WARM_UP + repeats):
            before = calls_of_files()
            clock_s, processor_s = time.perf_counter(), time.process_time()
            lease = manager.lookup(asked)
            processor_ms.append((time.process_time() - processor_s) * 1e3)
            clock_ms.append((time.perf_counter() - clock_s) * 1e3)
            calls += calls_of_files() - before - of_asking
            assert (lease.num_blocks, lease.num_below) == ((blocks, evicted) if asked is hashes else (0, 0))
            lease.release()
        shown = "; ".join(
            f"{statistics.median(one[WARM_UP:]):.3f} ms, at most {max(one[WARM_UP:]):.3f} ms {of}"
            for one, of in ((processor_ms, "of processor"), (clock_ms, "on the clock"))
        )
        print(f"lookup of {blocks} blocks, {name}: {shown}; {calls} reads and writes")
    manager.close()
    scheduler.close(WAIT_S)
    tier.close(WAIT_S)
    engine.close(WAIT_S)
    pool.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--objects", type=int, default=1_000_000)
    options.add_argument("--blocks", type=int, default=1000, help="of the prompt that is looked up")
    options.add_argument("--repeats", type=int, default=400)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        fill(Path(name), given.objects)
        capacity_bytes = given.objects * SLOT_BYTES + ROOM_BYTES
        index(Path(name), given.objects, capacity_bytes)
        lookups(Path(name), given.blocks, given.repeats, capacity_bytes)


if __name__ == "__main__":
    main()
