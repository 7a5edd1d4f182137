"""Runs cases of `paddle-kv bench` under Nsight Compute and says how well each kernel uses the memory.

    python tools/profile_kernels.py --op copy_blocks --tokens 16 --blocks 256 --layers 4
    python tools/profile_kernels.py --csv out.csv --json out.json --direction d2d
    python tools/profile_kernels.py --read recorded.csv

All other arguments go to `paddle-kv bench`. --read takes what `ncu --csv --page raw --print-units base` wrote, with the
metrics that --metrics prints. Only kernels of paddle_kv are profiled; each launch is measured with cold caches, and
launches of one kernel are shown as their median. docs/profiling.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Metrics of Nsight Compute. Sectors are the 32-byte parts of memory that the accesses of a kernel touch; ideal are as
# many as the bytes asked for fill.
DURATION_NS = "gpu__time_duration.sum"
DRAM_BYTES_PER_S = "dram__bytes.sum.per_second"
DRAM_PERCENT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2_HIT_PERCENT = "lts__t_sector_hit_rate.pct"
WARP_PERCENT = "smsp__thread_inst_executed_per_inst_executed.pct"
SECTORS = "memory_l2_theoretical_sectors_global"
IDEAL_SECTORS = "memory_l2_theoretical_sectors_global_ideal"
METRICS = (DURATION_NS, DRAM_BYTES_PER_S, DRAM_PERCENT, L2_HIT_PERCENT, WARP_PERCENT)
SECTION = "SourceCounters"  # the only way to the sectors
NO_PERMISSION = "ERR_NVGPUCTRPERM"


class ProfileError(RuntimeError):
    """What kept the kernels from being profiled, in one line."""


@dataclass(frozen=True)
class Kernel:
    """The launches of one kernel: how many, and the median of each figure."""

    kernel: str
    launches: int
    duration_us: float
    dram_gbps: float
    percent_of_dram_peak: float
    l2_hit_percent: float
    warp_efficiency_percent: float
    excess_sectors_percent: float


def read_ncu(text: str) -> list[Kernel]:
    """What Nsight Compute wrote as CSV, page "raw", in base units; in the order in which the kernels came first.

    Raises:
        ProfileError: there is no table, or a metric is missing in it.
    """
    if NO_PERMISSION in text:
        raise ProfileError(
            f"{NO_PERMISSION}: the driver keeps the performance counters for administrators; run as root, or load the "
            "driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = [line for line in text.splitlines() if line.startswith('"')]
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        told = [line for line in text.splitlines() if line.startswith("==") and "PROF" not in line]
        raise ProfileError(f"Nsight Compute wrote no table ({told[-1] if told else 'and no reason'})")
    rows = list(csv.DictReader(lines[header:]))[1:]  # the first has the units
    if not rows:
        raise ProfileError("no kernel of paddle_kv ran")
    missing = [metric for metric in (*METRICS, SECTORS, IDEAL_SECTORS) if metric not in rows[0]]
    if missing:
        raise ProfileError(f"metrics are missing: {', '.join(missing)}")
    launches: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        launches.setdefault(short_name(row["Kernel Name"]), []).append(row)
    return [_kernel(name, of_kernel) for name, of_kernel in launches.items()]


def _kernel(name: str, launches: list[dict[str, str]]) -> Kernel:
    def median(metric: str) -> float:
        return statistics.median(_number(launch[metric]) for launch in launches)

    sectors = sum(_number(launch[SECTORS]) for launch in launches)
    ideal = sum(_number(launch[IDEAL_SECTORS]) for launch in launches)
    return Kernel(
        kernel=name,
        launches=len(launches),
        duration_us=median(DURATION_NS) / 1e3,
        dram_gbps=median(DRAM_BYTES_PER_S) / 1e9,
        percent_of_dram_peak=median(DRAM_PERCENT),
        l2_hit_percent=median(L2_HIT_PERCENT),
        warp_efficiency_percent=median(WARP_PERCENT),
        excess_sectors_percent=100 * (1 - ideal / sectors) if sectors else 0.0,
    )


def _number(text: str) -> float:
    return float(text.replace(",", "")) if text else float("nan")


def short_name(demangled: str) -> str:
    """Without namespaces and arguments, with template arguments: ``PermuteTiles<1, 0>``."""
    plain = demangled.replace("(anonymous namespace)::", "").replace("::<unnamed>::", "::").removeprefix("void ")
    plain = re.sub(r"\bunnamed>::|\b\w+::", "", plain)  # Nsight Compute leaves "paddle_kv::<" out
    found = re.match(r"\w+(<.*>)?(?=\()", plain)
    return found[0] if found else plain


def profile(bench_arguments: list[str], ncu: str) -> str:
    """The text that Nsight Compute wrote about one run of the benchmark."""
    program = [sys.executable, "-m", "paddle_kv.cli.main", "bench", *bench_arguments, "--warmups=0", "--repeats=1"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ncu_metrics()
        command += ["--kernel-name-base", "demangled", "--kernel-name", "regex:paddle_kv"]
        done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if done.returncode and NO_PERMISSION not in text:
        told = (done.stderr or done.stdout or text).strip().splitlines()
        raise ProfileError(f"the profiled benchmark ended with {done.returncode}: {told[-1] if told else ''}")
    return text


def ncu_metrics() -> list[str]:
    return ["--metrics", ",".join(METRICS), "--section", SECTION]


def table(kernels: list[Kernel]) -> str:
    names = [column.name for column in fields(Kernel)]
    rows = [
        [value if isinstance(value, str) else f"{value:.4g}" for value in asdict(kernel).values()] for kernel in kernels
    ]
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (names, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def write_csv(kernels: list[Kernel], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Kernel)])
        writer.writeheader()
        writer.writerows(asdict(kernel) for kernel in kernels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--json", type=Path, help="the same as JSON")
    parser.add_argument("--read", type=Path, help="take this recorded file, run nothing")
    parser.add_argument("--ncu", default=shutil.which("ncu"), help="the program of Nsight Compute")
    parser.add_argument("--metrics", action="store_true", help="print the options that ask ncu for them")
    given, bench_arguments = parser.parse_known_args()
    if given.metrics:
        print(" ".join(ncu_metrics()))
        return
    try:
        if given.read is None and given.ncu is None:
            raise ProfileError("there is no ncu in PATH; install Nsight Compute (it comes with the CUDA toolkit)")
        kernels = read_ncu(given.read.read_text() if given.read else profile(bench_arguments, given.ncu))
    except (ProfileError, OSError) as error:
        sys.exit(f"profile_kernels: {error}")
    print(table(kernels))
    if given.csv:
        write_csv(kernels, given.csv)
    if given.json:
        given.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n")


if __name__ == "__main__":
    main()
