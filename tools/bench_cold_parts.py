"""Measures what the parts of a start cost when they have left the processor's caches, and when they have not.

    python tools/bench_cold_parts.py [--device auto|cpu|gpu] [--repeats 100] [--out FILE.csv]

Before each call 64 MiB are read ("cold"), or nothing is ("again"). Medians in microseconds. A call that the model's
steps lie between begins cold: what these parts cost then is the least that a start can cost which is made of them.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

READ_BYTES = 64 << 20  # more than the caches of a core, and than its share of those of all
NUM_BLOCKS = 256


def parts(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
    from paddle_kv.ops import _arguments as arguments
    from paddle_kv.tracking.group import change
    from paddle_kv.tracking.keeper import nothing

    spec = KVCacheSpec(num_layers=32, num_kv_heads=1, head_dim=8, block_size=16, dtype="float16")
    ids = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    with (
        HostPool(spec, NUM_BLOCKS) as pool,
        LayerwiseScheduler(DeviceCache(spec, NUM_BLOCKS, device), pool) as scheduler,
    ):
        yield "a function of Python that does nothing", nothing
        yield "an array of NumPy", lambda: np.zeros(NUM_BLOCKS, bool)
        yield "ids of 256 blocks checked", lambda: arguments.plain_id_array(ids, NUM_BLOCKS, distinct=True)
        yield "a plan, of which that is two", lambda: scheduler.plan("onload", ids, ids)
        yield "a section that does nothing", lambda: change(scheduler, nothing)
        yield "the stream that is meant", lambda: scheduler.compute_stream(None)
        if device == "gpu":
            from cupy.cuda import runtime

            event, stream = runtime.eventCreateWithFlags(0), scheduler.compute_stream(None)
            yield "cudaStreamIsCapturing", lambda: runtime.streamIsCapturing(stream)
            yield "cudaEventRecord", lambda: runtime.eventRecord(event, stream)
            runtime.eventDestroy(event)


def median_us(call: Callable[[], Any], repeats: int, read: np.ndarray) -> float:
    times_s = []
    for _ in range(repeats):
        read.sum()
        started_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench_cold_parts.csv")
    given = parser.parse_args()
    from paddle_kv.devices import has_gpu

    device = ("gpu" if has_gpu() else "cpu") if given.device == "auto" else given.device
    cold, again = np.ones(READ_BYTES // 8), np.ones(0)
    rows = []
    print(f"{'us':40} {'cold':>8} {'again':>8}")
    for name, call in parts(device):
        call()
        figures = [median_us(call, given.repeats, read) for read in (cold, again)]
        rows.append([device, name, *(f"{figure:.2f}" for figure in figures)])
        print(f"{name:40} {figures[0]:8.1f} {figures[1]:8.1f}", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with open(given.out, "w", newline="") as file:
        csv.writer(file).writerows([["device", "part", "cold_us", "again_us"], *rows])


if __name__ == "__main__":
    main()
