"""How long the page-locked memory of a pool takes, on a GPU: python tools/bench_host_pool.py --gib 16

In turn: `HostPool`, and one `cudaHostAlloc` of as many bytes (by CuPy), each given back before the next. The first
round is not counted: a virtual machine may get its own memory then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which nothing is installed

import cupy

from paddle_kv import HostPool, KVCacheSpec

SPEC = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float16")


def pool_s(num_blocks: int) -> tuple[float, float]:
    """Seconds until a pool is there, and GB/s of a copy from it."""
    started = time.perf_counter()
    pool = HostPool(SPEC, num_blocks, layout="block_first")
    there_s = time.perf_counter() - started
    size_bytes = min(1 << 30, pool.pinned_bytes)
    rate = copy_rate(pool.pointer("key", 0), size_bytes)
    pool.close()
    return there_s, rate


def plain_s(size_bytes: int) -> tuple[float, float]:
    started = time.perf_counter()
    memory = cupy.cuda.PinnedMemory(size_bytes)
    there_s = time.perf_counter() - started
    return there_s, copy_rate(memory.ptr, min(1 << 30, size_bytes))


def copy_rate(address: int, size_bytes: int) -> float:
    target = cupy.empty(size_bytes, "uint8")
    rates = []
    for _ in range(3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        target.data.copy_from_host_async(address, size_bytes, cupy.cuda.Stream.null)
        end.record()
        end.synchronize()
        rates.append(size_bytes / cupy.cuda.get_elapsed_time(begin, end) / 1e6)
    return max(rates)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=int, default=16)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    block_bytes = SPEC.block_bytes * SPEC.num_layers
    num_blocks = (given.gib << 30) // block_bytes
    pools, plain = [], []
    for number in range(given.rounds + 1):
        pools.append(pool_s(num_blocks))
        plain.append(plain_s(num_blocks * block_bytes))
        print(f"round {number}: pool {pools[-1][0]:.2f} s, cudaHostAlloc {plain[-1][0]:.2f} s", flush=True)
    for name, rows in (("HostPool", pools[1:]), ("cudaHostAlloc", plain[1:])):
        seconds, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {given.gib} GiB | {seconds:.2f} s | copies at {rate:.1f} GB/s |")


if __name__ == "__main__":
    main()
