"""The programs that the pages name run in a checkout in which the operators were built in place."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_CUPY = [
    "bench_call_cost",
    "bench_cold_parts",
    "bench_cpu_ops",
    "bench_index",
    "bench_permute",
    "bench_ranks",
    "bench_topk_rows",
    "fuzz_ops",
]


@pytest.mark.parametrize("tool", WITHOUT_CUPY)
def test_a_tool_finds_the_package(tool: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / f"{tool}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {tool}.py")


def test_every_tool_that_imports_the_package_says_where_it_is() -> None:
    texts = {path.name: path.read_text() for path in sorted((ROOT / "tools").glob("*.py"))}
    importing = {name: text for name, text in texts.items() if "from paddle_kv" in text}
    assert len(importing) > len(WITHOUT_CUPY)
    assert [name for name, text in importing.items() if "sys.path." not in text] == []


def test_no_percentile_is_above_the_largest(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "bench_call_cost.py"), "--backend", "none"]
    options = ["--blocks", "1", "--layers", "2", "--repeats", "3", "--out", str(tmp_path)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    rows = list(csv.DictReader((tmp_path / "bench_call_cost.csv").open()))
    assert len(rows) > 3
    for row in rows:
        assert float(row["median_us"]) <= float(row["p90_us"]) <= float(row["most_us"])
