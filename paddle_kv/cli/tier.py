"""The commands ``paddle-kv tier``."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import rich
import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ..errors import TierError

app = typer.Typer(help="Look after folders in which blocks are kept.", no_args_is_help=True)

Folder = Annotated[
    Path, typer.Argument(help="A folder of the engine files.", exists=True, file_okay=False, show_default=False)
]


def _line(text: str) -> None:
    rich.get_console().print(escape(text), soft_wrap=True)


@app.command()
def stat(folder: Folder) -> None:
    """Count the objects. Works while a server uses the folder."""
    from ..tiers import inspection

    sizes = inspection.count(folder)
    for size, number in sizes.items():
        _line(f"{number} objects of {size} bytes")
    _line(f"{sum(sizes.values())} objects, {sum(size * n for size, n in sizes.items())} bytes")


@app.command()
def verify(folder: Folder) -> None:
    """Read every object and compare every checksum; exit code 1 if any is damaged. No server may use the folder."""
    _verify(folder, delete=False)


@app.command()
def gc(
    folder: Folder,
    capacity_bytes: Annotated[
        int | None, typer.Option(help="Delete the oldest objects beyond this, and give their bytes to the disk.", min=0)
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Read all objects, delete the damaged ones.")] = False,
) -> None:
    """Delete what former versions left, and on request more. No server may use the folder."""
    from ..tiers import inspection

    try:
        oldest = inspection.collect_garbage(folder, capacity_bytes)
    except TierError as error:
        raise typer.BadParameter(str(error)) from None
    _line(f"deleted: {oldest} beyond the capacity")
    if damaged:
        _verify(folder, delete=True)


def _verify(folder: Path, *, delete: bool) -> None:
    from ..tiers import inspection

    with Progress(transient=True) as bar:
        task = bar.add_task("reading")
        try:
            found = inspection.verify(
                folder, lambda done, total: bar.update(task, completed=done, total=total), delete=delete
            )
        except TierError as error:
            raise typer.BadParameter(str(error)) from None
    for name, number in found.sets.most_common():
        _line(f"{number} objects of {name}")
    for where in found.damaged[:20]:
        _line(f"damaged: {where}")
    _line(f"{found.objects} objects, {found.bytes} bytes read; {len(found.damaged)} damaged{' and deleted' * delete}")
    raise typer.Exit(1 if found.damaged and not delete else 0)


@app.command()
def bench(
    where: Annotated[str, typer.Argument(help="A folder on the disk to measure, or mooncake:HOST:PORT of a master.")],
    objects: Annotated[int, typer.Option(help="Objects, all at once.", min=1)] = 256,
    kib: Annotated[int, typer.Option(help="KiB of an object, in 32 layers.", min=1)] = 1024,
    threads: Annotated[int, typer.Option(help="Calls at once.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Runs of which the median is shown.", min=1)] = 5,
) -> None:
    """Store and load objects, beside bare calls of the system or the store, and fio where it is installed."""
    from ..bench import tiers

    kind, _, master = where.partition(":")
    with contextlib.ExitStack() as stack:
        inside = None
        if kind != "mooncake":
            master = ""
            Path(where).mkdir(parents=True, exist_ok=True)
            inside = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
        bar = stack.enter_context(Progress(transient=True))
        task = bar.add_task("measuring")
        case = tiers.Case(inside, objects, kib << 10, threads, repeats, master)
        try:
            rows = tiers.measure(case, lambda done, total, _: bar.update(task, completed=done, total=total))
        except (ValueError, MemoryError, ImportError, TierError) as error:
            raise typer.BadParameter(str(error)) from None
    table = Table("way", "MiB/s", "CPU s/GiB", "layer 0 after")
    for row in rows:
        cpu = "" if row.cpu_s_per_gib is None else f"{row.cpu_s_per_gib:.3f}"
        first = "" if row.first_layer is None else f"{row.first_layer:.1%}"
        table.add_row(row.what, f"{row.mib_per_s:.0f}", cpu, first)
    rich.get_console().print(table)
