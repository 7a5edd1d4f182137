"""What tools/profile_kernels.py makes of a recorded run of Nsight Compute (H200, copy_blocks and vectorized_copy)."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import profile_kernels
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("ncu_recorded.csv")
BOTH = ["RunOnPairs<Copy, CacheTable<64>, HostPairs<280>>", "CopyPieces<0>"]


def run(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "profile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def recorded_with(column: str, values: list[str]) -> str:
    """The recorded file with other values in one column, the first of them for the units."""
    lines = [line for line in RECORDED.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    changed = io.StringIO()
    writer = csv.DictWriter(changed, list(rows[0]), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    for row, value in zip(rows, values, strict=True):
        writer.writerow({**row, column: value})
    return changed.getvalue()


def test_the_recorded_run() -> None:
    first, second = profile_kernels.read_ncu(RECORDED.read_text())
    assert [first.kernel, second.kernel] == BOTH
    assert (first.launches, first.duration_us) == (2, pytest.approx((8.480 + 8.384) / 2))
    assert (second.launches, second.duration_us) == (2, pytest.approx((9.952 + 9.920) / 2))
    assert first.dram_gbps == pytest.approx(998, abs=0.5) and second.dram_gbps == pytest.approx(846.9, abs=0.05)
    assert first.percent_of_dram_peak == pytest.approx(20.83, abs=0.005)
    assert second.l2_hit_percent == pytest.approx(56.015)
    assert first.warp_efficiency_percent == 100 and first.excess_sectors_percent == 0


def test_excess_sectors_are_a_share_of_all_launches() -> None:
    text = recorded_with(profile_kernels.SECTORS, ["sector", "1,000", "3,000", "0", "0"])
    ideal = recorded_with(profile_kernels.IDEAL_SECTORS, ["sector", "900", "2,100", "0", "0"])
    rows = list(csv.DictReader(io.StringIO(text)))
    for row, other in zip(rows, csv.DictReader(io.StringIO(ideal)), strict=True):
        row[profile_kernels.IDEAL_SECTORS] = other[profile_kernels.IDEAL_SECTORS]
    both = io.StringIO()
    writer = csv.DictWriter(both, list(rows[0]), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    first, second = profile_kernels.read_ncu(both.getvalue())
    assert first.excess_sectors_percent == pytest.approx(25)
    assert second.excess_sectors_percent == 0


def test_table_csv_and_json(tmp_path: Path) -> None:
    table, lines = tmp_path / "t.csv", tmp_path / "t.json"
    done = run("--read", str(RECORDED), "--csv", str(table), "--json", str(lines))
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in BOTH)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kernel"] for row in rows] == BOTH
    for row, told in zip(rows, json.loads(lines.read_text()), strict=True):
        assert set(row) == set(told) and float(row["dram_gbps"]) == told["dram_gbps"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "run as root"),
        ("==PROF== Connected\n==ERROR== The application returned an error code (9).", "error code (9)"),
        ("", "wrote no table"),
        ('"ID","Kernel Name"\n"",""\n', "no kernel of paddle_kv ran"),
        ('"ID","Kernel Name"\n"",""\n"0","f()"\n', "metrics are missing: gpu__time_duration.sum"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(text)
    done = run("--read", str(path))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and says in done.stderr


def test_without_nsight_compute(tmp_path: Path) -> None:
    done = run("--op", "copy_blocks", env={"PATH": str(tmp_path)})  # type: ignore[arg-type]
    assert done.returncode == 1
    assert "there is no ncu in PATH" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("unnamed>::CopyPieces<0>(unnamed>::Launch)", "CopyPieces<0>"),
        ("void paddle_kv::<unnamed>::PermuteTiles<(bool)1>(paddle_kv::<unnamed>::Launch)", "PermuteTiles<(bool)1>"),
        ("paddle_kv::(anonymous namespace)::CopyChunks(paddle_kv::(anonymous namespace)::Launch)", "CopyChunks"),
    ],
)
def test_names(demangled: str, name: str) -> None:
    assert profile_kernels.short_name(demangled) == name
