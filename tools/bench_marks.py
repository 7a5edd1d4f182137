"""Measures what layerwise saves cost the thread that runs the model: marks that submit their layers, and marks that
leave that to sections, in turn, beside the same launches without a save.

    python tools/bench_marks.py [--layers 32,80] [--blocks 1,256] [--launches 0,10,40] [--repeats 25] [--out FOLDER]

The model is so many small launches a layer on one stream (each sets 4 KiB). Microseconds on the host's clock, medians
of the repeats: one mark, the loop over all layers, and the loop with the wait for the save. ``--out`` gets
bench_marks.csv and bench_marks.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WAYS = ("no save", "sections", "marks")
SET_BYTES = 4096


@dataclass
class Result:
    gpu: str
    num_layers: int
    num_blocks: int
    launches_a_layer: int
    way: str
    mark_us: float
    mark_p90_us: float
    loop_us: float
    loop_and_wait_us: float


def measure(layers: int, blocks: int, all_launches: list[int], repeats: int) -> Iterator[Result]:
    import cupy
    from cupy.cuda import runtime

    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
    from paddle_kv.backend.cupy_backend import CupyBackend, device_name

    class BySections(CupyBackend):
        submit_by_marks: Any = None

    spec = KVCacheSpec(num_layers=layers, num_kv_heads=1, head_dim=128, block_size=16, dtype="bfloat16")
    cache, pool = DeviceCache(spec, blocks, "gpu"), HostPool(spec, blocks)
    stream, target = cupy.cuda.Stream(non_blocking=True), cupy.zeros(SET_BYTES, cupy.uint8)
    ids = list(range(blocks))
    schedulers: dict[str, LayerwiseScheduler] = {
        way: LayerwiseScheduler(cache, pool, compute_stream=stream, backend=kind(0))
        for way, kind in (("sections", BySections), ("marks", CupyBackend))
    }

    def run(way: str, launches: int) -> tuple[list[float], float, float]:
        marks_s = []
        scheduler = schedulers.get(way)
        save = None if scheduler is None else scheduler.offload(ids, ids, layerwise=True)
        begun_s = time.perf_counter()
        for layer in range(layers):
            for _ in range(launches):
                runtime.memsetAsync(target.data.ptr, 1, SET_BYTES, stream.ptr)
            if save is not None:
                mark_s = time.perf_counter()
                save.mark_layer_written(layer)
                marks_s.append(time.perf_counter() - mark_s)
        loop_s = time.perf_counter() - begun_s
        if save is not None:
            save.wait(timeout_s=60)
        both_s = time.perf_counter() - begun_s
        stream.synchronize()
        return marks_s, loop_s, both_s

    for launches in all_launches:
        for way in WAYS:
            run(way, launches)  # what is done once
        runs = {way: [] for way in WAYS}  # type: dict[str, list[tuple[list[float], float, float]]]
        for _ in range(repeats):
            for way in WAYS:
                runs[way].append(run(way, launches))
        for way, found in runs.items():
            marks_us = sorted(1e6 * mark_s for marks_s, _, _ in found for mark_s in marks_s) or [0.0]
            loop_us, both_us = (1e6 * statistics.median(one[position] for one in found) for position in (1, 2))
            values = (statistics.median(marks_us), marks_us[len(marks_us) * 9 // 10], loop_us, both_us)
            yield Result(device_name(0), layers, blocks, launches, way, *(round(value, 1) for value in values))
    for scheduler in schedulers.values():
        scheduler.close()
    pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", "32,80"), ("blocks", "1,256"), ("launches", "0,10,40")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    layers, blocks, launches = (
        list(map(int, getattr(given, name).split(","))) for name in ("layers", "blocks", "launches")
    )
    results = []
    for layer_count in layers:
        for block_count in blocks:
            for result in measure(layer_count, block_count, launches, given.repeats):
                results.append(result)
                print(*asdict(result).values(), sep="\t", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        rows = [asdict(result) for result in results]
        with (given.out / "bench_marks.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (given.out / "bench_marks.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
