"""Blocks out of the host memory of another process, beside a copy of the same bytes and a folder:
python tools/bench_neighbours.py FOLDER

A process lends so many blocks; this one loads them by a tier, whole and layer by layer, and again when the lender's
headers have been made. In the same rounds: the same bytes copied by NumPy in one thread out of the same memory, that
copy with the checksums behind it, and a tier in files inside FOLDER. Medians of the rounds behind the first one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import HostPool
from paddle_kv.bench.tiers import HEADER_BYTES, Watch, frozen, spec_of
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.tiers import FilesEngine, Job, Tier
from paddle_kv.tiers.checksum import checksums
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine

WAIT_S = 120.0


def keys_of(num_blocks: int) -> list[bytes]:
    return [b"block %d" % number for number in range(num_blocks)]


def lend(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    """The other process. Half of its pool at most can be read at a time."""
    pool = HostPool(spec_of(block_bytes), 2 * num_blocks, layout="block_first", shared=True)
    rows = block_rows(pool)[:num_blocks]
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    with Lender(pool, model=b"bench") as lender:
        pipe.send((lender.path, pool.export()))
        while pipe.recv():
            lender.lend(keys_of(num_blocks), range(num_blocks))  # anew: without headers
            pipe.send(None)


def load(tier: Tier, num_blocks: int, layerwise: bool) -> float | None:
    """The share of the time after which layer 0 was usable."""
    watch = Watch()
    job = Job(keys_of(num_blocks), range(num_blocks), timeout_s=WAIT_S, layerwise=layerwise, observer=watch)
    start_s = time.perf_counter()
    tier.load([job])
    watch.end.wait(WAIT_S)
    end_s = time.perf_counter()
    if not job.done:
        raise SystemExit(f"not all blocks came: {set(job.outcomes)}")
    return (watch.first_s - start_s) / (end_s - start_s) if layerwise else None


def rounds(
    folder: str, num_blocks: int, block_bytes: int, count: int
) -> Iterator[tuple[str, float, float, float | None]]:
    """What, MiB/s, seconds of this process's processors for a GiB, and the share until layer 0."""
    pipe, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=lend, args=(there, num_blocks, block_bytes), daemon=True
    )
    other.start()
    path, exported = pipe.recv()
    spec = spec_of(block_bytes)
    pool = HostPool(spec, num_blocks, layout="block_first")
    rows, theirs = block_rows(pool), block_rows(HostPool.attach(spec, exported))[:num_blocks]
    size = num_blocks * (block_bytes + HEADER_BYTES)
    step = spec.block_bytes

    def copy() -> None:
        for target, source in zip(rows, theirs, strict=True):
            np.copyto(target, source)

    def copy_and_check() -> None:
        for target, source in zip(rows, theirs, strict=True):
            np.copyto(target, source)
            checksums([(memoryview(target), step)])

    with (
        NeighbourEngine([path]) as neighbours,
        FilesEngine({folder: size}) as files,
        Tier(neighbours, pool, model=b"bench", max_objects=num_blocks) as near,
        Tier(files, pool, model=b"bench", max_objects=num_blocks, max_store_bytes=2 * size) as below,
    ):
        copy()
        below.store([Job(keys_of(num_blocks), range(num_blocks), timeout_s=WAIT_S)])
        below.drain(WAIT_S)
        ways: list[tuple[str, Callable[[], Any]]] = [
            ("copy by NumPy, one thread", copy),
            ("the same with its checksums", copy_and_check),
            ("neighbour, lent a moment ago", lambda: load(near, num_blocks, False)),
            ("neighbour, read before", lambda: load(near, num_blocks, False)),
            ("neighbour, layer by layer", lambda: load(near, num_blocks, True)),
            ("files", lambda: load(below, num_blocks, False)),
            ("files, layer by layer", lambda: load(below, num_blocks, True)),
        ]
        for number in range(count + 1):
            pipe.send(True)
            pipe.recv()
            end_s = time.monotonic() + WAIT_S
            while not all(near.exists(keys_of(num_blocks))) and time.monotonic() < end_s:
                time.sleep(0.001)
            time.sleep(0.05)  # it has been told of all
            for what, run in ways:
                rows[:] = 0
                cpu_s, start_s = time.process_time(), time.perf_counter()
                first = run()
                took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
                if not np.array_equal(rows, theirs):
                    raise SystemExit(f"{what}: wrong bytes")
                if number:
                    total = num_blocks * block_bytes
                    yield what, total / 2**20 / took_s, cpu_s / (total / 2**30), first
    pipe.send(False)
    other.join(WAIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float, float | None]]] = {}
    with frozen(), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for what, *result in rounds(folder, given.blocks, given.block_bytes, given.rounds):
            found.setdefault(what, []).append(tuple(result))  # type: ignore[arg-type]
    print(f"{given.blocks} blocks of {given.block_bytes} bytes, {given.rounds} rounds")
    print(f"{'':30} {'MiB/s':>8} {'s of processor for a GiB':>26} {'layer 0 after':>14}")
    for what, results in found.items():
        rate, cpu_s = (statistics.median(one[i] or 0.0 for one in results) for i in (0, 1))
        firsts = [one[2] for one in results if one[2] is not None]
        told = f"{100 * statistics.median(firsts):.0f} %" if firsts else "-"
        print(f"{what:30} {rate:8.0f} {cpu_s:26.2f} {told:>14}")


if __name__ == "__main__":
    main()
