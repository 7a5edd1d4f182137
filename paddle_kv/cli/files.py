"""Files that a command writes at its end: what is wrong with them is told before it starts to measure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import typer

PROBE_BYTES = 1 << 16


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
    if not os.statvfs(path.parent).f_bavail:
        raise typer.BadParameter(f"no space is left for {path}")
    return path


def check_distinct(files: Mapping[str, Path | None], read: Sequence[Path] = ()) -> None:
    """BadParameter if two options name one file, or one names a file that is read."""
    seen = {path.resolve(): "the file that is read" for path in read}
    for option, path in files.items():
        if path is not None and (other := seen.setdefault(path.resolve(), option)) != option:
            raise typer.BadParameter(f"{path} is also {other}", param_hint=option)


@contextmanager
def writing() -> Iterator[None]:
    """Around what is written at the end. A disk that has become full is told in a sentence; what was printed stands."""
    try:
        yield
    except OSError as error:
        typer.echo(f"cannot write {error.filename or 'a file'}: {error.strerror}", err=True)
        raise typer.Exit(1) from None


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
        try:
            with TemporaryFile(dir=path) as file:
                file.write(bytes(PROBE_BYTES))
        except OSError as error:
            raise typer.BadParameter(f"nothing can be written in {path}: {error.strerror}") from None
    return path


def positive(value: float) -> float:
    """The callback of an option that is a time or a rate."""
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value:g} must be a finite number above 0")
    return value


def _check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("pictures need matplotlib: pip install 'paddle_kv[plots]'")
