"""Rate of each transfer engine alone, beside matrix products, and how much the products are slowed.

python tools/bench_engines.py [--engines auto,kernel] [--sizes 4,16,32,128] [--loads gemm,gemv] [--csv FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cupy

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv.backend.work import ENGINES
from paddle_kv.bench.engines import COLUMNS, both_ways, rows
from paddle_kv.bench.load import LOADS, ComputeLoad
from paddle_kv.cli.calibrate import write_csv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--sizes", default="4,16,32,128", help="KiB of a block of one tensor of one layer")
    parser.add_argument("--loads", default=",".join(LOADS[1:]), help="none: without a load alone")
    parser.add_argument("--patterns", default="scattered,contiguous_host")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="also the plain alternatives")
    parser.add_argument("--both", action="store_true", help="also both directions at once, at the largest size")
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
    for engine in engines if given.both else ():
        link, gbps = both_ways(max(sizes) << 10, engine, given.repeats)
        common = {"piece_kib": max(sizes), "pattern": "scattered", "way": "both", "load": "none", "method": engine}
        done.append({**common, "gbps": round(gbps, 1), "of_link_percent": round(100 * gbps / link)})
        print(" | ".join(str(done[-1].get(column, "")) for column in COLUMNS), flush=True)
    if given.csv:
        write_csv(done, given.csv)


if __name__ == "__main__":
    main()
