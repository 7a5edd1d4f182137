"""Rate of each transfer engine alone, beside matrix products, and how much the products are slowed.

    python tools/bench_engines.py [--engines auto,copy_engine,...] [--sizes 4,16,32,128] [--loads none,gemm,gemv]

Through LayerwiseScheduler, with the times of its own events: 16 layers, K and V. Beside a load the rate counts the
layers that were copied while the load ran. The link is one contiguous copy of the same bytes in the same run; the plain
alternatives are one cudaMemcpyAsync a block, and a kernel with one warp a block and 8-byte words over a full grid.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import paddle_kv
from paddle_kv import KVCacheSpec, LayerwiseScheduler, Transfer
from paddle_kv.bench import methods
from paddle_kv.bench.clock import CudaClock, measure
from paddle_kv.bench.load import ComputeLoad, beside
from paddle_kv.bench.setup import Case, make_case

LAYERS, HEAD_DIM, ITEM_BYTES = 16, 128, 2
TARGET_BYTES = 512 << 20
WAIT_S = 60.0
PATTERNS = ("scattered", "contiguous_host")
COLUMNS = (
    "piece_kib",
    "pattern",
    "way",
    "load",
    "method",
    "gbps",
    "of_link_percent",
    "slowed_percent",
    "noise_percent",
)


def spec_of(piece_bytes: int) -> KVCacheSpec:
    tokens = piece_bytes // (HEAD_DIM * ITEM_BYTES)
    return KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=HEAD_DIM, block_size=tokens, dtype="bfloat16")


class Measured:
    """One case on one scheduler per engine; the same ids, bytes checked once per engine."""

    def __init__(self, piece_bytes: int, pattern: str, loads: dict[str, ComputeLoad]) -> None:
        self.piece_bytes, self.pattern, self.loads = piece_bytes, pattern, loads
        spec = spec_of(piece_bytes)
        blocks = TARGET_BYTES // (spec.block_bytes * LAYERS)
        self.case: Case = make_case(spec, pattern, "h2d", blocks, pinned=True, seed=1)  # type: ignore[arg-type]
        self.bytes = self.case.total_bytes

    def submit(self, scheduler: LayerwiseScheduler, way: str) -> Transfer:
        if way == "h2d":
            return scheduler.onload(self.case.host_ids, self.case.device_ids)
        return scheduler.offload(self.case.device_ids, self.case.host_ids)

    def check(self, scheduler: LayerwiseScheduler) -> None:
        """Saved, wiped, loaded elsewhere and back: the bytes of every block."""
        cache, pool = self.case.device_cache, self.case.host_pool
        assert cache is not None and pool is not None
        random = np.random.default_rng(3)
        held = np.asarray(sorted(self.case.host_ids))
        for layer in (0, LAYERS - 1):
            for name in cache.spec.tensor_names:
                for host_id in held[:: max(1, len(held) // 64)]:
                    view = pool.view(name, layer, int(host_id)).view(np.uint8)
                    view[...] = random.integers(0, 256, view.shape, np.uint8)
        before = self._sample()
        scheduler.onload(self.case.host_ids, self.case.device_ids).wait(WAIT_S)
        for view in self._views():
            view[...] = 0
        scheduler.offload(self.case.device_ids, self.case.host_ids).wait(WAIT_S)
        for got, want in zip(self._sample(), before, strict=True):
            np.testing.assert_array_equal(got, want)

    def _views(self) -> list[np.ndarray]:
        pool = self.case.host_pool
        assert pool is not None
        held = sorted(self.case.host_ids)
        return [
            pool.view(name, layer, host_id).view(np.uint8)
            for layer in (0, LAYERS - 1)
            for name in pool.spec.tensor_names
            for host_id in held[:: max(1, len(held) // 64)]
        ]

    def _sample(self) -> list[np.ndarray]:
        return [view.copy() for view in self._views()]

    def alone(self, scheduler: LayerwiseScheduler, way: str, repeats: int) -> tuple[float, float]:
        times = []
        for _ in range(repeats + 1):
            transfer = self.submit(scheduler, way)
            transfer.wait(WAIT_S)
            times.append(transfer.elapsed_ms)
        times = sorted(times[1:])
        noise = 50 * (times[-1] - times[0]) / times[len(times) // 2]
        return self.bytes / statistics.median(times) / 1e6, noise

    def both(self, scheduler: LayerwiseScheduler, other: Measured, repeats: int) -> float:
        rates = []
        for _ in range(repeats + 1):
            transfers = [self.submit(scheduler, "h2d"), other.submit(scheduler, "d2h")]
            for transfer in transfers:
                transfer.wait(WAIT_S)
            times = [transfer.layer_times_ms for transfer in transfers]
            first = max(each[0][0] for each in times)
            last = min(each[-1][1] for each in times)
            done = sum(1 for each in times for begin, end in each if begin >= first and end <= last)
            rates.append(done * self.bytes / LAYERS / (last - first) / 1e6)
        return statistics.median(rates[1:])

    def beside(self, scheduler: LayerwiseScheduler, way: str, name: str, repeats: int) -> tuple[float, float]:
        """(GB/s while the load ran, percent by which the load was slowed)."""
        load = self.loads[name]
        rates, slowed = [], []
        past = self.submit(scheduler, way)
        past.wait(WAIT_S)
        for _ in range(repeats):
            alone_ms = load.alone_ms()
            count = max(2, round(2.5 * alone_ms * 55e6 / self.bytes))
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            # As a model does: it waits for layers, on a stream that is busy.
            begin.record(load.stream)
            transfers = [self.submit(scheduler, way) for _ in range(count)]
            load.start()
            past.wait_layer(0, stream=load.stream)
            load_ms = load.wait_ms()
            end.record(load.stream)
            for transfer in transfers:
                transfer.wait(WAIT_S)
            origin = scheduler.origin_event
            elapsed = cupy.cuda.runtime.eventElapsedTime
            started, ended = (elapsed(origin, event.ptr) for event in (load._start, load._end))
            times = list(itertools.chain.from_iterable(transfer.layer_times_ms for transfer in transfers))
            inside = [(b, e) for b, e in times if b >= started and e <= ended]
            if times[-1][1] < ended:
                print(f"# the transfers were over before the load ({name})", file=sys.stderr)
            if inside:
                rates.append(len(inside) * self.bytes / LAYERS / (inside[-1][1] - inside[0][0]) / 1e6)
            else:
                rates.append(0.0)
            slowed.append(100 * (load_ms / alone_ms - 1))
        return statistics.median(rates), statistics.median(slowed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default="auto,copy_engine,kernel,staging")
    parser.add_argument("--sizes", default="4,16,32,128")
    parser.add_argument("--loads", default="none,gemm,gemv")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="also the plain alternatives")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    loads = {name: ComputeLoad(name) for name in given.loads.split(",") if name != "none"}  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        print(" | ".join(f"{row.get(column, ''):>{8}}" for column in COLUMNS), flush=True)

    print(f"# paddle_kv {paddle_kv.__version__}, {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
    print(" | ".join(COLUMNS))
    clock = CudaClock()
    for pattern, size in itertools.product(given.patterns.split(","), map(int, given.sizes.split(","))):
        measured = Measured(size << 10, pattern, loads)
        link = {}
        for way in ("h2d", "d2h"):
            enqueue = methods.contiguous(measured.case, way, clock.stream)
            timing = measure(clock, enqueue, warmups=1, repeats=given.repeats)
            link[way] = measured.bytes / timing.median_ms / 1e6
            common = {"piece_kib": size, "pattern": pattern, "way": way}
            add(**common, load="none", method="contiguous", gbps=f"{link[way]:.1f}", of_link_percent=100)
            if not given.plain:
                continue
            for name in ("memcpy_loop", "full_grid_warps"):
                plain = methods.METHODS[name](measured.case, way, clock.stream)
                assert plain is not None
                timing = measure(clock, plain, warmups=1, repeats=3)
                rate = measured.bytes / timing.median_ms / 1e6
                add(
                    **common,
                    load="none",
                    method=name,
                    gbps=f"{rate:.1f}",
                    of_link_percent=f"{100 * rate / link[way]:.0f}",
                )
                for load_name, load in loads.items():
                    ms, slowed = beside(load, plain, clock.stream, timing.median_ms)
                    rate = measured.bytes / ms / 1e6
                    add(
                        **common,
                        load=load_name,
                        method=name,
                        gbps=f"{rate:.1f}",
                        of_link_percent=f"{100 * rate / link[way]:.0f}",
                        slowed_percent=f"{slowed:.1f}",
                    )
        for engine in given.engines.split(","):
            cache, pool = measured.case.device_cache, measured.case.host_pool
            assert cache is not None and pool is not None
            with LayerwiseScheduler(
                cache, pool, engine=engine, record_layer_times=True, compute_stream=cupy.cuda.Stream(non_blocking=True)
            ) as scheduler:
                measured.check(scheduler)
                for way in ("h2d", "d2h"):
                    common = {"piece_kib": size, "pattern": pattern, "way": way, "method": engine}
                    if "none" in given.loads:
                        rate, noise = measured.alone(scheduler, way, given.repeats)
                        percent = 100 * rate / link[way]
                        add(
                            **common,
                            load="none",
                            gbps=f"{rate:.1f}",
                            of_link_percent=f"{percent:.0f}",
                            noise_percent=f"{noise:.0f}",
                        )
                    for name in loads:
                        rate, slowed = measured.beside(scheduler, way, name, given.repeats)
                        percent = 100 * rate / link[way]
                        add(
                            **common,
                            load=name,
                            gbps=f"{rate:.1f}",
                            of_link_percent=f"{percent:.0f}",
                            slowed_percent=f"{slowed:.1f}",
                        )
        measured.case.close()
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
