"""Files that a command writes at its end: what is wrong with them is told before it starts to measure."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import typer


def output_file(path: Path | None) -> Path | None:
    """The callback of an option. A measurement of minutes must not end in an error about its output."""
    if path is None:
        return None
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; a file is expected")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent} for {path.name}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


def picture_file(path: Path | None) -> Path | None:
    """:func:`output_file` for a PNG file."""
    if path is not None:
        _check_matplotlib()
        if path.suffix != ".png":
            raise typer.BadParameter(f"{path} must end in .png")
    return output_file(path)


def picture_folder(path: Path | None) -> Path | None:
    """A folder for PNG files, which is made where it is missing."""
    if path is not None:
        _check_matplotlib()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{path} is no folder, and none can be made: {error}") from None
    return path


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("pictures need matplotlib: pip install 'paddle_kv[plots]'")
