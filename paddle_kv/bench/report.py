"""What people and programs read of a benchmark: table, CSV, JSON, plots, and the comparison of two runs."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .run import Result, Row

_KEY = (
    "model",
    "tp",
    "op",
    "tokens_per_block",
    "num_blocks",
    "pattern",
    "direction",
    "memory",
    "alignment",
    "load",
    "backend",
)


def write_csv(result: Result, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in result.rows)


def write_json(result: Result, path: Path) -> None:
    path.write_text(json.dumps(result.as_dict(), indent=1) + "\n")


def read_json(path: Path) -> Result:
    """Raises ValueError where the file is not one of ours."""
    try:
        data = json.loads(path.read_text())
        return Result(data["machine"], [Row(**row) for row in data["rows"]])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file that paddle-kv bench --json wrote ({error})") from None


def table(result: Result) -> Any:
    """A rich table."""
    from rich.table import Table

    facts = {"op": ", ".join(dict.fromkeys(row.op for row in result.rows)), **result.machine}
    made = Table(title="  ".join(f"{name}: {value}" for name, value in facts.items()))
    for column in ("tokens", "blocks", "piece", "pattern", "way", "align", "load", "method"):
        made.add_column(column)
    for column in ("ms", "noise", "GB/s", "of peak", "host us", "load slowed"):
        made.add_column(column, justify="right")
    for row in result.rows:
        made.add_row(
            str(row.tokens_per_block),
            str(row.num_blocks),
            _bytes(row.copy_size),
            row.pattern,
            row.direction,
            str(row.alignment),
            row.load,
            row.backend,
            f"{row.median_ms:.3f}",
            f"{row.noise_percent:.1f} %",
            f"{row.bandwidth_gbps:.1f}",
            f"{row.percent_of_peak:.0f} %",
            f"{row.host_us:.0f}",
            "" if row.load_slowdown_percent is None else f"{row.load_slowdown_percent:.1f} %",
        )
    return made


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            return f"{size:g} {unit}"
        size = size / 1024 if size % 1024 else size // 1024  # type: ignore[assignment]
    return str(size)


def plot(result: Result, path: Path) -> None:
    """Bandwidth over piece size for each method, one panel per direction; the ceiling as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = sorted({row.direction for row in result.rows})
    figure, panels = pyplot.subplots(1, len(ways), figsize=(6 * len(ways), 4.5), squeeze=False)
    for panel, way in zip(panels[0], ways, strict=True):
        for name in dict.fromkeys(row.backend for row in result.rows):
            rows = [row for row in result.rows if row.backend == name and row.direction == way]
            points = sorted((row.copy_size, row.bandwidth_gbps) for row in rows)
            style = {"linestyle": "--", "color": "black"} if name == "contiguous" else {"marker": "o"}
            panel.plot(*zip(*points, strict=True), label=name, **style) if points else None
        panel.set_xscale("log", base=2)
        panel.set_xlabel("bytes of one piece")
        panel.set_ylabel("GB/s")
        panel.set_ylim(bottom=0)
        panel.set_title(way)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_roofline(result: Result, path: Path) -> None:
    """Rate over bytes per call: the slope is the cost of a call, the roof the link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row.backend for row in result.rows):
        points = sorted((row.total_bytes, row.bandwidth_gbps) for row in result.rows if row.backend == name)
        panel.plot(
            *zip(*points, strict=True), marker=".", linestyle="none" if name != "contiguous" else "--", label=name
        )
    panel.axhline(max(row.bandwidth_gbps for row in result.rows if row.backend == "contiguous"), color="grey", lw=1)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("bytes moved by one call")
    panel.set_ylabel("GB/s")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare(before: Result, after: Result) -> Any:
    """A rich table of the rows that both have: ratio of the rates, and whether it is more than the noise."""
    from rich.table import Table

    made = Table()
    for column in (
        "tokens",
        "blocks",
        "pattern",
        "way",
        "load",
        "method",
        "before GB/s",
        "after GB/s",
        "ratio",
        "noise",
    ):
        made.add_column(column)
    earlier = {tuple(getattr(row, name) for name in _KEY): row for row in before.rows}
    for row in after.rows:
        old = earlier.get(tuple(getattr(row, name) for name in _KEY))
        if old is None:
            continue
        ratio, noise = row.bandwidth_gbps / old.bandwidth_gbps, row.noise_percent + old.noise_percent
        verdict = "" if abs(ratio - 1) * 100 <= noise else ("  faster" if ratio > 1 else "  slower")
        made.add_row(
            str(row.tokens_per_block),
            str(row.num_blocks),
            row.pattern,
            row.direction,
            row.load,
            row.backend,
            f"{old.bandwidth_gbps:.1f}",
            f"{row.bandwidth_gbps:.1f}",
            f"{ratio:.3f}{verdict}",
            f"{noise:.1f} %",
        )
    return made
