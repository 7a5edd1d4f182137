"""``paddle-kv bench --calibrate``: measures the engines of this machine and stores the sizes for "auto"."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import rich.table

from ..backend import calibration
from ..backend.calibration import NEVER, EngineSizes
from ..bench import calibrate as measuring
from ..bench import engines
from ..devices import has_gpu


def run(show: Callable[[int, int, str], None]) -> tuple[EngineSizes, Path, list[engines.Row]]:
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
    sizes = measuring.sizes_from(rows, EngineSizes())
    return sizes, calibration.store(device_name(0), sizes), rows


def table(sizes: EngineSizes) -> rich.table.Table:
    """The sizes for people."""
    made = rich.table.Table("engine", "way", "alone", "beside compute", title='engine "auto" from these piece sizes on')
    names = (("copy_engine", "d2h"), ("copy_engine", "h2d"), ("staging", "d2h"), ("staging", "h2d"))
    for (engine, way), each in zip(names, astuple(sizes)[:4], strict=True):
        made.add_row(engine, way, *(text(size) for size in each))
    return made


def write_csv(rows: list[engines.Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, engines.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def text(size_bytes: int) -> str:
    return "never" if size_bytes >= NEVER else f"{size_bytes >> 10} KiB"
