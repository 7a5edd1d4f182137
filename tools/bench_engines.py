"""Rates of transfers alone and beside matrix products in graphs, and how much the products are slowed.

python tools/bench_engines.py [--engines auto,kernel] [--sizes 4,8,16,32] [--loads gemm,gemv] [--csv FILE]

Without arguments: engine "auto" with blocks of 4 to 32 KiB, scattered on both sides in a pool in layer-first order,
contiguous on the host, and scattered in a pool in block-first order (lw_to_fc); about two minutes on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import cupy

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv.backend.work import ENGINES
from paddle_kv.bench.clock import CudaClock
from paddle_kv.bench.engines import COLUMNS, Row, both_ways, rows
from paddle_kv.bench.load import LOADS, ComputeLoad
from paddle_kv.bench.setup import make_case
from paddle_kv.cli.calibrate import write_csv
from paddle_kv.layout import KVCacheSpec
from paddle_kv.schedule.scheduler import LayerwiseScheduler

PIPELINE_BAR = 1.10  # of the load alone, and the time until the first layers are there


PIPELINE = KVCacheSpec(num_layers=32, num_kv_heads=1, head_dim=128, block_size=16, dtype="bfloat16")
PIPELINE_BYTES = 512 << 20


def saves_behind_layers(pattern: str, repeats: int) -> tuple[float, float]:
    """The same layers, each marked when it is computed, for as long as its share of a save takes: median milliseconds
    of the save alone, and of how long the last layer's end is behind its mark."""
    case = make_case(PIPELINE, pattern, "d2h", PIPELINE_BYTES // (32 * PIPELINE.block_bytes), pinned=True, seed=1)
    compute, busy = cupy.cuda.Stream(non_blocking=True), CudaClock()
    alone, behind = [], []
    with LayerwiseScheduler(
        case.device_cache, case.host_pool, compute_stream=compute, record_layer_times=True
    ) as scheduler:
        for _ in range(repeats + 1):
            save = scheduler.offload(case.device_ids, case.host_ids)
            save.wait(60.0)
            alone.append(save.elapsed_ms)
            save = scheduler.offload(case.device_ids, case.host_ids, layerwise=True)
            computed = cupy.cuda.Event()
            for layer in range(PIPELINE.num_layers):
                busy.occupy(compute, min(alone) / PIPELINE.num_layers)
                save.mark_layer_written(layer)
            computed.record(compute)
            save.wait(60.0)
            end_ms = cupy.cuda.runtime.eventElapsedTime(scheduler.origin_event, computed.ptr)
            behind.append(save.layer_times_ms[-1][1] - end_ms)
    case.close()
    return statistics.median(alone[1:]), statistics.median(behind[1:])


def pipeline(pattern: str, repeats: int) -> tuple[float, float, float, float]:
    """32 layers of 4 KiB blocks, each computed when it is there, for as long as its share of the load takes: median
    milliseconds of the load alone, of all layers, of the first layer's arrival, and what all layers may take."""
    spec = PIPELINE
    case = make_case(spec, pattern, "h2d", PIPELINE_BYTES // (32 * spec.block_bytes), pinned=True, seed=1)
    compute, busy = cupy.cuda.Stream(non_blocking=True), CudaClock()
    marks = [cupy.cuda.Event() for _ in range(3)]
    alone, whole, first = [], [], []
    with LayerwiseScheduler(case.device_cache, case.host_pool, compute_stream=compute) as scheduler:
        for _ in range(repeats + 1):
            load = scheduler.onload(case.host_ids, case.device_ids)
            load.wait(60.0)
            alone.append(load.elapsed_ms)
            marks[0].record(compute)
            load = scheduler.onload(case.host_ids, case.device_ids)
            for layer in range(spec.num_layers):
                load.wait_layer(layer)
                if layer == 0:
                    marks[1].record(compute)
                busy.occupy(compute, min(alone) / spec.num_layers)
            marks[2].record(compute)
            load.wait(60.0)
            compute.synchronize()
            whole.append(cupy.cuda.get_elapsed_time(marks[0], marks[2]))
            first.append(cupy.cuda.get_elapsed_time(marks[0], marks[1]))
    case.close()
    alone_ms, whole_ms, first_ms = (statistics.median(times[1:]) for times in (alone, whole, first))
    return alone_ms, whole_ms, first_ms, PIPELINE_BAR * alone_ms + first_ms


def summary(rows: list[Row]) -> list[str]:
    """A line for each case, as docs/performance.md has them: share of the link, and by how much the products are slower
    in the median, at least and at most."""
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["method"] != "contiguous" and row["way"] != "both":
            case = (row["pattern"], f"{row['piece_kib']} KiB", row["way"], row["method"])
            cases.setdefault(case, {})[row["load"]] = row
    loads = [load for load in LOADS if any(load in of for of in cases.values())]
    lines = [f"| host | block | way | engine | {' | '.join('alone' if load == 'none' else load for load in loads)} |"]
    lines.append("| --- " * (4 + len(loads)) + "|")
    for case, of in cases.items():
        cells = [f"{of[load]['of_link_percent']} %" + _slower(of[load]) for load in loads]
        lines.append(f"| {' | '.join([*case, *cells])} |")
    return lines


def _slower(row: Row) -> str:
    if "slowed_percent" not in row:
        return ""
    spread = f" ({row['slowed_least']:+.1f} to {row['slowed_most']:+.1f})" if "slowed_least" in row else ""
    return f", {row['slowed_percent']:+.1f} %{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default="auto", help=f"some of {', '.join(ENGINES)}")
    parser.add_argument("--sizes", default="4,8,16,32", help="KiB of a block of one tensor of one layer")
    parser.add_argument("--loads", default=",".join(LOADS[1:]), help="none: without a load alone")
    parser.add_argument("--patterns", default="scattered,contiguous_host,lw_to_fc")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="also the plain alternatives")
    parser.add_argument("--both", action="store_true", help="also both directions at once, at the largest size")
    parser.add_argument(
        "--pipeline", action="store_true", help="also layers that are computed while the next ones come"
    )
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    sizes, engines = [int(size) for size in given.sizes.split(",")], given.engines.split(",")
    loads = {name: ComputeLoad(name) for name in given.loads.split(",") if name != "none"}
    print(f"# {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
    print(" | ".join(COLUMNS))
    done = []
    for row in rows(sizes, given.patterns.split(","), engines, loads, repeats=given.repeats, plain=given.plain):
        done.append(row)
        print(" | ".join(str(row.get(column, "")) for column in COLUMNS), flush=True)
    print("\n".join(summary(done)))
    for load in loads:
        of_link = [row for row in done if row["load"] == load and "contiguous_gbps" in row]
        for way in sorted({row["way"] for row in of_link}):
            gbps, slowed = (
                statistics.median(row[column] for row in of_link if row["way"] == way)
                for column in ("contiguous_gbps", "contiguous_slowed_percent")
            )
            print(f"contiguous copies, {way}, beside {load}: {gbps:.1f} GB/s, products slower by {slowed:+.1f} %")
    for engine in engines if given.both else ():
        link, gbps = both_ways(max(sizes) << 10, engine, given.repeats)
        common = {"piece_kib": max(sizes), "pattern": "scattered", "way": "both", "load": "none", "method": engine}
        done.append({**common, "gbps": round(gbps, 1), "of_link_percent": round(100 * gbps / link)})
        print(" | ".join(str(done[-1].get(column, "")) for column in COLUMNS), flush=True)
    for pattern in given.patterns.split(",") if given.pipeline else ():
        alone_ms, whole_ms, first_ms, bar_ms = pipeline(pattern, given.repeats)
        print(
            f"pipeline of 32 layers, {pattern}: load alone {alone_ms:.2f} ms, with as much to compute {whole_ms:.2f} "
            f"({whole_ms / alone_ms:.2f} times; aim: {bar_ms:.2f} ms), the first layer after {first_ms:.2f} ms"
        )
        alone_ms, behind_ms = saves_behind_layers(pattern, given.repeats)
        print(f"saves of {pattern}: alone {alone_ms:.2f} ms; layer by layer {behind_ms:.2f} ms behind the last layer")
    if given.csv:
        write_csv(done, given.csv)


if __name__ == "__main__":
    main()
