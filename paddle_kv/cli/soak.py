"""The command ``paddle-kv soak``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..backend.work import ENGINES
from ..devices import has_gpu
from ..testing.soak.run import Report, Setup, Soak
from ..testing.soak.traffic import Traffic
from . import environment
from .files import output_file, writing

Engine = Enum("Engine", {name: name for name in ENGINES}, type=str)
PoolLayout = Enum("PoolLayout", {name: name for name in ("layer_first", "block_first")}, type=str)


def soak(
    minutes: Annotated[float, typer.Option(help="How long.", min=0)] = 1.0,
    moves: Annotated[int | None, typer.Option(help="Stop after so many block moves.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same calls.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, gpu, gpu:N; empty takes a GPU where there is one.")] = "",
    layers: Annotated[int, typer.Option(min=1)] = 8,
    block_bytes: Annotated[int, typer.Option(help="One block of the keys of one layer.", min=1)] = 64,
    device_blocks: Annotated[int, typer.Option(min=1)] = 384,
    host_blocks: Annotated[int, typer.Option(min=1)] = 1024,
    blocks: Annotated[int, typer.Option(help="Most blocks of one transfer.", min=1)] = 48,
    in_flight: Annotated[int, typer.Option(help="Most transfers at once.", min=1)] = 8,
    pool_layout: PoolLayout = PoolLayout.layer_first,
    engine: Annotated[Engine, typer.Option(help="How bytes are moved on a GPU.")] = Engine.auto,
    layers_per_event: Annotated[int, typer.Option(min=1)] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.", callback=output_file)
    ] = None,
) -> None:
    """Random traffic of a server with every block checked on both sides; exit code 1 at the first difference."""
    setup = Setup(
        device=device or ("gpu" if has_gpu() else "cpu"),
        layers=layers,
        block_bytes=block_bytes,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        pool_layout=pool_layout.value,
        engine=engine.value,
        layers_per_event=layers_per_event,
        traffic=Traffic(max_blocks=blocks, max_in_flight=in_flight, seed=seed),
    )
    try:
        made = Soak(setup)
    except (ValueError, MemoryError) as error:
        raise typer.BadParameter(str(error)) from None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with made, Progress(*columns, transient=True) as bar:
        task = bar.add_task("starting", total=60 * minutes)

        def show(running: Soak) -> None:
            bar.update(task, completed=running.report.seconds, description=_line(running))

        report = made.run(minutes=minutes, max_moves=moves, show=show)
    rich.print(_table(report))
    if json_file:
        with writing():
            json_file.write_text(json.dumps({"environment": environment.summary(), **asdict(report)}, indent=1) + "\n")
    if report.failure:
        rich.print(f"[red]FAIL[/] {escape(report.failure)}")
        raise typer.Exit(1)


def _line(running: Soak) -> str:
    counts, seconds = running.server.counts, max(running.report.seconds, 1e-9)
    return (
        f"{counts['moves'] / 1e6:.1f} M moves, {counts['moves'] / seconds / 1e6:.2f} M/s, "
        f"{counts['bytes'] / seconds / 1e9:.2f} GB/s, {len(running.server.flights)} in flight"
    )


def _table(report: Report) -> Table:
    table = Table(show_header=False)
    counts = report.counts
    gigabytes = counts.get("bytes", 0) / 1e9
    rows = {
        "seconds": f"{report.seconds:.1f}",
        "block moves": f"{counts.get('moves', 0):,} ({report.moves_per_s:,.0f} a second, {gigabytes:.1f} GB)",
        "mismatches": str(report.mismatches),
        "compared on the device": f"{counts.get('device_checks', 0):,}",
        "compared on the host": f"{counts.get('host_checks', 0):,}",
        "transfers": f"{counts.get('transfers', 0):,} in {counts.get('steps', 0):,} steps",
        "cancelled, refused, restarts": ", ".join(
            f"{counts.get(n, 0):,}" for n in ("cancelled", "refused", "restarts")
        ),
    }
    if report.samples:
        first, last = report.samples[0], report.samples[-1]
        for name in first:
            rows[name] = f"{first[name]:,} at the first checkpoint, {last[name]:,} at the last of {len(report.samples)}"
    for name, text in rows.items():
        table.add_row(name, text)
    return table
