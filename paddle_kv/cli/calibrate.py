"""``paddle-kv bench --calibrate``: measures the engines of this machine and stores what they cost for "auto"."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import rich.table

from ..backend import calibration
from ..backend.calibration import SIZES_KIB, EngineCosts
from ..bench import calibrate as measuring
from ..bench import engines
from ..devices import has_gpu


def run(show: Callable[[int, int, str], None]) -> tuple[EngineCosts, Path, list[engines.Row]]:
    """Measures and stores; the next scheduler uses it.

    Raises:
        ValueError: there is no GPU.
    """
    if not has_gpu():
        raise ValueError("--calibrate measures the engines of a GPU; there is none")
    from ..backend.cupy_backend import device_name

    rows: list[engines.Row] = []
    for row in measuring.measure():
        rows.append(row)
        show(len(rows), measuring.NUM_ROWS, f"{row['method']} {row['way']} {row['piece_kib']} KiB beside {row['load']}")
    costs = measuring.costs_from(rows)
    return costs, calibration.store(device_name(0), costs), rows


def table(costs: EngineCosts) -> rich.table.Table:
    """The costs for people."""
    made = rich.table.Table(
        "engine", "beside", *(f"{size} KiB" for size in SIZES_KIB), title="what a MiB costs in pieces of a size, us"
    )
    for field in fields(costs):
        engine, _, way = field.name.rpartition("_")
        for beside in ("alone", "beside"):
            of_sizes = getattr(getattr(costs, field.name), beside)
            load = "nothing" if beside == "alone" else "compute"
            made.add_row(f"{engine}, {way}", load, *(f"{ns / 1e3:.1f}" for ns in of_sizes))
    return made


def write_csv(rows: list[engines.Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, engines.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def copy_engine_from(costs: EngineCosts, way: str, beside: str) -> str:
    """From which size on scattered pieces are cheapest by the copy engine."""
    copy_engine, kernel = (getattr(getattr(costs, f"{engine}_{way}"), beside) for engine in ("copy_engine", "kernel"))
    others = [size for size, own, other in zip(SIZES_KIB, copy_engine, kernel, strict=True) if own > other]
    larger = [size for size in SIZES_KIB if size > max(others, default=0)]
    return f"{larger[0]} KiB" if larger else "never"
