"""Files that a command writes at its end: what is wrong with their names is told before it starts to measure."""

from __future__ import annotations

from pathlib import Path

import typer


def output_file(path: Path | None) -> Path | None:
    """The callback of an option. A measurement of minutes must not end in an error about its output."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; a file is expected")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} for {path.name}")
    return path


def picture_file(path: Path | None) -> Path | None:
    """:func:`output_file` for a PNG file."""
    if path is not None and path.suffix != ".png":
        raise typer.BadParameter(f"{path} must end in .png")
    return output_file(path)


def output_folder(path: Path | None) -> Path | None:
    """A folder that is made where it is missing."""
    if path is not None and path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file; a folder is expected")
    return path
