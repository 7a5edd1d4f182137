"""Measures gather_topk_rows on a GPU, against copies of as many bytes and against a plain gather of resident rows.

    python tools/bench_topk_rows.py [--out DIRECTORY] [--repeats 15]

Rows of picked tokens for a batch of requests, of which a given share is resident: the sizes of DeepSeek's sparse MLA,
k = 2,048 and rows of 1,152 bytes (656 as fp8_ds_mla). The bytes that have to move come first, and what they take at
the rates of plain copies in the same run: misses cross the link (cudaMemcpyAsync from page-locked memory) and are
written twice, the others are read and written (a copy inside the device). Lists change with each call, so that the
wanted share misses; how many did is counted, and the rows of the last call are compared with the host's.

Figures are medians of single calls in device time behind an evicted L2 cache (paddle_kv/bench/clock.py); "in a graph"
are graphs of 20 calls, per call, with a warm cache.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

K, SLOTS, BLOCK_SIZE, MAX_TOKENS = 2048, 4096, 64, 65536
HOST_BYTES = 512 << 20
CALLS_IN_A_GRAPH = 20
HIT_SHARES = (0.0, 0.5, 0.9, 0.98, 1.0)
LEAST_OF_LINK, MOST_US_OVER_GATHER = 0.8, 10.0  # what it is held to


@dataclass
class Result:
    batch: int
    row_bytes: int
    hits_percent: int
    method: str
    missed_rows: int
    link_bytes: int
    device_bytes: int
    floor_us: float  # the bytes at the rates of the plain copies
    median_us: float
    spread_us: float  # from the 10th to the 90th percentile
    host_us: float | None
    of_floor: float
    over_gather_us: float | None = None
    correct: bool | None = None


class Bench:
    """The memory of one batch size and row size, and the rates of plain copies."""

    def __init__(self, batch: int, row_bytes: int, repeats: int, host: np.ndarray) -> None:
        import cupy

        from paddle_kv import ResidentRows
        from paddle_kv.bench.clock import CudaClock

        self.cupy, self.batch, self.row_bytes, self.repeats = cupy, batch, row_bytes, repeats
        self.clock = CudaClock()
        self.stream = self.clock.stream
        self.width = row_bytes // 2
        self.random = np.random.default_rng(batch + row_bytes)
        self.host = host
        self.host_blocks = host.size // (BLOCK_SIZE * row_bytes)
        blocks = MAX_TOKENS // BLOCK_SIZE
        self.table = self.random.integers(0, self.host_blocks, (batch, blocks)).astype(np.int32)
        self.rows = ResidentRows(batch, K, SLOTS, row_elements=self.width, dtype="bfloat16", max_tokens=MAX_TOKENS)
        self.table_there, self.out = on_device(self.table), on_device(np.zeros((batch, K, self.width), np.uint16))
        self.total_bytes = batch * K * row_bytes
        self.link_us, self.device_us = self.copy(host.ctypes.data), self.copy(self.rows.resident.data_ptr())

    def copy(self, source: int) -> Any:
        """One contiguous copy of all rows."""
        runtime, target = self.cupy.cuda.runtime, self.out.data_ptr()
        return self.measure(
            [lambda: runtime.memcpyAsync(target, source, self.total_bytes, runtime.memcpyDefault, self.stream.ptr)]
        )

    def measure(self, calls: list[Callable[[], Any]]) -> Any:
        from paddle_kv.bench.clock import measure

        self.cupy.cuda.runtime.deviceSynchronize()  # Paddle filled the tensors on another stream
        turns = itertools.cycle(calls)
        return measure(self.clock, lambda: next(turns)(), warmups=len(calls) + 2, repeats=self.repeats)

    def graph(self, calls: list[Callable[[], Any]]) -> Any:
        """Per call of a graph that has each of them."""
        self.cupy.cuda.runtime.deviceSynchronize()
        for call in calls:
            call()
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            for call in calls:
                call()
            graph = self.stream.end_capture()
        return self.measure([lambda: graph.launch(self.stream)])

    def gather(self, ids: Any) -> Callable[[], Any]:
        where = (self.host.ctypes.data, self.host_blocks, BLOCK_SIZE * self.row_bytes, BLOCK_SIZE)
        return lambda: self.rows.gather(ids, self.table_there, *where, out=self.out, stream=self.stream)

    def lists(self, hits: float) -> list[np.ndarray]:
        """So many lists that what one of them misses has lost its slot when it comes again."""
        kept = round(hits * K)
        missed = K - kept
        count = 1 if missed == 0 else -(-(SLOTS - kept) // missed) + 2
        picked = [self.random.permutation(MAX_TOKENS)[: kept + count * missed] for _ in range(self.batch)]
        tokens = np.array(picked, np.int32)
        lists = []
        for i in range(count):
            parts = tokens[:, :kept], tokens[:, kept + i * missed : kept + (i + 1) * missed]
            lists.append(np.ascontiguousarray(self.random.permuted(np.concatenate(parts, axis=1), axis=1)))
        return lists

    def expected(self, ids: np.ndarray) -> np.ndarray:
        used = self.host_blocks * BLOCK_SIZE
        rows = self.host[: used * self.row_bytes].reshape(used, self.row_bytes)
        blocks = np.take_along_axis(self.table, ids // BLOCK_SIZE, axis=1).astype(np.int64)
        return rows[blocks * BLOCK_SIZE + ids % BLOCK_SIZE]

    def result(self, hits: float, method: str, timing: Any, missed: int, *, calls: int = 1) -> Result:
        link_bytes = missed * self.row_bytes
        device_bytes = self.total_bytes * (1 if method == "copy from the host" else 2)
        share = link_bytes / self.total_bytes
        floor_us = max(share * self.link_us.median_ms, self.device_us.median_ms) * 1e3
        median_us = timing.median_ms * 1e3 / calls
        spread_us = (timing.p90_ms - timing.p10_ms) * 1e3 / calls
        host_us = timing.host_us if calls == 1 else None
        return Result(self.batch, self.row_bytes, round(100 * hits), method, missed, link_bytes, device_bytes,
                      floor_us, median_us, spread_us, host_us, floor_us / median_us)  # fmt: skip


def on_device(array: np.ndarray) -> Any:
    """uint16 is bfloat16 to Paddle."""
    import paddle

    from paddle_kv import devices

    return paddle.to_tensor(array, place=devices.place_of(0))


def with_misses(bench: Bench, hits: float) -> Result:
    lists = bench.lists(hits)
    ids = [on_device(each) for each in lists]
    calls = [bench.gather(each) for each in ids]
    timing = bench.measure(calls)
    for call in calls[:-1]:
        call()
    bench.stream.synchronize()
    before = bench.rows.token_of_slot.numpy()
    calls[-1]()
    bench.stream.synchronize()
    missed = np.count_nonzero(before != bench.rows.token_of_slot.numpy())  # each has taken a slot
    result = bench.result(hits, "gather_topk_rows", timing, missed)
    found = np.ascontiguousarray(bench.out.numpy()).view(np.uint8)
    wanted_misses = bench.batch * (K - round(hits * K))
    result.correct = bool(np.array_equal(found, bench.expected(lists[-1]))) and result.missed_rows == wanted_misses
    return result


def plain_gathers(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Of resident rows whose slots are known: gather_cache with blocks of one token, and CuPy's take."""
    from paddle_kv import ops

    cupy, batch = bench.cupy, bench.batch
    slots = np.array([b * SLOTS + bench.random.permutation(SLOTS)[:K] for b in range(batch)])
    cache = on_device(np.zeros((batch * SLOTS, 1, bench.width), np.uint16))
    table, lengths = on_device(slots.astype(np.int32)), on_device(np.arange(batch + 1, dtype=np.int32) * K)
    out = on_device(np.zeros((batch * K, bench.width), np.uint16))
    yield "gather_cache", lambda: ops.gather_cache(cache, table, lengths, out=out, stream=bench.stream)
    rows, flat = cupy.zeros((batch * SLOTS, bench.width), cupy.uint16), cupy.asarray(slots.ravel())
    target = cupy.empty((batch * K, bench.width), cupy.uint16)

    def take() -> None:
        with bench.stream:
            cupy.take(rows, flat, axis=0, out=target)

    yield "cupy.take", take


def all_hits(bench: Bench) -> Iterator[Result]:
    """Beside plain gathers, by themselves and in a graph."""
    plain: dict[str, Result] = {}
    for method, call in plain_gathers(bench):
        plain[method] = bench.result(1.0, method, bench.measure([call]), 0)
        yield plain[method]
        if method == "gather_cache":
            timing = bench.graph([call] * CALLS_IN_A_GRAPH)
            name = f"{method}, in a graph"
            plain[name] = bench.result(1.0, name, timing, 0, calls=CALLS_IN_A_GRAPH)
            yield plain[name]
    ours = with_misses(bench, 1.0)
    ours.over_gather_us = ours.median_us - plain["gather_cache"].median_us
    yield ours
    call = bench.gather(on_device(bench.lists(1.0)[0]))
    timing = bench.graph([call] * CALLS_IN_A_GRAPH)
    in_graph = bench.result(1.0, "gather_topk_rows, in a graph", timing, 0, calls=CALLS_IN_A_GRAPH)
    in_graph.over_gather_us = in_graph.median_us - plain["gather_cache, in a graph"].median_us
    yield in_graph


def all_cases(repeats: int, host: np.ndarray) -> Iterator[Result]:
    for batch, row_bytes in ((16, 1152), (16, 656), (1, 1152)):
        bench = Bench(batch, row_bytes, repeats, host)
        for name, timing, missed in (
            ("copy from the host", bench.link_us, batch * K),
            ("copy inside", bench.device_us, 0),
        ):
            yield bench.result(0.0 if missed else 1.0, name, timing, missed)
        for hits in HIT_SHARES[:-1]:
            yield with_misses(bench, hits)
        yield from all_hits(bench)


def bars(results: list[Result]) -> dict[str, Any]:
    """What the operator is held to, at 16 requests and rows of 1,152 bytes."""
    main = [r for r in results if (r.batch, r.row_bytes) == (16, 1152)]
    copy_us = next(r.median_us for r in main if r.method == "copy from the host")
    misses_us = next(r.median_us for r in main if r.method == "gather_topk_rows" and r.hits_percent == 0)
    over = {r.method: r.over_gather_us for r in main if r.over_gather_us is not None}
    return {
        "misses, of the link": round(copy_us / misses_us, 3),
        "misses, at least": LEAST_OF_LINK,
        "all hits, us over gather_cache": {name: round(us, 2) for name, us in over.items()},
        "all hits, at most": MOST_US_OVER_GATHER,
        "reached": bool(copy_us / misses_us >= LEAST_OF_LINK and max(over.values()) <= MOST_US_OVER_GATHER),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench_topk_rows.csv and .json")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    from paddle_kv import devices

    if not devices.has_gpu():
        sys.exit("bench_topk_rows: this Paddle sees no GPU")
    import cupy

    from paddle_kv import ops

    pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(HOST_BYTES), 0)
    host = np.frombuffer(pinned, np.uint8, HOST_BYTES)
    host.view(np.uint64)[:] = np.random.default_rng(0).integers(0, 2**64, HOST_BYTES // 8, np.uint64)
    results = []
    row = "{:>5} {:>9} {:>6} {:28} {:>8} {:>10} {:>10} {:>9} {:>9} {:>7} {:>8} {:>9} {:>11} {:>8}"
    print(row.format("batch", "row bytes", "hits %", "method", "misses", "link MB", "device MB", "floor us",
                     "median us", "+-", "host us", "of floor", "over gather", "correct"))  # fmt: skip
    for result in all_cases(given.repeats, host):
        results.append(result)
        over = "" if result.over_gather_us is None else f"{result.over_gather_us:+.2f}"
        host_us = "" if result.host_us is None else f"{result.host_us:.0f}"
        correct = "" if result.correct is None else "yes" if result.correct else "NO"
        print(row.format(result.batch, result.row_bytes, result.hits_percent, result.method, result.missed_rows,
                         f"{result.link_bytes / 1e6:.2f}", f"{result.device_bytes / 1e6:.2f}", f"{result.floor_us:.2f}",
                         f"{result.median_us:.2f}", f"{result.spread_us:.2f}", host_us, f"{result.of_floor:.2f}",
                         over, correct), flush=True)  # fmt: skip
    reached = bars(results)
    print(json.dumps(reached))

    given.out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    with open(given.out / "bench_topk_rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    about = {"gpu": properties["name"].decode(), "build": ops.build_info(), "repeats": given.repeats,
             "k": K, "slots": SLOTS, "block_size": BLOCK_SIZE, "max_tokens": MAX_TOKENS}  # fmt: skip
    written = {"about": about, "bars": reached, "results": rows}
    (given.out / "bench_topk_rows.json").write_text(json.dumps(written, indent=1, default=int))
    return 0 if all(result.correct is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
