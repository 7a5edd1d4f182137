"""What people and programs read of a benchmark: table, CSV, JSON, plots, and the comparison of two runs."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Sequence
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
        rows = [Row(**row) for row in data["rows"]]
        for row in rows:
            if not all(isinstance(getattr(row, name), (str, int)) for name in _KEY):
                raise TypeError("an axis of a row is neither text nor a number")
            if not row.bandwidth_gbps > 0 or not (row.noise_percent is None or row.noise_percent >= 0):
                raise ValueError("a row has no rate above 0")
        return Result(dict(data["machine"]), rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file that paddle-kv bench --json wrote ({error})") from None


# The axes of a table: a column where the rows differ, else in its title.
_AXES: dict[str, Callable[[Row], str]] = {
    "tokens": lambda row: str(row.tokens_per_block),
    "blocks": lambda row: str(row.num_blocks),
    "piece": lambda row: _bytes(row.copy_size),
    "pattern": lambda row: row.pattern,
    "way": lambda row: row.direction,
    "align": lambda row: str(row.alignment),
    "load": lambda row: row.load,
}


def table(result: Result) -> Any:
    """A rich table. What is the same in all rows stands in the title, so that it fits into a terminal."""
    from rich.table import Table

    facts = {name: ", ".join(_values(result.rows, name)) for name in ("model", "tp", "op", "memory")}
    values = {name: [of(row) for row in result.rows] for name, of in _AXES.items()}
    facts |= {name: texts[0] for name, texts in values.items() if len(set(texts)) == 1}
    beside = any(row.load_slowdown_percent is not None for row in result.rows)
    made = Table(title="  ".join(f"{name}: {value}" for name, value in {**facts, **result.machine}.items()))
    axes = [name for name in _AXES if name not in facts]
    for column in (*axes, "method"):
        made.add_column(column, no_wrap=True)
    for column in ("ms", "noise", "GB/s", "of peak", "host us", *["load slowed"] * beside):
        made.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(result.rows):
        made.add_row(
            *(values[name][number] for name in axes),
            row.backend,
            f"{row.median_ms:.3f}",
            _percent(row.noise_percent),
            f"{row.bandwidth_gbps:.1f}",
            f"{row.percent_of_peak:.0f} %",
            f"{row.host_us:.0f}",
            *[_percent(row.load_slowdown_percent)] * beside,
        )
    return made


def _values(rows: Sequence[Row], name: str) -> list[str]:
    """The values of an axis, each once, in the order of the rows."""
    return list(dict.fromkeys(str(getattr(row, name)) for row in rows))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"


def _bytes(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            return f"{size:g} {unit}"
        size = size / 1024 if size % 1024 else size // 1024  # type: ignore[assignment]
    return str(size)


# What tells the panels of a picture apart, beside the direction.
_PANEL = {"pattern": "{}", "num_blocks": "{} blocks", "alignment": "aligned to {}"}


def plot(result: Result, path: Path) -> None:
    """Bandwidth over piece size for each method, one panel per direction and further axis; the ceiling dashed."""
    _draw(result, path, "copy_size", "bytes of one piece", tuple(_PANEL), _bandwidth, line="-")


def plot_roofline(result: Result, path: Path) -> None:
    """Rate over bytes per call, both logarithmic: the roof is the link, the slopes are times of one call."""
    _draw(result, path, "total_bytes", "bytes moved by one call", ("pattern", "alignment"), _roofline, line="none")


def _draw(
    result: Result,
    path: Path,
    size: str,
    label: str,
    axes: Sequence[str],
    finish: Callable[[Any, list[Row]], None],
    line: str,
) -> None:
    """One column of panels per direction, one line of them per combination of those ``axes`` that were swept."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    methods = list(dict.fromkeys(row.backend for row in result.rows))
    ways = list(dict.fromkeys(row.direction for row in result.rows))
    swept = [name for name in axes if len(_values(result.rows, name)) > 1]
    cases = list(dict.fromkeys(tuple(getattr(row, name) for name in swept) for row in result.rows))
    shape = (len(cases), len(ways))
    figure, panels = pyplot.subplots(*shape, figsize=(6 * len(ways), 4.5 * len(cases)), squeeze=False)
    for panel, (case, way) in zip(panels.flat, itertools.product(cases, ways), strict=True):
        here = [r for r in result.rows if r.direction == way and tuple(getattr(r, name) for name in swept) == case]
        for number, name in enumerate(methods):
            points = sorted((getattr(row, size), row.bandwidth_gbps) for row in here if row.backend == name)
            style = {"linestyle": line, "marker": "o", "color": f"C{number - 1}"}
            if name == "contiguous":
                style = {"linestyle": "--", "marker": ".", "color": "black"}
            panel.plot(*zip(*points, strict=True), label=name, **style) if points else None
        panel.set_xscale("log", base=2)
        sizes = sorted({getattr(row, size) for row in here})
        panel.set_xticks(sizes, [_bytes(one) for one in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel(label)
        panel.set_ylabel("GB/s")
        panel.set_title(", ".join([way, *(_PANEL[name].format(v) for name, v in zip(swept, case, strict=True))]))
        panel.grid(alpha=0.3)
        finish(panel, here)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bandwidth(panel: Any, rows: list[Row]) -> None:
    panel.set_ylim(bottom=0)


def _roofline(panel: Any, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rates = [row.bandwidth_gbps for row in rows]
    roof, low = max(rates), min(rates) / 2
    panel.set_yscale("log")
    panel.axhline(roof, color="grey", lw=1, label=f"roof: {roof:.3g} GB/s")
    limits = panel.get_xlim()
    for exponent in range(-6, 2):
        seconds = 10.0**exponent  # of one call
        ends = [bytes_ / seconds / 1e9 for bytes_ in limits]
        if ends[1] > low and ends[0] < roof:
            panel.plot(limits, ends, color="grey", lw=0.7, linestyle=":")
            at = max(limits[0], low * seconds * 1e9)
            place = {"xytext": (3, 3), "textcoords": "offset points", "clip_on": True}
            panel.annotate(f"{_time(seconds)} a call", (at, at / seconds / 1e9), fontsize=7, color="grey", **place)
    panel.set_xlim(limits)
    panel.set_ylim(low, 1.5 * roof)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _time(seconds: float) -> str:
    for unit, each in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.99 * each:
            return f"{seconds / each:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us"


# What the columns of a comparison are called; axes that do not differ stand in its title.
_COLUMNS = {"tokens_per_block": "tokens", "num_blocks": "blocks", "direction": "way", "alignment": "align"}


def compare(before: Result, after: Result) -> Any:
    """A rich table of the rows that both have: ratio of the rates, and whether it is more than the noise.

    Raises:
        ValueError: no row is in both.
    """
    from rich.table import Table

    earlier = {_key(row): row for row in before.rows}
    pairs = [(earlier[_key(new)], new) for new in after.rows if _key(new) in earlier]
    if not pairs:
        raise ValueError("the two files have no measurement in common: no row has the same axes in both")
    both = [row for _, row in pairs]
    axes = [name for name in _KEY if name == "backend" or len(_values(both, name)) > 1]
    facts = {_COLUMNS.get(name, name): _values(both, name)[0] for name in _KEY if name not in axes}
    for name in dict.fromkeys([*before.machine, *after.machine]):
        was, now = (str(run.machine.get(name, "unknown")) for run in (before, after))
        facts[name] = was if was == now else f"{was}, then {now}"
    made = Table(title="  ".join(f"{name}: {value}" for name, value in facts.items()))
    for name in axes:
        made.add_column("method" if name == "backend" else _COLUMNS.get(name, name), no_wrap=True)
    for column in ("before GB/s", "after GB/s", "ratio", "noise", ""):
        made.add_column(column, justify="right", no_wrap=True)
    for old, row in pairs:
        ratio, noise = row.bandwidth_gbps / old.bandwidth_gbps, _sum(old.noise_percent, row.noise_percent)
        verdict = "" if noise is None or abs(ratio - 1) * 100 <= noise else ("faster" if ratio > 1 else "slower")
        rates = [f"{old.bandwidth_gbps:.1f}", f"{row.bandwidth_gbps:.1f}"]
        made.add_row(*(str(getattr(row, name)) for name in axes), *rates, f"{ratio:.3f}", _percent(noise), verdict)
    alone = [len(run.rows) - len(pairs) for run in (before, after)]
    if any(alone):
        made.caption = f"left out: {alone[0]} rows that are in the first file alone, {alone[1]} in the second"
    return made


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in _KEY)


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
